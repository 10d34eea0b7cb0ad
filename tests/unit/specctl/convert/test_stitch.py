"""Prediction layers out of a target and back: the same bytes; and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from convert_files import CHECKPOINTS, config_of, names_in, read_weights

from specctl.checkpoint import open_checkpoint, write_safetensors
from specctl.ops.convert import Options, convert
from specctl.ops.convert_report import ConvertReport
from specctl.ops.given import Given
from specctl.ops.load import load
from specctl.ops.stitch import stitch

GIVEN = Given(num_speculative_tokens=1, target_name="example/target")
QUICK = Options(has_digests=False)
# What bundled layers carry beside their own: copies that a Speculators draft takes from the target.
LOSSES = ("embedding", "head")


def target(name: str) -> Path:
    return CHECKPOINTS / name


def extracted(name: str, to: str, out: Path) -> Path:
    report = convert(
        str(target(name)), to=to, out=str(out), given=GIVEN, allow=LOSSES, options=QUICK
    )
    assert [d.message for d in report.diagnostics if d.severity == "error"] == []
    return out


def errors(report: ConvertReport) -> list[str]:
    return [item.code for item in report.diagnostics if item.severity == "error"]


def assert_same(out: Path, original: Path) -> None:
    assert names_in(out) == names_in(original) | {"specctl.json"}
    for name in names_in(original):
        assert (out / name).read_bytes() == (original / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("hf-deepseek-v3-mtp", "deepseek-mtp"),
        ("hf-glm46-mtp", "glm-mtp"),
        ("hf-qwen3-next-mtp", "qwen-mtp"),
        ("hf-qwen3-next-mtp", "speculators"),
        ("hf-qwen35-moe-mtp", "speculators"),
        ("hf-qwen35-mtp", "speculators"),
        ("hf-mimo-v2-mtp", "mimo-v2-mtp"),
        ("hf-nemotron-h-mtp", "nemotron-h-mtp"),
    ],
)
def test_what_was_taken_out_goes_back_byte_for_byte(tmp_path: Path, name: str, to: str) -> None:
    part = extracted(name, to, tmp_path / "part")
    stored, whole = read_weights(part), read_weights(target(name))
    assert len(stored) < len(whole)
    if to != "speculators":
        assert all(whole[key] == tensor for key, tensor in stored.items())
    report = stitch(str(part), str(target(name)), out=str(tmp_path / "out"), options=QUICK)
    assert (report.state, errors(report)) == ("written", [])
    assert_same(tmp_path / "out", target(name))


def test_trained_layers_replace_the_old_ones(tmp_path: Path) -> None:
    name = "hf-qwen35-mtp"
    part = extracted(name, "qwen-mtp", tmp_path / "part")
    opened = open_checkpoint(part)
    flipped = {
        key: (entry.dtype, entry.shape, bytes(byte ^ 1 for byte in opened.read_bytes(key)))
        for key, entry in opened.tensors.items()
    }
    write_safetensors(part / "model.safetensors", flipped, {"format": "pt"})
    out = tmp_path / "out"
    report = stitch(str(part), str(target(name)), out=str(out), options=QUICK)
    assert (report.state, errors(report)) == ("written", [])
    before, after, new = read_weights(target(name)), read_weights(out), read_weights(part)
    assert {key for key in before if before[key] != after[key]} == set(new)
    assert {key: after[key] for key in new} == new
    table = json.loads((out / "specctl.json").read_text())["tensors"]
    assert set(table) == set(new)
    assert load(str(out)).detection == load(str(target(name))).detection


def without_layers(name: str, out: Path) -> Path:
    """Copy a target without its prediction layers and without the count in its config."""
    bundled = load(str(target(name))).bundled
    assert bundled is not None
    gone = {ref.key for ref in bundled.tensors.values()}
    out.mkdir()
    opened = open_checkpoint(target(name))
    write_safetensors(
        out / "model.safetensors",
        {
            key: (entry.dtype, entry.shape, opened.read_bytes(key))
            for key, entry in opened.tensors.items()
            if key not in gone
        },
        {"format": "pt"},
    )
    (out / "config.json").write_bytes((target(name) / "config.json").read_bytes())
    return out


def test_layers_are_added_to_a_target_that_has_none(tmp_path: Path) -> None:
    name = "hf-qwen35-mtp"
    part = extracted(name, "qwen-mtp", tmp_path / "part")
    bare = without_layers(name, tmp_path / "bare")
    assert load(str(bare)).detection.bundled is None
    report = stitch(str(part), str(bare), out=str(tmp_path / "out"), options=QUICK)
    assert (report.state, errors(report)) == ("written", [])
    assert read_weights(tmp_path / "out") == read_weights(target(name))
    assert config_of(tmp_path / "out") == config_of(target(name))


def test_a_slice_has_no_unknown_fields_and_can_be_written_again(tmp_path: Path) -> None:
    """Fields of a family are no news in a slice, whose config is the target's own."""
    names = sorted(path.name for path in CHECKPOINTS.glob("hf-*-mtp"))
    assert len(names) > 20
    for name in names:
        bundled = load(str(target(name))).bundled
        if bundled is None or not bundled.format.endswith("-mtp"):
            continue
        report = convert(
            str(target(name)), to=bundled.format, out=str(tmp_path / name), options=QUICK
        )
        if report.state == "written":
            assert load(str(tmp_path / name)).draft.unknown_fields == (), name  # type: ignore[union-attr]


