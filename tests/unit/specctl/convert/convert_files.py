"""Small checkpoints and plans for the tests of `specctl.convert`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from specctl.checkpoint import Checkpoint, open_checkpoint, write_safetensors
from specctl.contract.manifest import TensorRef
from specctl.convert.engine import Outcome, Plan, write
from specctl.convert.layout import DEFAULT_SHARD_BYTES, json_bytes, plan_layout
from specctl.convert.provenance import provenance_record
from specctl.formats.names import as_ref
from specctl.formats.written import Copy, Origin, TensorSource

ROOT = Path(__file__).parents[4]
CHECKPOINTS = ROOT / "fixtures" / "checkpoints"

TENSORS = {
    "a": ("BF16", (6, 5)),
    "ids": ("I64", (3,)),
    "mask": ("BOOL", (7,)),
    "b": ("F32", (4, 3)),
    "scalar": ("F32", ()),
    "nothing": ("F32", (0, 3)),
}

Stored = tuple[str, list[int], bytes]


def pattern(count: int, seed: int = 0) -> bytes:
    """Bytes that differ at every place that a mistake of a row or an offset would reach."""
    return bytes((place * 7 + place // 251 + seed) % 256 for place in range(count))


def make_source(directory: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Checkpoint:
    """Write and open a checkpoint of the given dtypes and shapes, its bytes a pattern."""
    widths = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}
    directory.mkdir(parents=True)
    stored = {}
    for seed, (key, (dtype, shape)) in enumerate(tensors.items()):
        count = widths[dtype]
        for size in shape:
            count *= size
        stored[key] = (dtype, shape, pattern(count, seed))
    write_safetensors(directory / "model.safetensors", stored, {"format": "pt"})
    (directory / "config.json").write_text("{}")
    return open_checkpoint(directory)


def ref(checkpoint: Checkpoint, key: str) -> TensorRef:
    return as_ref(checkpoint.tensors[key])


def copies(checkpoint: Checkpoint) -> dict[str, TensorSource]:
    return {key: Copy(ref=ref(checkpoint, key)) for key in checkpoint.tensors}


def plan_of(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorSource],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Plan:
    sources: dict[Origin, Checkpoint] = {"draft": checkpoint}
    return Plan(
        checkpoints=sources,
        config=json_bytes({"architectures": ["Test"]}),
        layout=plan_layout(tensors, max_shard_bytes=max_shard_bytes),
        side_files={},
        record=provenance_record(
            sources,
            command="convert",
            source_format="test",
            written_format="test",
            given={},
            diagnostics=(),
        ),
    )


def read_weights(directory: Path) -> dict[str, Stored]:
    """Return key -> dtype, shape and bytes of every weight file, read without the code under
    test.
    """
    found: dict[str, Stored] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8 : 8 + length]).items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                start = 8 + length
                found[key] = (entry["dtype"], entry["shape"], data[start + begin : start + end])
    return found


def config_of(directory: Path) -> dict[str, object]:
    config = json.loads((directory / "config.json").read_text())
    assert isinstance(config, dict)
    return config


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def run(plan: Plan, out: Path, *, is_forced: bool = False, has_digests: bool = True) -> Outcome:
    return write(
        plan, out, is_forced=is_forced, has_digests=has_digests, check=lambda directory: None
    )
