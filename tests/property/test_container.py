"""Whatever the bytes are, opening a checkpoint ends in diagnostics, never in another exception."""

from __future__ import annotations

import pickle
import tempfile
import zipfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specctl.checkpoint import Checkpoint, open_checkpoint, read_pt_ints, write_safetensors
from specctl.checkpoint.tensor_entry import DTYPE_BITS
from specctl.contract.codes import CODES
from specctl.contract.diagnostics import DiagnosticError
from tests.fuzz_strategies import configs, indexes, mutated, weight_files

COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(checkpoint: Checkpoint) -> None:
    for diagnostic in checkpoint.diagnostics:
        assert diagnostic.code in CODES
        assert diagnostic.where
        assert "\n" not in diagnostic.message
        diagnostic.oneline().encode("utf-8")
    for key, entry in checkpoint.tensors.items():
        size = (checkpoint.root / entry.file).stat().st_size
        assert 0 <= entry.begin <= entry.end
        assert entry.nbytes * 8 == DTYPE_BITS[entry.dtype] * product(entry.shape)
        if entry.end <= size:
            assert len(checkpoint.read_bytes(key)) == entry.nbytes
        else:
            assert any(d.severity == "error" for d in checkpoint.diagnostics)


def product(shape: tuple[int, ...]) -> int:
    result = 1
    for dim in shape:
        result *= dim
    return result


def open_and_check(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for file, raw in files.items():
            (root / file).write_bytes(raw)
        try:
            checkpoint = open_checkpoint(root)
        except DiagnosticError as error:
            assert all(d.code in CODES for d in error.diagnostics)  # noqa: PT017 - both ways end well
        else:
            check(checkpoint)


@settings(COMMON, max_examples=150)
@given(weight_files, configs)
def test_any_weight_file_and_config(weights: bytes, config: bytes) -> None:
    open_and_check({"model.safetensors": weights, "config.json": config})


@settings(COMMON, max_examples=120)
@given(indexes, weight_files, weight_files)
def test_any_index_over_any_shards(index: bytes, first: bytes, second: bytes) -> None:
    open_and_check(
        {
            "model.safetensors.index.json": index,
            "a.safetensors": first,
            "model.safetensors": second,
        }
    )


plain = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@settings(COMMON, max_examples=80)
@given(
    mutated(st.builds(pickle.dumps, plain, st.integers(0, 5))) | st.binary(max_size=30),
    st.booleans(),
    st.data(),
)
def test_any_pickle(raw: bytes, is_archive_mutated: bool, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "pytorch_model.bin"
        with zipfile.ZipFile(path, "w") as out:
            out.writestr("x/data.pkl", raw)
        if is_archive_mutated:
            path.write_bytes(data.draw(mutated(st.just(path.read_bytes()))))
        check(open_checkpoint(Path(name)))
        try:
            values = read_pt_ints(path)
        except DiagnosticError as error:
            assert error.diagnostics[0].code in CODES  # noqa: PT017 - both ways end well
        else:
            assert all(type(v) is int for v in values)


@settings(COMMON, max_examples=30)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5).filter(
            lambda key: key != "__metadata__"
        ),
        st.tuples(st.sampled_from(["U8", "I64", "BF16"]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_written_files_read_back_clean(plan: dict[str, tuple[str, list[int]]]) -> None:
    tensors = {
        key: (dtype, tuple(shape), bytes(product(tuple(shape)) * DTYPE_BITS[dtype] // 8))
        for key, (dtype, shape) in plan.items()
    }
    with tempfile.TemporaryDirectory() as name:
        write_safetensors(Path(name) / "model.safetensors", tensors)
        checkpoint = open_checkpoint(Path(name))
        assert checkpoint.diagnostics == ()
        assert {k: (t.dtype, t.shape) for k, t in checkpoint.tensors.items()} == {
            k: (dtype, shape) for k, (dtype, shape, _) in tensors.items()
        }
