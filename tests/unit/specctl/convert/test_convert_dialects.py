"""`ops.convert`: dialects, losses, vocabulary, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from convert_files import CHECKPOINTS, config_of, names_in, read_weights

from specctl.convert.dialects import ALIASES, dialect_names, writable_formats
from specctl.formats.registry import BY_NAME
from specctl.ops.convert import Options, convert
from specctl.ops.convert_report import ConvertReport
from specctl.ops.given import Given
from specctl.ops.load import load
from specctl.ops.validate import validate

GAMMA = Given(num_speculative_tokens=4)
TARGET = str(CHECKPOINTS / "hf-llama-clean")
TINY = str(CHECKPOINTS / "hf-llama-tiny")


def source(name: str) -> str:
    return str(CHECKPOINTS / name)


def errors(report: ConvertReport) -> list[str]:
    return [item.code for item in report.diagnostics if item.severity == "error"]


def edited(tmp_path: Path, name: str, **changes: object) -> str:
    """Copy a fixture with other config values; None drops a key."""
    copy = tmp_path / f"edited-{name}"
    copy.mkdir()
    for path in (CHECKPOINTS / name).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = config_of(copy) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(kept))
    return str(copy)


def test_safeailab_becomes_speculators_and_back(tmp_path: Path) -> None:
    first, back, again = (str(tmp_path / name) for name in ("first", "back", "again"))
    there = convert(
        source("safeailab-eagle3-clean"), to="speculators", out=first, target=TARGET, given=GAMMA
    )
    assert (there.state, errors(there)) == ("written", [])
    assert validate([first], target=TARGET).is_clean
    stored, before = read_weights(Path(first)), read_weights(CHECKPOINTS / "safeailab-eagle3-clean")
    assert {key.replace("midlayer.", "layers.0.") for key in before} <= set(stored)
    for key, tensor in before.items():
        assert stored[key.replace("midlayer.", "layers.0.")] == tensor

    assert convert(first, to="eagle3", out=back, target=TARGET).state == "written"
    assert {**read_weights(Path(back)), **before} == read_weights(Path(back))
    assert convert(back, to="speculators", out=again, target=TARGET, given=GAMMA).state == "written"
    assert read_weights(Path(again)) == stored
    config, second = config_of(Path(first)), config_of(Path(again))
    for read in (config, second):
        read["speculators_config"]["verifier"].pop("name_or_path")  # type: ignore[index]
    assert config == second


@pytest.mark.parametrize("dialect", ["specforge", "modelopt"])
def test_speculators_to_output_ids_and_back(tmp_path: Path, dialect: str) -> None:
    start = source("speculators-eagle3-clean")
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert convert(start, to=dialect, out=there).state == "written"
    assert config_of(Path(there))["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # type: ignore[index]
    name = Given(num_speculative_tokens=4, target_name="example/tiny-llama")
    report = convert(there, to="speculators", out=back, target=TARGET, given=name)
    assert (report.state, errors(report)) == ("written", [])
    stored = read_weights(Path(start))
    assert {key: read_weights(Path(back))[key] for key in stored} == stored
    draft, other = load(start).draft, load(back).draft
    assert draft is not None
    assert other is not None
    assert other.aux_layer_ids == draft.aux_layer_ids
    assert other.decoder == draft.decoder


def test_a_missing_token_count_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert(
        source("safeailab-eagle3-clean"), to="speculators", out=str(out), target=TARGET
    )
    assert report.state == "refused"
    assert errors(report) == ["SD602"]
    assert not out.exists()


def test_a_missing_embedding_is_asked_for(tmp_path: Path) -> None:
    """Speculators 0.9.0 loads a file without `embed_tokens` with an embedding of zeros."""
    start = edited(tmp_path, "safeailab-eagle3-clean")
    report = convert(start, to="speculators", out=str(tmp_path / "out"), given=GAMMA)
    found = [item for item in report.diagnostics if item.severity == "error"]
    assert {item.code for item in found} == {"SD602"}
    assert any("embedding" in item.message for item in found)


def test_layers_that_the_dialect_cannot_name_are_a_named_loss(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    start = edited(tmp_path, "speculators-eagle3-clean", eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    report = convert(start, to="eagle3", out=out, target=TARGET)
    (loss,) = (item for item in report.diagnostics if item.severity == "error")
    assert (loss.code, loss.expected) == ("SD601", "--allow aux-layer-ids")
    report = convert(start, to="eagle3", out=out, target=TARGET, allow=("aux-layer-ids",))
    assert report.losses_allowed == ("aux-layer-ids",)
    record = json.loads((tmp_path / "out" / "specctl.json").read_text())
    assert record["losses_allowed"] == ["aux-layer-ids"]


def test_an_allowed_loss_that_is_none_is_reported(tmp_path: Path) -> None:
    report = convert(
        source("speculators-eagle3-clean"),
        to="specforge",
        out=str(tmp_path / "out"),
        allow=("embedding",),
    )
    assert report.state == "written"
    assert [item.code for item in report.diagnostics if item.severity == "warning"] == ["SD610"]


def test_fields_that_nobody_reads_are_a_named_loss(tmp_path: Path) -> None:
    start = edited(tmp_path, "speculators-eagle3-clean", secret_gate=True)
    report = convert(start, to="specforge", out=str(tmp_path / "out"))
    (loss,) = (item for item in report.diagnostics if item.severity == "error")
    assert (loss.expected, loss.found) == ("--allow unknown-fields", "/secret_gate")


def test_tensors_that_nobody_reads_are_a_named_loss(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    start = source("speculators-eagle3-tensor-unknown")
    report = convert(start, to="specforge", out=out)
    (loss,) = (item for item in report.diagnostics if item.severity == "error")
    assert loss.expected == "--allow unmapped-tensors"
    report = convert(start, to="specforge", out=out, allow=("unmapped-tensors",))
    assert report.state == "written"


def test_a_broken_source_is_not_converted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert(source("speculators-eagle3-tensor-missing"), to="specforge", out=str(out))
    assert report.state == "refused"
    assert "SD501" in errors(report)
    assert not out.exists()


@pytest.mark.parametrize("name", ["nonsense", "speculators-dspark"])
def test_a_dialect_of_another_algorithm(tmp_path: Path, name: str) -> None:
    report = convert(source("speculators-eagle3-clean"), to=name, out=str(tmp_path / "out"))
    (finding,) = report.diagnostics
    assert finding.code == "SD602"
    assert "speculators-eagle3" in (finding.expected or "")


def test_a_target_without_a_draft(tmp_path: Path) -> None:
    report = convert(TARGET, to="speculators", out=str(tmp_path / "out"))
    assert errors(report) == ["SD201"]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    report = convert(
        source("speculators-eagle3-clean"),
        to="specforge",
        out=str(tmp_path / "out"),
        options=Options(is_dry_run=True),
    )
    assert report.state == "planned"
    assert {tensor.key for tensor in report.tensors} >= {"midlayer.hidden_norm.weight", "d2t"}
    assert names_in(tmp_path) == set()


def test_running_twice_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    states = []
    for _ in range(2):
        report = convert(source("speculators-eagle3-clean"), to="specforge", out=str(out))
        states.append((report.state, {p.name: p.stat().st_mtime_ns for p in out.iterdir()}))
    assert [state for state, _ in states] == ["written", "unchanged"]
    assert states[0][1] == states[1][1]


IDS = [7, 1, 0, 63, 12, 5]


def token_map(tmp_path: Path, ids: list[int] = IDS) -> str:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(ids))
    return str(path)


def test_a_token_map_gathers_rows_of_the_drafts_head(tmp_path: Path) -> None:
    start, out = source("speculators-eagle3-identity"), tmp_path / "out"
    report = convert(
        start,
        to="speculators",
        out=str(out),
        target=TINY,
        given=Given(token_map=token_map(tmp_path)),
    )
    assert (report.state, errors(report)) == ("written", [])
    before, after = read_weights(Path(start)), read_weights(out)
    head, rows = before["lm_head.weight"][2], sorted(IDS)
    size = len(head) // before["lm_head.weight"][1][0]
    assert after["lm_head.weight"][2] == b"".join(
        head[row * size : (row + 1) * size] for row in rows
    )
    read = load(str(out)).draft
    assert read is not None
    assert (read.draft_vocab_size, read.draft_to_target) == (6, tuple(rows))
    assert read.t2d is not None
    assert [i for i, bit in enumerate(read.t2d) if bit] == rows
    kept = set(before) - {"lm_head.weight", "d2t", "t2d"}
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}


def test_rows_of_the_targets_head_come_back_as_the_full_head(tmp_path: Path) -> None:
    """A head that the map cut out of the target's head, byte for byte."""
    cut, full = tmp_path / "cut", tmp_path / "full"
    start = source("speculators-eagle3-no-head")
    report = convert(
        start,
        to="speculators",
        out=str(cut),
        target=TINY,
        given=Given(token_map=token_map(tmp_path)),
    )
    assert (report.state, errors(report)) == ("written", [])
    report = convert(
        str(cut), to="speculators", out=str(full), target=TINY, is_full_vocabulary=True
    )
    assert (report.state, errors(report)) == ("written", [])
    assert read_weights(full)["lm_head.weight"] == read_weights(Path(TINY))["lm_head.weight"]
    assert not {"d2t", "t2d"} & set(read_weights(full))


