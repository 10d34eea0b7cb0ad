"""What the stored numbers show: scans against plain loops, verdicts on made weights."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from specctl.checks import scan as scanning
from specctl.checks.freshness import fresh_law
from specctl.checks.likeness import Table, check_likeness, check_map_rows, compare
from specctl.checks.scan import ELEMENT_BYTES, cosine, floats, scan
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.ops.deep import deep_findings
from specctl.ops.load import fit, load
from tests.unit.specctl.formats.edits import CHECKPOINTS


@dataclass(frozen=True)
class Bytes:
    """A checkpoint whose one file is in memory; only ranges are read from it."""

    data: bytes

    def iter_range(self, file: str, begin: int, end: int, chunk_bytes: int) -> object:
        for place in range(begin, end, chunk_bytes):
            yield self.data[place : min(place + chunk_bytes, end)]

    def read_range(self, file: str, begin: int, end: int, *, where: str) -> bytes:
        return self.data[begin:end]


def entry(dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    size = math.prod(shape) * ELEMENT_BYTES[dtype]
    return TensorEntry(key="w.weight", file="f", dtype=dtype, shape=shape, begin=0, end=size)


def seen(dtype: str, shape: tuple[int, ...], data: bytes) -> scanning.Scan:
    return scan(Bytes(data), entry(dtype, shape))  # type: ignore[arg-type]


def is_finite(dtype: str, element: bytes) -> bool:
    """Say it the slow way, from the definition of each type."""
    if dtype in ("F16", "F32", "F64"):
        (value,) = struct.unpack({"F16": "<e", "F32": "<f", "F64": "<d"}[dtype], element)
        return math.isfinite(value)
    if dtype == "BF16":
        (value,) = struct.unpack("<f", b"\0\0" + element)
        return math.isfinite(value)
    if dtype == "F8_E4M3":
        return element[0] & 0x7F != 0x7F
    if dtype == "F8_E5M2":
        return element[0] & 0x7C != 0x7C
    return element[0] != (0xFF if dtype == "F8_E8M0" else 0x80)


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BYTES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_non_finite_elements_are_counted_as_by_definition(dtype: str, data: st.DataObject) -> None:
    size = ELEMENT_BYTES[dtype]
    edge = st.sampled_from([0x00, 0x7C, 0x7F, 0x80, 0xF0, 0xFC, 0xFF, 0x3C])
    count = data.draw(st.integers(1, 40))
    raw = bytes(data.draw(st.lists(edge, min_size=count * size, max_size=count * size)))
    elements = [raw[place : place + size] for place in range(0, len(raw), size)]
    bad = [place for place, element in enumerate(elements) if not is_finite(dtype, element)]
    found = seen(dtype, (count,), raw)
    assert found.num_nonfinite == len(bad)
    assert found.first_nonfinite == (bad[0] if bad else None)
    assert found.is_zero == (not any(raw))
    assert found.is_constant == (len(set(elements)) == 1)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.sampled_from([b"\0\0" * 3, b"\0\1" * 3, b"\1\0\0\0\0\0"]), min_size=1))
def test_rows_of_zeros_and_copies_are_counted(rows: list[bytes]) -> None:
    found = seen("BF16", (len(rows), 3), b"".join(rows))
    zero = [place for place, row in enumerate(rows) if not any(row)]
    assert list(found.zero_rows) == zero
    assert found.num_zero_rows == len(zero)
    assert found.num_sampled_rows == len(rows) - len(zero)
    assert found.num_distinct_rows == len({row for row in rows if any(row)})


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_pieces_join_without_a_seam(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = ELEMENT_BYTES[dtype]
    raw = bytearray(random.Random(1).randbytes(40 * 6 * size))
    raw[size - 1 :: size] = b"\x3c" * 240
    raw[7 * 6 * size : 8 * 6 * size] = bytes(6 * size)
    bad = b"\xff" * size
    raw[31 * 6 * size : 31 * 6 * size + size] = bad
    whole = seen(dtype, (40, 6), bytes(raw))
    monkeypatch.setattr(scanning, "PIECE_BYTES", 3 * 6 * size + 1)
    assert seen(dtype, (40, 6), bytes(raw)) == whole
    monkeypatch.setattr(scanning, "PIECE_BYTES", 2 * size)  # smaller than a row
    narrow = seen(dtype, (40, 6), bytes(raw))
    assert (narrow.num_nonfinite, narrow.first_nonfinite) == (1, 31 * 6)
    assert whole.zero_rows == (7,)


@pytest.mark.parametrize("shape", [(2, 0), (3,), (2, 2, 5)])
def test_a_tensor_without_the_bytes_it_says_is_not_read(shape: tuple[int, ...]) -> None:
    wrong = TensorEntry(key="w", file="f", dtype="BF16", shape=shape, begin=0, end=8)
    assert not scanning.is_scannable(wrong)
    assert scanning.is_scannable(entry("BF16", (2, 2)))
    assert not scanning.is_scannable(
        TensorEntry(key="w", file="f", dtype="I64", shape=(1,), begin=0, end=8)
    )


def test_memory_stays_bounded_whatever_the_size(tmp_path: Path) -> None:
    shape, size = (160, 1 << 20), 2 * (160 << 20)
    with (tmp_path / "model.safetensors").open("wb") as file:
        header = b'{"w":{"dtype":"BF16","shape":[160,1048576],"data_offsets":[0,%d]}}' % size
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # sparse: zeros, the slowest bytes to compare
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    found = scan(checkpoint, checkpoint.tensors["w"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.is_zero
    assert found.num_zero_rows == shape[0]
    assert peak < 32 << 20


@pytest.mark.parametrize(("dtype", "code"), [("F16", "e"), ("F32", "f"), ("F64", "d")])
def test_stored_elements_become_numbers(dtype: str, code: str) -> None:
    values = [0.5, -2.0, 0.0, 1024.0]
    read = floats(dtype, struct.pack(f"<4{code}", *values))
    assert read is not None
    assert list(read) == values


def test_bf16_becomes_numbers_and_eight_bits_do_not() -> None:
    read = floats("BF16", b"\x80\x3f\x00\xc0")
    assert read is not None
    assert list(read) == [1.0, -2.0]
    assert floats("F8_E4M3", b"\x40") is None
    assert cosine(read, read) == pytest.approx(1.0)


def rows_of(make: object, rows: int = 64, columns: int = 64) -> tuple[bytes, ...]:
    values = [[make(row, column) for column in range(columns)] for row in range(rows)]  # type: ignore[operator]
    return tuple(struct.pack(f"<{columns}f", *row) for row in values)


def test_a_fresh_matrix_is_told_from_a_trained_one() -> None:
    draw = random.Random(7)
    matrix = entry("F32", (64, 64))
    fresh = rows_of(lambda row, column: draw.gauss(0.0, 0.02))
    found = fresh_law(matrix, fresh, {})
    assert found is not None
    assert found.spread == 0.02
    assert fresh_law(matrix, fresh, {"initializer_range": 0.006}) is None
    linear = rows_of(lambda row, column: draw.uniform(-0.125, 0.125))
    found = fresh_law(matrix, linear, {})
    assert found is not None
    assert "Linear" in found.name
    uneven = rows_of(lambda row, column: draw.gauss(0.0, 0.02) * (1.0 + 0.3 * (row % 2)))
    columns = rows_of(lambda row, column: draw.gauss(0.0, 0.02) * (1.4 if column % 5 else 0.2))
    moved = rows_of(lambda row, column: draw.gauss(0.0, 0.021))
    for trained in (uneven, columns, moved):
        assert fresh_law(matrix, trained, {}) is None
    assert fresh_law(entry("F32", (8, 8)), rows_of(lambda row, column: 0.02, 8, 8), {}) is None


def table(data: bytes, rows: int, columns: int, dtype: str = "F32") -> Table:
    return Table(checkpoint=Bytes(data), entry=entry(dtype, (rows, columns)))  # type: ignore[arg-type]


def test_likeness_compares_rows_by_target_id() -> None:
    draw = random.Random(3)
    target = [struct.pack("<8f", *(draw.gauss(0, 1) for _ in range(8))) for _ in range(40)]
    ids = (3, 39, 0, 17, 8)
    theirs = table(b"".join(target), 40, 8)
    gathered = table(b"".join(target[token] for token in ids), 5, 8)
    same = compare(gathered, theirs, ids)
    assert same is not None
    assert (same.kind, same.num_rows) == ("equal", 5)
    shifted = compare(gathered, theirs, (4, 1, 9, 20, 30))
    assert shifted is not None
    assert shifted.kind == "unrelated"
    last = bytearray(b"".join(target))
    last[-1] ^= 1  # one bit of the last row, which no sample holds when there are many
    changed = compare(table(bytes(last), 40, 8), theirs, None)
    assert changed is not None
    assert changed.kind == "trained"
    assert compare(table(bytes(40 * 6 * 4), 40, 6), theirs, None) is None
    assert compare(table(bytes(40 * 8 * 4), 40, 8), theirs, None) is None


def test_an_embedding_in_another_dtype_differs_by_rounding_only() -> None:
    draw = random.Random(5)
    values = [[draw.gauss(0, 1) for _ in range(64)] for _ in range(20)]
    single = table(b"".join(struct.pack("<64f", *row) for row in values), 20, 64)
    half = table(b"".join(struct.pack("<64e", *row) for row in values), 20, 64, "F16")
    found = compare(half, single, None)
    assert found is not None
    assert found.kind == "trained"
    (finding,) = check_likeness("embedding", half, single)
    assert (finding.code, finding.severity) == ("SD526", "info")
    assert "up to rounding" in finding.message


@pytest.mark.parametrize("name", ["medusa-clean", "hydra-prefix", "hf-llama-bin"])
def test_weights_in_torch_archives_are_read_through(name: str) -> None:
    assert deep(name) == {}


def deep(name: str, target: str | None = None) -> dict[str, str]:
    """Return code and role of each finding -> its text; steps must cover every tensor."""
    loaded, other = load(str(CHECKPOINTS / name)), None
    if target is not None:
        other = load(str(CHECKPOINTS / target))
        loaded = fit(loaded, other).draft
    steps: list[int] = []
    found = deep_findings(loaded, other, lambda file, done, total: steps.append(done))
    assert steps == sorted(steps)
    assert len(steps) == len(loaded.checkpoint.tensors)
    keys = [d.code + (" head" if "lm_head" in d.where and target else "") for d in found]
    texts = [f"{d.severity} {d.message} {' '.join(d.notes)}" for d in found]
    return dict(zip(keys, texts, strict=True))


def test_the_places_and_figures_of_what_was_found() -> None:
    assert "the first at [1, 5]" in deep("speculators-eagle3-numbers-nan")["SD520"]
    zero = deep("speculators-eagle3-numbers-zero-embedding")["SD521"]
    assert "Speculators 0.9.0" in zero
    rows = deep("speculators-eagle3-numbers-zero-rows")["SD522"]
    assert rows.startswith("warning 16 of 24 rows")
    assert "the first is row 4" in rows
    unrelated = deep("speculators-eagle3-numbers-unrelated", "hf-llama-tiny")
    assert unrelated["SD527"].startswith("warning `embed_tokens.weight`")
    assert unrelated["SD527 head"].startswith("info `lm_head.weight`")
    mask = deep("pard-numbers-mask-row")
    assert "row 18" in mask["SD529"]
    assert deep("pard-numbers-mask-beside") == {}


def test_a_zero_embedding_is_not_called_unrelated_as_well() -> None:
    found = deep("speculators-eagle3-numbers-zero-embedding", "hf-llama-tiny")
    assert sorted(found) == ["SD521", "SD527 head"]


def test_a_file_that_ends_too_early_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(CHECKPOINTS / "speculators-eagle3-numbers-clean"))

    def cut(self: Checkpoint, *arguments: object) -> object:
        raise DiagnosticError(diagnose("SD108", where="model.safetensors", message="it ends"))

    monkeypatch.setattr(Checkpoint, "iter_range", cut)
    found = deep_findings(loaded, None, lambda file, done, total: None)
    assert [d.code for d in found] == ["SD108"]


@pytest.mark.parametrize("change", [1, -1, None])
def test_rows_of_other_ids_than_the_map_says_are_proof(change: int | None) -> None:
    """What a map off by one id looks like beside a head that was trained from the target's."""
    rng = random.Random(7)
    rows = [struct.pack("<32f", *(rng.gauss(0.5, 1.0) for _ in range(32))) for _ in range(60)]
    theirs = table(b"".join(rows), 60, 32)
    ids = tuple(sorted(rng.sample(range(1, 59), 24)))
    stated = tuple(rng.sample(ids, 24)) if change is None else tuple(i + change for i in ids)
    ours = table(b"".join(rows[token] for token in ids), 24, 32)
    assert list(check_map_rows(ours, theirs, ids, "d2t")) == []
    (found,) = check_map_rows(ours, theirs, stated, "d2t")
    assert (found.code, found.severity, found.where) == ("SD532", "error", "d2t")
    assert found.expected == "cosine 1.000"


def test_rows_that_only_lean_the_same_way_are_unrelated() -> None:
    """Rows of one real head have a mean cosine of 0.2 to 0.3, whatever their ids."""
    rng = random.Random(8)
    rows = [struct.pack("<32f", *(rng.gauss(1.0, 1.0) for _ in range(32))) for _ in range(60)]
    theirs = table(b"".join(rows), 60, 32)
    turned = compare(table(b"".join(rows[::-1]), 60, 32), theirs, None)
    assert turned is not None
    assert turned.kind == "unrelated"
    assert turned.cosine > 0.3
