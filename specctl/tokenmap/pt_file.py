"""Write a `.pt` file that `torch.load` reads, without PyTorch: a plain list of ints.

Invariants: the same ids give the same bytes (fixed dates, fixed order, stored members).
*Source:* torch.save since 1.6: zip with `NAME/data.pkl`, `NAME/version`, `NAME/byteorder`;
FR-Spec and SGLang token maps are a pickled list of int.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from typing import BinaryIO

_NAME = "token_map"
_DATE = (1980, 1, 1, 0, 0, 0)
_PICKLE_PROTOCOL = 2  # what torch.save uses
_FORMAT_VERSION = b"3\n"


def stream_pt_ints(stream: BinaryIO, ids_target: Sequence[int]) -> None:
    """Write a `.pt` file with a list of ints to an open stream."""
    members = (
        ("data.pkl", pickle.dumps(list(ids_target), protocol=_PICKLE_PROTOCOL)),
        ("byteorder", b"little"),
        ("version", _FORMAT_VERSION),
    )
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            info = zipfile.ZipInfo(f"{_NAME}/{name}", date_time=_DATE)
            info.create_system = 3
            info.external_attr = 0o600 << 16
            archive.writestr(info, data)
