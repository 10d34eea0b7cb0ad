"""The engine: bytes, shards, provenance, bounded memory."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from convert_files import (
    CHECKPOINTS,
    TENSORS,
    copies,
    names_in,
    pattern,
    plan_of,
    read_weights,
    ref,
    run,
)

from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.checkpoint.sources import LocalStore
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.file_names import INDEX
from specctl.convert import files
from specctl.convert.layout import plan_layout
from specctl.convert.sizes import parse_size
from specctl.formats.written import Joined, Rows, Span, TensorSource, Values


def codes(error: pytest.ExceptionInfo[DiagnosticError]) -> list[str]:
    return [item.code for item in error.value.diagnostics]


@pytest.mark.parametrize("has_digests", [True, False])
def test_copied_tensors_have_their_bytes_and_digests(
    source: Checkpoint, tmp_path: Path, has_digests: bool
) -> None:
    out = tmp_path / "out"
    outcome = run(plan_of(source, copies(source)), out, has_digests=has_digests)
    weights = read_weights(out)
    assert outcome.state == "written"
    assert weights == read_weights(tmp_path / "source")
    assert names_in(out) == {"config.json", "model.safetensors", "specctl.json"}
    assert open_checkpoint(out).diagnostics == ()
    table = json.loads((out / "specctl.json").read_text())["tensors"]
    for key, (_, _, data) in weights.items():
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        assert table[key].get("digest") == (digest if has_digests else None)
        assert table[key]["from"] == f"draft model.safetensors::{key}"


@pytest.mark.parametrize("has_digests", [True, False])
def test_without_the_kernels_copy_the_bytes_are_the_same(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_digests: bool
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EXDEV, "other device")

    def move_nothing(*args: object, **kwargs: object) -> int:
        return 0  # as some file systems do

    for number, answer in enumerate((refuse, move_nothing)):
        monkeypatch.setattr(os, "copy_file_range", answer)
        out = tmp_path / f"out{number}"
        run(plan_of(source, copies(source)), out, has_digests=has_digests)
        assert read_weights(out) == read_weights(tmp_path / "source")


class FarStore(LocalStore):
    """A store that gives ranges only, as a hub does."""

    def local_path(self, name: str) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("has_digests", [True, False])
def test_a_source_on_a_hub_is_read_by_ranges(
    source: Checkpoint, tmp_path: Path, has_digests: bool
) -> None:
    far = replace(source, store=FarStore(tmp_path / "source"))
    tensors = {**copies(far), "a": Rows(ref=ref(far, "a"), rows=(5, 0))}
    run(plan_of(far, tensors), tmp_path / "far", has_digests=has_digests)
    run(plan_of(source, tensors), tmp_path / "near", has_digests=has_digests)
    near, distant = (tmp_path / name / "model.safetensors" for name in ("near", "far"))
    assert near.read_bytes() == distant.read_bytes()


def test_a_pickle_is_copied_by_its_ranges(tmp_path: Path) -> None:
    pickled = open_checkpoint(CHECKPOINTS / "hf-llama-bin")
    assert pickled.container == "pickle"
    run(plan_of(pickled, copies(pickled)), tmp_path / "out")
    weights = read_weights(tmp_path / "out")
    assert {key: tensor[2] for key, tensor in weights.items()} == {
        key: pickled.read_bytes(key) for key in pickled.tensors
    }


ROW_LISTS = [(0, 1, 2), (5, 0, 3), (4,), (1, 3, 5), (5, 4, 3, 2, 1, 0), (2, 2)]


@pytest.mark.parametrize("rows", ROW_LISTS)
@pytest.mark.parametrize("gap_bytes", [0, 1 << 20])
@pytest.mark.parametrize("has_digests", [True, False])
def test_gathered_rows_stand_in_the_order_given(
    source: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: tuple[int, ...],
    gap_bytes: int,
    has_digests: bool,
) -> None:
    monkeypatch.setattr(files, "GAP_BYTES", gap_bytes)
    monkeypatch.setattr(files, "_MAX_VIEWS", 2)
    stored = read_weights(tmp_path / "source")["a"][2]
    tensors = {**copies(source), "a": Rows(ref=ref(source, "a"), rows=rows)}
    plan = plan_of(source, tensors)
    run(plan, tmp_path / "out", has_digests=has_digests)
    weights = read_weights(tmp_path / "out")
    assert weights["a"] == (
        "BF16",
        [len(rows), 5],
        b"".join(stored[row * 10 : row * 10 + 10] for row in rows),
    )
    assert weights["b"] == read_weights(tmp_path / "source")["b"]
    assert run(plan, tmp_path / "out").state == "unchanged"
    if has_digests:
        table = json.loads((tmp_path / "out" / "specctl.json").read_text())["tensors"]
        assert table["a"]["digest"] == "sha256:" + hashlib.sha256(weights["a"][2]).hexdigest()


def test_a_row_outside_the_matrix_is_our_fault(source: Checkpoint, tmp_path: Path) -> None:
    tensors: dict[str, TensorSource] = {"a": Rows(ref=ref(source, "a"), rows=(6,))}
    with pytest.raises(DiagnosticError) as error:
        run(plan_of(source, tensors), tmp_path / "out")
    assert codes(error) == ["SD108"]
    assert not (tmp_path / "out").exists()


def test_joined_spans_and_values(source: Checkpoint, tmp_path: Path) -> None:
    a, b = ref(source, "a"), ref(source, "b")
    stored = read_weights(tmp_path / "source")
    tensors: dict[str, TensorSource] = {
        "pair": Joined(parts=(b, b), leading=2),
        "long": Joined(parts=(a, a)),
        "cut": Span(ref=a, begin_bytes=20, shape=(2, 5)),
        "new": Values(dtype="I64", out_shape=(2,), data=pattern(16)),
    }
    run(plan_of(source, tensors), tmp_path / "out")
    assert read_weights(tmp_path / "out") == {
        "pair": ("F32", [2, 4, 3], stored["b"][2] * 2),
        "long": ("BF16", [12, 5], stored["a"][2] * 2),
        "cut": ("BF16", [2, 5], stored["a"][2][20:40]),
        "new": ("I64", [2], pattern(16)),
    }


def test_large_outputs_have_shards_and_an_index(source: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(plan_of(source, copies(source), max_shard_bytes=50), out)
    shards = sorted(names_in(out) - {"config.json", "specctl.json", INDEX})
    assert len(shards) > 1
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(len(d[2]) for d in read_weights(out).values())
    assert read_weights(out) == read_weights(tmp_path / "source")
    assert open_checkpoint(out).diagnostics == ()


def test_every_tensor_is_aligned_to_its_elements(source: Checkpoint) -> None:
    layout = plan_layout(copies(source))
    (file,) = layout.files
    assert [source.dtype for source in file.tensors.values()] == [
        "I64", "F32", "F32", "F32", "BF16", "BOOL",
    ]  # fmt: skip
    assert len(file.header) % 8 == 0


def test_the_same_plan_gives_the_same_bytes(source: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(source, copies(source))
    run(plan, tmp_path / "one")
    run(plan, tmp_path / "two")
    for name in names_in(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_provenance_names_no_path_and_no_time(source: Checkpoint, tmp_path: Path) -> None:
    run(plan_of(source, copies(source)), tmp_path / "out")
    text = (tmp_path / "out" / "specctl.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["sources"]["draft"]["source"] == "source"
    assert time.strftime("%Y-%m") not in text


_MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from convert_files import copies, plan_of, ref
from specctl.checkpoint import open_checkpoint
from specctl.convert.engine import write
from specctl.formats.written import Rows

source = open_checkpoint({source!r})
tensors = copies(source)
tensors["rows"] = Rows(ref=ref(source, "big"), rows=tuple(range(0, 20000, 3)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write(plan_of(source, tensors), Path({out!r}), is_forced=False, has_digests={digests}, check=print)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("has_digests", [True, False])
def test_memory_stays_bounded(tmp_path: Path, has_digests: bool) -> None:
    """A 160 MB source in one tensor; the bound is for any size."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    end = 20_000 * 2_000 * 4
    header = json.dumps({"big": {"dtype": "F32", "shape": [20_000, 2_000],
                                 "data_offsets": [0, end]}}).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    with (source / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    code = _MEMORY.format(
        tests=str(Path(__file__).parent),
        source=str(source),
        out=str(tmp_path / "out"),
        digests=has_digests,
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown = int(done.stdout.split()[-1])
    assert grown < 64 * 1024


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("512 MiB", 512 << 20), ("17", 17), ("1.5kb", 1500), ("2tib", 2 << 40)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 apples", "0", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"no size|less than one byte"):
        parse_size(text)