def test_a_trained_reduced_head_has_no_full_form(tmp_path: Path) -> None:
    report = convert(
        source("speculators-eagle3-clean"),
        to="speculators",
        out=str(tmp_path / "out"),
        target=TARGET,
        is_full_vocabulary=True,
    )
    assert errors(report) == ["SD602"]
    assert "rows differ" in (report.diagnostics[0].found or "")


@pytest.mark.parametrize(
    ("name", "ids", "code"),
    [
        ("speculators-eagle3-clean", IDS, "SD607"),
        ("speculators-eagle3-identity", [1, 64], "SD402"),
        ("speculators-eagle3-identity", [1, 1], "SD404"),
    ],
)
def test_a_map_that_cannot_be_applied(tmp_path: Path, name: str, ids: list[int], code: str) -> None:
    report = convert(
        source(name),
        to="speculators",
        out=str(tmp_path / "out"),
        given=Given(token_map=token_map(tmp_path, ids)),
    )
    assert errors(report) == [code]


def test_shards_read_as_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(
        source("speculators-eagle3-clean"),
        to="specforge",
        out=str(out),
        options=Options(max_shard_bytes=2000),
    )
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert validate([str(out)], target=TARGET).is_clean


def test_names_of_dialects() -> None:
    for row in ALIASES.values():
        for algorithm, name in row.items():
            assert name not in BY_NAME or BY_NAME[name].algorithm == algorithm
    assert {"speculators", "eagle3", "specforge", "modelopt", "gguf-map"} <= set(dialect_names())
    assert len(set(dialect_names())) == len(dialect_names())
    assert all(entry.read is not None for entry in writable_formats())
