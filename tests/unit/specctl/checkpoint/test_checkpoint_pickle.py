"""PyTorch archives are located without executing them; everything else is refused with a code."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from container_files import codes, only

from specctl.checkpoint import Access, open_checkpoint, read_pt_ints
from specctl.checkpoint.pickle_machine import PickleMachine, PickleRefusedError
from specctl.checkpoint.torch_zip import reduce_plain
from specctl.contract.diagnostics import DiagnosticError

torch = pytest.importorskip("torch", reason="torch writes the archives that are read here")

EXECUTED: list[str] = []


def record(text: str) -> None:
    EXECUTED.append(text)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return record, ("executed",)


def archive(path: Path, data_pkl: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x/data.pkl", data_pkl)
        for name, data in members.items():
            out.writestr(f"x/{name}", data)
    return path


def code_of(path: Path) -> str:
    with pytest.raises(DiagnosticError) as caught:
        read_pt_ints(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.where.startswith(path.name)
    return diagnostic.code


def test_state_dict_of_torch(directory: Path) -> None:
    state = OrderedDict(
        fc=torch.arange(6).reshape(2, 3).to(torch.bfloat16),
        norm=torch.nn.Parameter(torch.ones(3)),
        t2d=torch.tensor([True, False]),
        d2t=torch.arange(10)[4:7],
    )
    state["tied"] = state["fc"]
    torch.save(state, directory / "pytorch_model.bin")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.diagnostics == ()
    assert (checkpoint.container, checkpoint.layout) == ("pickle", "single")
    for key, tensor in state.items():
        entry = checkpoint.tensors[key]
        assert entry.shape == tuple(tensor.shape)
        stored = torch.frombuffer(bytearray(checkpoint.read_bytes(key)), dtype=tensor.dtype)
        assert torch.equal(stored.reshape(tensor.shape), tensor.detach())
    assert checkpoint.read_ints("d2t") == (4, 5, 6)
    assert checkpoint.read_mask("t2d") == b"\x01\x00"
    assert checkpoint.files[0].header_digest.startswith("sha256:")


def test_module_state_dict_carries_attributes(directory: Path) -> None:
    torch.save(torch.nn.Linear(3, 4).state_dict(), directory / "pytorch_model.bin")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.diagnostics == ()
    assert set(checkpoint.tensors) == {"weight", "bias"}


def test_sharded_pickles(directory: Path) -> None:
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, key in zip(names, "ab", strict=True):
        torch.save({key: torch.zeros(2)}, directory / name)
    torch.save({}, directory / "pytorch_model.bin")
    (directory / "pytorch_model.bin.index.json").write_text(
        f'{{"weight_map": {{"a": "{names[0]}", "b": "{names[1]}"}}}}'
    )
    checkpoint = open_checkpoint(directory)
    assert codes(checkpoint) == ["SD124"]
    assert {k: t.file for k, t in checkpoint.tensors.items()} == {"a": names[0], "b": names[1]}
    assert checkpoint.layout == "sharded"


def test_safetensors_win_over_pickles(directory: Path) -> None:
    from container_files import safetensors_bytes, table

    torch.save({"x": torch.zeros(2)}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(*table("a")))
    checkpoint = open_checkpoint(directory)
    assert checkpoint.container == "safetensors"
    assert set(checkpoint.tensors) == {"a"}


@pytest.mark.parametrize("ids", [[], [3, 1, 300_000], [-1], list(range(3000))])
def test_lists_and_tensors_of_ids(tmp_path: Path, ids: list[int]) -> None:
    torch.save(ids, tmp_path / "list.pt")
    torch.save(torch.tensor(ids, dtype=torch.int64), tmp_path / "tensor.pt")
    torch.save(torch.tensor(ids, dtype=torch.int32), tmp_path / "narrow.pt")
    for name in ("list.pt", "tensor.pt", "narrow.pt"):
        assert read_pt_ints(tmp_path / name) == tuple(ids)


def test_hostile_pickle_is_named_and_not_executed(tmp_path: Path) -> None:
    torch.save([Hostile()], tmp_path / "evil.pt")
    with pytest.raises(DiagnosticError) as caught:
        read_pt_ints(tmp_path / "evil.pt")
    assert caught.value.diagnostics[0].code == "SD103"
    assert "record" in str(caught.value.diagnostics[0].found)
    assert EXECUTED == []


class Plain:
    """An object of a class of its own, with a state."""

    def __init__(self) -> None:
        self.value = 3


class Table(dict[str, int]):
    """A dictionary of a class of its own."""


def test_allow_pickle_passes_over_unknown_objects_and_runs_nothing(directory: Path) -> None:
    state = {
        "a": torch.arange(4),
        "hostile": Hostile(),
        "object": Plain(),
        "table": Table(x=1),
        "kind": Plain,
        "names": {"x", "y"},
        "frozen": frozenset({1}),
    }
    torch.save(state, directory / "pytorch_model.bin")
    assert only(open_checkpoint(directory)).code == "SD103"
    checkpoint = open_checkpoint(directory, access=Access(allow_pickle=True))
    warning = only(checkpoint)
    assert (warning.code, warning.severity) == ("SD150", "warning")
    assert "record" in str(warning.found)
    assert set(checkpoint.tensors) == {"a"}
    assert checkpoint.read_ints("a") == (0, 1, 2, 3)
    assert EXECUTED == []


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", [Plain(), [Hostile(), 1], Table(y=2), Plain, {"z"}, 3 + 4j])
def test_every_protocol_gives_placeholders(directory: Path, protocol: int, value: object) -> None:
    raw = pickle.dumps({"a": value, "b": 1}, protocol=protocol)
    found = PickleMachine(reduce_plain, has_placeholders=True).run(raw)
    assert (list(found), found["b"]) == (["a", "b"], 1)
    assert EXECUTED == []


def test_allow_pickle_changes_nothing_for_plain_weights(directory: Path) -> None:
    torch.save({"a": torch.arange(4)}, directory / "pytorch_model.bin")
    plain, allowed = (
        open_checkpoint(directory, access=Access(allow_pickle=allow)) for allow in (False, True)
    )
    assert dict(plain.tensors) == dict(allowed.tensors)
    assert plain.diagnostics == allowed.diagnostics == ()


def test_hostile_weights_are_a_diagnostic(directory: Path) -> None:
    torch.save({"a": torch.zeros(2), "b": Hostile()}, directory / "pytorch_model.bin")
    checkpoint = open_checkpoint(directory)
    assert only(checkpoint).code == "SD103"
    assert EXECUTED == []


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL + REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02cbuiltins\nobject\n)\x81.",  # NEWOBJ
        b"\x80\x02ccollections\nOrderedDict\nq\x00}q\x01(X\x01\x00\x00\x00aK\x01ub.",  # BUILD
        b"\x82\x01.",  # EXT1
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
    ],
)
def test_every_way_to_name_code_is_refused(raw: bytes) -> None:
    with pytest.raises(PickleRefusedError):
        PickleMachine(reduce_plain).run(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b".",
        b"K\x01",
        b"(.",
        b"h\x05.",
        b"e.",
        b"K\x01K\x02a.",
        b"}(K\x01u.",
        b"}]K\x01s.",
        b"\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
        b"r\xff\xff\xff\x7f.",
        b"X\xff\xff\xff\xffa.",
        b"\x8a\xff" + b"1" * 3 + b".",
        b"I99999999999x\n.",
        b"}(" + b"(" * 100_000 + b"t" * 100_000 + b"K\x01u.",
        b"\x80\x02ccollections\nOrderedDict\nq\x00((K\x01K\x02tt\x85R.",
    ],
)
def test_damaged_pickles_are_refused(raw: bytes) -> None:
    with pytest.raises(PickleRefusedError):
        PickleMachine(reduce_plain).run(raw)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol(protocol: int) -> None:
    value = {"a": [1, -2, 1 << 70, True, None, 2.5, "x\u00e9", (), (1,), (1, 2, 3, 4)], "b": {}}
    assert PickleMachine(reduce_plain).run(pickle.dumps(value, protocol)) == value


def test_deep_nesting_in_any_place_is_refused_or_read(tmp_path: Path) -> None:
    deep = b"]" * 50_000 + b"a" * 49_999
    assert code_of(archive(tmp_path / "deep.pt", deep + b".")) == "SD133"
    storage = b"(X\x07\x00\x00\x00storage" + deep + b"X\x01\x00\x00\x000NK\x01tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00))tR."
    assert code_of(archive(tmp_path / "storage.pt", tensor)) == "SD103"


def test_other_contents_have_their_own_codes(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps([1, 2]))
    torch.save({"d2t": torch.arange(3)}, tmp_path / "table.pt")
    torch.save([1, "x"], tmp_path / "mixed.pt")
    torch.save([True], tmp_path / "flags.pt")
    torch.save(torch.zeros(3), tmp_path / "real.pt")
    torch.save(torch.zeros(2, 2, dtype=torch.int64), tmp_path / "matrix.pt")
    torch.save(torch.arange(12).reshape(3, 4).t()[0], tmp_path / "strided.pt")
    (tmp_path / "lfs.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 1\n")
    (tmp_path / "text.pt").write_bytes(b"hello")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "table.pt").read_bytes()[:-200])
    found = {p.name.split(".")[0]: code_of(p) for p in sorted(tmp_path.glob("*.pt"))}
    assert found == {
        "legacy": "SD131",
        "bare": "SD131",
        "table": "SD133",
        "mixed": "SD133",
        "flags": "SD133",
        "real": "SD133",
        "matrix": "SD133",
        "strided": "SD132",
        "lfs": "SD105",
        "text": "SD132",
        "cut": "SD132",
    }
    assert code_of(tmp_path / "absent.pt") == "SD135"


def test_damaged_archives(tmp_path: Path) -> None:
    plain = pickle.dumps([1, 2], 2)
    assert read_pt_ints(archive(tmp_path / "ok.pt", plain)) == (1, 2)
    assert code_of(archive(tmp_path / "big.pt", plain, byteorder=b"big")) == "SD132"
    with zipfile.ZipFile(tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("x/data.pkl", plain * 50)
    assert code_of(tmp_path / "deflated.pt") == "SD132"
    with zipfile.ZipFile(tmp_path / "none.pt", "w") as out:
        out.writestr("x/readme", b"")
    assert code_of(tmp_path / "none.pt") == "SD132"
    with zipfile.ZipFile(tmp_path / "two.pt", "w") as out:
        out.writestr("x/data.pkl", plain)
        out.writestr("y/data.pkl", plain)
    assert code_of(tmp_path / "two.pt") == "SD132"


def test_storage_claims_are_checked(directory: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(4)}, buffer)
    with zipfile.ZipFile(buffer) as source:
        prefix = source.namelist()[0].partition("/")[0]
        data_pkl = source.read(f"{prefix}/data.pkl")
    target = directory / "pytorch_model.bin"
    with zipfile.ZipFile(target, "w") as out:
        out.writestr("x/data.pkl", data_pkl)
        out.writestr("x/data/0", bytes(15))
    diagnostic = only(open_checkpoint(directory))
    assert diagnostic.code == "SD132"
    assert "byte 16 of a storage of 15 bytes" in diagnostic.message
    with zipfile.ZipFile(target, "w") as out:
        out.writestr("x/data.pkl", data_pkl)
    assert "lacks `x/data/0`" in only(open_checkpoint(directory)).message


def test_trainer_state_is_refused_by_name(directory: Path) -> None:
    torch.save({"w": torch.zeros(2), "optimizer": {"step": 3}}, directory / "pytorch_model.bin")
    checkpoint = open_checkpoint(directory)
    assert only(checkpoint).where == "pytorch_model.bin::optimizer"
    assert set(checkpoint.tensors) == {"w"}
