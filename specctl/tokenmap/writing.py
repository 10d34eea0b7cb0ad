"""Write a token map in every form that engines read, with what it was made from beside it.

Invariants: all files of one map appear together or not at all; the same map gives the same bytes;
a file of an earlier map in the same directory is replaced or removed, never left beside the new.
Files: `token_map.json` (JSON list of target ids, ascending), `token_map.pt` (the same, pickled),
`token_map.safetensors` (`d2t` I64 offsets, `t2d` BOOL mask), `freq_N.pt` (pickled list, most
frequent first), `token_map.provenance.json` (origin, and the digest of each of the others).
*Source:* vLLM and SGLang read a plain list (JSON or `.pt`); d2t offset and t2d mask as SafeAILab
EAGLE-3 and Speculators store them; FR-Spec publishes `freq_32768.pt` in order of frequency.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from specctl.checkpoint import atomic_write
from specctl.checkpoint.writing import stream_safetensors
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.vocabulary_map import absolute_to_offsets, pack_int64, target_mask
from specctl.tokenmap.files import (
    JSON_FILE,
    METADATA_KEY,
    METADATA_NAMES,
    PROVENANCE_FILE,
    PT_FILE,
    SAFETENSORS_FILE,
    read_provenance,
)
from specctl.tokenmap.pt_file import stream_pt_ints

_FREQUENCY_FILE = re.compile(r"freq_\d+\.pt")
_NAMES = (JSON_FILE, PT_FILE, SAFETENSORS_FILE, PROVENANCE_FILE)


def frequency_file(size: int) -> str:
    """Return FR-Spec's name of a map of `size` ids."""
    return f"freq_{size}.pt"


def write_token_map(
    directory: Path,
    ids_target: Sequence[int],
    *,
    target_vocab_size: int,
    provenance: Mapping[str, Any],
    ids_by_rank: Sequence[int] | None = None,
) -> tuple[Path, ...]:
    """Write all files of a map; returns their paths.

    Args:
        directory: made when absent; removed again when nothing could be written.
        ids_target: [R] target ids in draft-id order.
        target_vocab_size: length of `t2d`.
        provenance: JSON values that say what the map was made from; no times, no machine paths.
        ids_by_rank: [R] the same ids, most frequent first; None: their order is not known and
            there is no FR-Spec file.

    Raises:
        OSError: the directory cannot be made or written.
    """
    contents = _contents(ids_target, target_vocab_size, provenance, ids_by_rank)
    made = _make_directories(directory)
    try:
        # Each file is renamed into place only after the last one was written to disk.
        with ExitStack() as stack:
            for name, data in contents.items():
                stack.enter_context(atomic_write(directory / name)).write(data)
            stale = _stale(directory, contents)
    except BaseException:
        with suppress(OSError):  # a directory with other files stays
            for path in made:
                path.rmdir()
        raise
    for path in stale:
        path.unlink(missing_ok=True)
    return tuple(directory / name for name in contents)


def _contents(
    ids_target: Sequence[int],
    target_vocab_size: int,
    provenance: Mapping[str, Any],
    ids_by_rank: Sequence[int] | None,
) -> dict[str, bytes]:
    """Return file name -> bytes, the provenance last."""
    tensors = {
        "d2t": ("I64", (len(ids_target),), pack_int64(absolute_to_offsets(ids_target))),
        "t2d": ("BOOL", (target_vocab_size,), target_mask(ids_target, target_vocab_size)),
    }
    known = {name: provenance[name] for name in METADATA_NAMES if name in provenance}
    stream = BytesIO()
    stream_safetensors(
        stream, tensors, {"format": "pt", METADATA_KEY: json.dumps(known, sort_keys=True)}
    )
    contents = {
        JSON_FILE: ("[" + ", ".join(map(str, ids_target)) + "]\n").encode(),
        PT_FILE: _pt_bytes(ids_target),
        SAFETENSORS_FILE: stream.getvalue(),
    }
    if ids_by_rank is not None:
        contents[frequency_file(len(ids_by_rank))] = _pt_bytes(ids_by_rank)
    digests = {name: digest_bytes(data) for name, data in contents.items()}
    text = json.dumps(
        {**provenance, "files": digests}, indent=2, sort_keys=True, ensure_ascii=False
    )
    contents[PROVENANCE_FILE] = f"{text}\n".encode()
    return contents


def _pt_bytes(ids_target: Sequence[int]) -> bytes:
    stream = BytesIO()
    stream_pt_ints(stream, ids_target)
    return stream.getvalue()


def _stale(directory: Path, contents: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Return the FR-Spec files of the map that was here before; only its own are touched."""
    before = read_provenance(directory / PROVENANCE_FILE)
    names = () if before is None else before.files
    return tuple(
        directory / name
        for name in names
        if _FREQUENCY_FILE.fullmatch(name) and name not in contents
    )


def remove_map_beside(directory: Path) -> None:
    """Remove the files of a map that an earlier run left where this one writes directories.

    Only what the provenance of that map lists goes. Such a map would stand beside a report that
    does not describe it.

    Raises:
        OSError: a file cannot be removed.
    """
    before = read_provenance(directory / PROVENANCE_FILE)
    if before is None:
        return
    for name in (*before.files, PROVENANCE_FILE):
        if name in _NAMES or _FREQUENCY_FILE.fullmatch(name):
            (directory / name).unlink(missing_ok=True)


def _make_directories(directory: Path) -> tuple[Path, ...]:
    """Make `directory` and its parents; return those that were missing, deepest first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return tuple(missing)
