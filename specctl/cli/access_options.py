"""The options that say what is allowed while a source is read."""

from __future__ import annotations

from typing import Annotated

import typer

Offline = Annotated[
    bool,
    typer.Option(
        "--offline", help="Open no connection: hub sources are read from the hub's local cache."
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Pass over objects of unknown classes in a .bin file (SD150) instead of refusing it "
        "(SD103). Nothing in it is run.",
    ),
]
