"""Put prediction layers back into a target: its other files byte for byte, the index rewritten.

Invariants: a weight file without a replaced tensor is copied whole. One with replaced tensors of
the same dtype and shape keeps its header, so that stitching what was extracted gives the target's
own bytes. Tensors that the target does not have go into a file of their own, or, when the target
has one file only, into that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specctl.checkpoint import DTYPE_BITS, Checkpoint, TensorEntry
from specctl.contract.file_names import CONFIG, INDEX, SINGLE
from specctl.convert.directory import PROVENANCE
from specctl.convert.engine import SideFile
from specctl.convert.fixes import get, put
from specctl.convert.layout import Layout, OutputFile, header_bytes, json_bytes
from specctl.formats.names import as_ref
from specctl.formats.written import Copy, TensorSource, num_bytes

ADDED_FILE = "model-mtp.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def stitched_layout(target: Checkpoint, tensors: Mapping[str, TensorSource]) -> Layout:
    """Return the weight files of the target with tensors replaced and added.

    Args:
        target: the target; its weights are safetensors.
        tensors: key in the target -> bytes; those of the draft have origin `draft`.
    """
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in target.tensors.values():
        by_file.setdefault(entry.file, []).append(entry)
    added = {key: source for key, source in tensors.items() if key not in target.tensors}
    is_single = target.layout == "single"
    files: list[OutputFile] = []
    for name in sorted(by_file):
        entries = sorted(by_file[name], key=lambda entry: (entry.begin, entry.end, entry.key))
        files.append(_file(target, name, entries, tensors, added if is_single else {}))
    if added and not is_single:
        files.append(_new_file(ADDED_FILE, added))
    index = None if is_single else _index(target, tuple(files))
    return Layout(files=tuple(files), index=index)


def _file(
    target: Checkpoint,
    name: str,
    entries: list[TensorEntry],
    tensors: Mapping[str, TensorSource],
    added: Mapping[str, TensorSource],
) -> OutputFile:
    kept: dict[str, TensorSource] = {
        entry.key: tensors.get(entry.key, Copy(ref=as_ref(entry), origin="target"))
        for entry in entries
    }
    is_alike = all(_is_alike(entry, kept[entry.key]) for entry in entries)
    if added or not is_alike:
        return _new_file(name, {**kept, **added})
    data_start = min(entry.begin for entry in entries)
    header = target.read_range(name, 0, data_start)
    return OutputFile(name=name, header=header, tensors=kept)


def _is_alike(entry: TensorEntry, source: TensorSource) -> bool:
    return (entry.dtype, entry.shape) == (source.dtype, source.out_shape)


def _new_file(name: str, tensors: Mapping[str, TensorSource]) -> OutputFile:
    ordered = dict(sorted(tensors.items(), key=lambda item: (-_width(item[1]), item[0])))
    return OutputFile(name=name, header=header_bytes(ordered), tensors=ordered)


def _width(source: TensorSource) -> int:
    return DTYPE_BITS[source.dtype]


def _index(target: Checkpoint, files: tuple[OutputFile, ...]) -> bytes:
    raw = target.read_file(INDEX) or b"{}"
    stored: dict[str, Any] = json.loads(raw)
    weight_map = {key: file.name for file in files for key in file.tensors}
    total = sum(num_bytes(source) for file in files for source in file.tensors.values())
    before = {key: entry.nbytes for key, entry in target.tensors.items()}
    if stored.get("weight_map") == weight_map and total == sum(before.values()):
        return raw
    metadata = stored.get("metadata")
    return json_bytes(
        {
            **stored,
            "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
    )


def stitched_config(target: Checkpoint, pointer: str | None, count: int) -> bytes:
    """Return config.json with the number of prediction layers; the stored bytes when it has it."""
    raw = target.read_file(CONFIG) or b"{}"
    if pointer is None or target.config is None or get(target.config, pointer) == count:
        return raw
    config = json.loads(json.dumps(target.config))
    put(config, pointer, count)
    return json_bytes(config)


def target_side_files(target: Checkpoint) -> Mapping[str, SideFile]:
    """Return every file beside the weights: tokenizer, templates, licences, the card."""
    return {name: SideFile(origin="target", name=name) for name in _side_names(target)}


def _side_names(target: Checkpoint) -> Iterator[str]:
    sizes = target.store.sizes()
    written = {CONFIG, INDEX, SINGLE, PROVENANCE, *(file.file for file in target.files)}
    for name in target.file_names:
        if name in written or name.endswith((*_WEIGHTS, ".index.json")) or name not in sizes:
            continue
        path = target.store.local_path(name)
        if path is None or path.is_file():
            yield name
