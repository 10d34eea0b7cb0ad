"""`python -m specctl` is `specctl`."""

from __future__ import annotations

from specctl.cli.app import main

main()
