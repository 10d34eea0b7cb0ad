"""What `convert` refuses or says of what it cannot write as it was meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from convert_files import CHECKPOINTS, config_of, read_weights

from specctl.checkpoint import write_safetensors
from specctl.ops.convert import convert
from specctl.ops.convert_report import ConvertReport
from specctl.ops.given import Given
from specctl.ops.load import load
from specctl.ops.normalize import normalize

LISTED = "eagle_aux_hidden_state_layer_ids"
TINY = str(CHECKPOINTS / "hf-llama-tiny")


def source(name: str) -> str:
    return str(CHECKPOINTS / name)


def errors(report: ConvertReport) -> list[str]:
    return [item.code for item in report.diagnostics if item.severity == "error"]


def token_map(tmp_path: Path, ids: list[int]) -> str:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(ids))
    return str(path)


@pytest.mark.parametrize(
    ("name", "code", "target"),
    [
        ("speculators-eagle3-fp8-scale-missing", "SD511", None),
        ("speculators-eagle3-fp8-scale-shape", "SD513", None),
        ("speculators-eagle3-fp8-undeclared", "SD515", None),
        ("speculators-eagle3-other-tokenizer", "SD419", "hf-llama-tiny"),
    ],
)
def test_what_validate_refuses_is_not_written(
    tmp_path: Path, name: str, code: str, target: str | None
) -> None:
    out = tmp_path / "out"
    beside = None if target is None else source(target)
    report = convert(source(name), to="specforge", out=str(out), target=beside)
    assert (report.state, errors(report)) == ("refused", [code])
    report = normalize(source(name), out=str(out), target=beside)
    assert (report.state, errors(report)) == ("refused", [code])
    assert not out.exists()


def test_a_pickle_that_was_not_read_is_the_reason(tmp_path: Path) -> None:
    start = tmp_path / "draft"
    shutil.copytree(source("container-pickle-code"), start)
    shutil.copy(Path(source("eagle-clean")) / "config.json", start)
    report = convert(str(start), to="eagle", out=str(tmp_path / "out"))
    assert errors(report) == ["SD103", "SD201"]


@pytest.mark.parametrize(("count", "state"), [(4, "refused"), (3, "written"), (5, "written")])
def test_one_token_less_than_a_sampled_block_means_another_anchor(
    tmp_path: Path, count: int, state: str
) -> None:
    given = Given(num_speculative_tokens=count, target_name="org/name")
    report = convert(
        source("deepspec-dspark-clean"), to="speculators", out=str(tmp_path / "out"), given=given
    )
    assert (report.state, errors(report)) == (state, ["SD602"] if count == 4 else [])


@pytest.mark.parametrize("name", ["specforge-eagle3-clean", "specforge-eagle3-boundary-ids"])
def test_given_layers_replace_the_files_own_list_or_are_refused(tmp_path: Path, name: str) -> None:
    for ids, state in (((2, 4, 5), "refused"), ((1, 2, 3), "written")):
        given = Given(aux_layer_ids=ids, aux_numbering="output")
        out = tmp_path / f"out-{ids[0]}"
        report = convert(source(name), to="specforge", out=str(out), given=given)
        assert (report.state, errors(report)) == (state, ["SD602"] if ids[0] == 2 else [])
        if state == "written":
            assert config_of(out)["eagle_config"][LISTED] == [1, 2, 3]


def test_a_guess_that_becomes_a_fact_stays_a_warning(tmp_path: Path) -> None:
    """SGLang issue 25454: a list that begins with 2 is read as boundaries by a guess."""
    start = tmp_path / "draft"
    shutil.copytree(source("specforge-eagle3-clean"), start)
    config = config_of(start) | {"eagle_config": {LISTED: [2, 4, 5]}}
    (start / "config.json").write_text(json.dumps(config))
    given = Given(num_speculative_tokens=4)
    out = str(tmp_path / "out")
    report = convert(str(start), to="speculators", out=out, given=given, target=TINY)
    assert report.state == "written"
    warned = [item.code for item in report.diagnostics if item.severity == "warning"]
    assert "SD303" in warned


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_map_beside_a_reduced_head_is_taken_over(tmp_path: Path, has_mask: bool) -> None:
    """Automodel issue 2447: the ids were saved in a side file."""
    clean = load(source("speculators-eagle3-clean")).draft
    assert clean is not None
    ids = list(clean.draft_to_target or ())
    start, out = tmp_path / "draft", tmp_path / "out"
    shutil.copytree(source("speculators-eagle3-clean"), start)
    weights = read_weights(start)
    dropped = {"d2t"} if has_mask else {"d2t", "t2d"}
    write_safetensors(
        start / "model.safetensors", {k: t for k, t in weights.items() if k not in dropped}
    )
    assert "SD401" in errors(convert(str(start), to="specforge", out=str(out)))

    def with_map(given: list[int]) -> ConvertReport:
        map_file = Given(token_map=token_map(tmp_path, given))
        return convert(str(start), to="specforge", out=str(out), given=map_file)

    for wrong in (ids[1:], ids[:1]):
        assert errors(with_map(wrong)) == ["SD607"]
    other = [i for i in range(64) if i not in ids][: len(ids)]
    assert errors(with_map(other)) == (["SD607"] if has_mask else [])
    shutil.rmtree(out, ignore_errors=True)
    report = with_map(ids)
    assert (report.state, errors(report)) == ("written", [])
    written = read_weights(out)
    assert {key: written[key] for key in ("d2t", "t2d")} == {
        key: weights[key] for key in ("d2t", "t2d")
    }


def test_a_quantised_head_is_not_cut(tmp_path: Path) -> None:
    start, out = tmp_path / "draft", tmp_path / "out"
    shutil.copytree(source("speculators-eagle3-identity"), start)
    weights = read_weights(start)
    rows, width = weights["lm_head.weight"][1]
    weights["lm_head.weight"] = ("F8_E4M3", (rows, width), bytes(rows * width))
    weights["lm_head.weight_scale"] = ("F32", (rows, 1), bytes(rows * 4))
    write_safetensors(start / "model.safetensors", weights)
    config = json.loads((start / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (start / "config.json").write_text(json.dumps(config))
    given = Given(token_map=token_map(tmp_path, [0, 1, 5, 7]))
    report = convert(str(start), to="specforge", out=str(out), target=TINY, given=given)
    assert errors(report) == ["SD607"]
    assert "scales" in report.diagnostics[-1].message


def test_what_json_does_not_have_is_left_out(tmp_path: Path) -> None:
    """An unknown field is kept by normalize, and its infinity has no form in a config."""
    start, out = tmp_path / "draft", tmp_path / "out"
    shutil.copytree(source("speculators-eagle3-clean"), start)
    config = config_of(start) | {"gate": float("inf"), "gates": [1.0, float("-inf")]}
    (start / "config.json").write_text(json.dumps(config))
    report = normalize(str(start), out=str(out))
    assert (report.state, report.fixes) == ("written", ("not-finite",))
    written = config_of(out)
    assert "gate" not in written
    assert written["gates"] == [1.0, None]


@pytest.mark.parametrize(
    ("name", "dialect", "lost"),
    [
        ("speculators-eagle3-clean", "specforge", ["token-count", "target-name"]),
        ("speculators-eagle-clean", "eagle", ["token-count", "target-name"]),
        ("speculators-peagle-clean", "peagle", ["target-name"]),
    ],
)
def test_what_the_source_says_of_serving_is_said_when_it_is_lost(
    tmp_path: Path, name: str, dialect: str, lost: list[str]
) -> None:
    report = convert(source(name), to=dialect, out=str(tmp_path / "out"))
    assert (report.state, errors(report), report.losses_allowed) == ("written", [], ())
    found = [d for d in report.diagnostics if d.code == "SD601"]
    assert [(d.expected or "").removeprefix("--allow ") for d in found] == lost
    assert {d.severity for d in found} <= {"info"}


def test_a_quantised_head_of_the_target_is_not_taken_without_its_scales(tmp_path: Path) -> None:
    owner, out = tmp_path / "target", tmp_path / "out"
    shutil.copytree(TINY, owner)
    weights = read_weights(owner)
    rows, width = weights["lm_head.weight"][1]
    weights["lm_head.weight"] = ("F8_E4M3", (rows, width), bytes(rows * width))
    weights["lm_head.weight_scale"] = ("F32", (rows, 1), bytes(rows * 4))
    write_safetensors(owner / "model.safetensors", weights)
    given = Given(target_name="example/target")
    start = source("zlab-dflash-clean")
    report = convert(start, to="speculators", out=str(out), target=str(owner), given=given)
    assert errors(report) == ["SD602"]
    assert any("quantised" in d.message for d in report.diagnostics)
    assert not out.exists()