@pytest.mark.parametrize("is_equal", [True, False])
def test_copies_of_embedding_and_head_are_left_out_only_when_they_are_copies(
    tmp_path: Path, is_equal: bool
) -> None:
    name = "hf-deepseek-v3-mtp"
    part = extracted(name, "deepseek-mtp", tmp_path / "part")
    bare = without_layers(name, tmp_path / "bare")
    owner, weights = read_weights(bare), read_weights(part)
    copies = {
        next(key for key in weights if key.endswith(end)): owner[own]
        for end, own in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    }
    others = {key: (dtype, shape, data[::-1]) for key, (dtype, shape, data) in copies.items()}
    given = copies if is_equal else others
    write_safetensors(part / "model.safetensors", weights | given, {"format": "pt"})
    report = stitch(str(part), str(bare), out=str(tmp_path / "out"), options=QUICK)
    assert (report.state, errors(report)) == ("written", [])
    after = read_weights(tmp_path / "out")
    new = {key: after[key] for key in set(after) - set(owner)}
    assert new == ({k: t for k, t in weights.items() if k not in given} if is_equal
                   else weights | given)  # fmt: skip
    assert {d.code for d in report.diagnostics if "left out" in d.message} == (
        {"SD507"} if is_equal else set()
    )


def test_layers_of_other_sizes_than_the_targets_config_says(tmp_path: Path) -> None:
    name = "hf-deepseek-v3-mtp"
    part = extracted(name, "deepseek-mtp", tmp_path / "part")
    bare = without_layers(name, tmp_path / "bare")
    config = config_of(bare)
    config["q_lora_rank"] += 1
    (bare / "config.json").write_text(json.dumps(config))
    report = stitch(str(part), str(bare), out=str(tmp_path / "out"), options=QUICK)
    assert set(errors(report)) == {"SD611"}
    assert names_in(tmp_path) == {"part", "bare"}


def test_layers_of_another_family_or_width_are_refused(tmp_path: Path) -> None:
    part = extracted("hf-qwen35-mtp", "qwen-mtp", tmp_path / "part")
    report = stitch(str(part), str(target("hf-deepseek-v3-mtp")), out=str(tmp_path / "out"))
    assert "SD611" in errors(report)
    assert names_in(tmp_path) == {"part"}


def test_a_draft_is_no_target_to_stitch_into(tmp_path: Path) -> None:
    part = extracted("hf-qwen35-mtp", "qwen-mtp", tmp_path / "part")
    report = stitch(str(part), str(CHECKPOINTS / "speculators-eagle3-clean"), out="out")
    assert errors(report)[0] == "SD201"


def test_incomplete_layers_are_refused(tmp_path: Path) -> None:
    report = convert(
        str(target("hf-qwen3-next-mtp-expert-gap")),
        to="speculators",
        out=str(tmp_path / "out"),
        given=GIVEN,
    )
    assert "SD325" in errors(report)
    assert names_in(tmp_path) == set()
