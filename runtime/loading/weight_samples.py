"""Tell two checkpoints of one shape apart without reading them: a digest over samples of weights.

A manifest knows headers, not numbers: before and after training a checkpoint has the same header,
and the same fingerprint. Processes that share the work of one model compare this digest.
Invariants: it depends on names and bytes of the weight files, not on where they lie; a few hundred
bytes of every tensor are read. Bytes between the samples may differ unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specctl.contract.codec import resolve_source
from specctl.contract.manifest import Manifest

_SAMPLE_BYTES = 256
_EVEN_SAMPLES = 256


def weights_digest(manifest: Manifest, directory: Path) -> str:
    """Return `sha256:` over samples of the target's and the draft's weights.

    Args:
        manifest: names the files.
        directory: of the manifest.
    """
    hashed = hashlib.sha256()
    target, draft = manifest.target, manifest.draft
    models = [(target.source, target.files)]
    models += [] if draft is None else [(draft.source, draft.files)]
    for written, files in models:
        source = resolve_source(written, directory)
        for entry in sorted(files, key=lambda entry: entry.file):
            hashed.update(entry.file.encode("utf-8") + b"\0")
            try:
                for sample in _samples(source / entry.file):
                    hashed.update(sample)
            except OSError as error:  # loading says what is wrong with it
                hashed.update(f"unread {error.errno}".encode())
    return f"sha256:{hashed.hexdigest()}"


def _samples(path: Path) -> Iterator[bytes]:
    """Yield bytes of every tensor of a safetensors file, or of evenly spread places."""
    with path.open("rb") as stream:
        size = path.stat().st_size
        yield size.to_bytes(8, "little")
        places = _tensor_places(stream, size) if path.suffix == ".safetensors" else []
        for place in places or range(0, size, max(1, size // _EVEN_SAMPLES)):
            stream.seek(place)
            yield stream.read(_SAMPLE_BYTES)


def _tensor_places(stream: Any, size: int) -> list[int]:
    """Return the begin, middle and end of each tensor; empty for a header that is not sound."""
    length = int.from_bytes(stream.read(8), "little")
    if length > size:
        return []
    try:
        header = json.loads(stream.read(length))
        offsets = [entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"]
        spans = sorted((int(begin), int(end)) for begin, end in offsets)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    first = 8 + length
    return [
        first + place
        for begin, end in spans
        for place in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES))
    ]
