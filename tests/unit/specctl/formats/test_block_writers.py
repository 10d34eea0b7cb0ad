"""Block drafts in another dialect and back: equal facts, equal bytes, named losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl import formats
from specctl.checkpoint import open_checkpoint
from specctl.draft import DraftCheckpoint
from specctl.ops.convert import convert
from specctl.ops.convert_report import ConvertReport
from specctl.ops.given import Given
from tests.unit.specctl.formats.edits import BLOCK_FACTS, CHECKPOINTS

TARGET = CHECKPOINTS / "hf-llama-tiny"
SHARED = {"embedding", "head"}
PAIRS = [
    ("zlab-dflash-clean", "speculators-dflash"),
    ("zlab-dflash2-clean", "speculators-dflash2"),
    ("zlab-dflash2-suffixed", "speculators-dflash2"),
    ("speculators-dflash2-clean", "zlab-dflash2"),
    ("deepspec-dspark-clean", "speculators-dspark"),
    ("deepspec-dspark-dflash", "speculators-dspark"),
    ("deepspec-dspark-logit-head", "speculators-dspark"),
    ("deepspec-dspark-clean", "modelopt-dspark"),
    ("modelopt-dspark-clean", "deepspec-dspark"),
    ("modelopt-dspark-clean", "speculators-dspark"),
    ("speculators-dspark-gated", "modelopt-dspark"),
    ("speculators-dspark-rnn", "deepspec-dspark"),
    ("speculators-dspark-no-markov", "deepspec-dspark"),
]


def written(source: Path, to: str, out: Path, **options: Any) -> ConvertReport:
    report = convert(str(source), to=to, out=str(out), **options)
    assert report.state == "written", [d.message for d in report.diagnostics]
    return report


def refused(name: str, to: str, out: Path, **options: Any) -> set[str]:
    report = convert(str(CHECKPOINTS / name), to=to, out=str(out), **options)
    assert report.state == "refused"
    assert not out.exists()
    return {d.code for d in report.diagnostics if d.severity == "error"}


def read(path: Path) -> DraftCheckpoint:
    return formats.read_draft(open_checkpoint(path))


def bytes_by_role(path: Path, draft: DraftCheckpoint) -> dict[str, bytes]:
    data = {name: (path / name).read_bytes() for name in {r.file for r in draft.tensors.values()}}
    return {role: data[r.file][r.begin : r.end] for role, r in draft.tensors.items()}


@pytest.mark.parametrize(("name", "to"), PAIRS)
def test_facts_and_bytes_survive_a_conversion_and_the_way_back(
    name: str, to: str, tmp_path: Path
) -> None:
    source = CHECKPOINTS / name
    own = formats.detect(open_checkpoint(source)).format
    assert own is not None
    there, back, direct = tmp_path / "there", tmp_path / "back", tmp_path / "direct"
    written(source, to, there, target=str(TARGET))
    written(there, own, back, target=str(TARGET))
    written(source, own, direct, target=str(TARGET))
    first, second, last = read(source), read(there), read(back)
    for fact in BLOCK_FACTS:
        assert getattr(second, fact) == getattr(first, fact), fact
        assert getattr(last, fact) == getattr(first, fact), fact
    before, after = bytes_by_role(source, first), bytes_by_role(back, last)
    assert {r: b for r, b in after.items() if r in before} == before
    assert after.keys() - before.keys() <= SHARED
    config = _config(back)
    if first.target_name is None:  # the way through Speculators had to name the target
        config.pop("target_model_name_or_path", None)
    assert config == _config(direct)


def _config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))
    return config


@pytest.mark.parametrize(
    "name",
    [
        "zlab-dflash-mask-file",
        "deepspec-dspark-bonus-anchor",
        "speculators-dflash-clean",
        "speculators-dspark-anchor-false",
        "speculators-xpress-clean",
        "modelopt-dspark-clean",
    ],
)
def test_a_dialect_is_written_into_itself(name: str, tmp_path: Path) -> None:
    source = CHECKPOINTS / name
    own = formats.detect(open_checkpoint(source)).format or ""
    written(source, own, tmp_path / "once", target=str(TARGET))
    written(tmp_path / "once", own, tmp_path / "twice", target=str(TARGET))
    first, second = read(source), read(tmp_path / "once")
    for fact in BLOCK_FACTS:
        assert getattr(second, fact) == getattr(first, fact), fact
    assert bytes_by_role(tmp_path / "once", second) == bytes_by_role(source, first)
    once, twice = ((tmp_path / n / "config.json").read_bytes() for n in ("once", "twice"))
    assert once == twice


def test_boundaries_are_outputs_plus_one_and_the_last_one_stays(tmp_path: Path) -> None:
    """Speculators' own converter drops an id equal to the layer count; onnxruntime-genai 2538."""
    source = tmp_path / "source"
    source.mkdir()
    config = _config(CHECKPOINTS / "zlab-dflash-clean")
    config["dflash_config"]["target_layer_ids"] = [0, 1, 3, 5, 7]
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    weights = CHECKPOINTS / "zlab-dflash-clean" / "model.safetensors"
    (source / "model.safetensors").write_bytes(weights.read_bytes())
    written(source, "speculators-dflash", tmp_path / "out", target=str(TARGET))
    result = _config(tmp_path / "out")
    assert result["aux_hidden_state_layer_ids"] == [1, 2, 4, 6, 8]
    assert read(tmp_path / "out").tensors["fc.weight"].shape == (10, 50)


def test_what_zlab_borrows_is_copied_from_the_target(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = written(
        CHECKPOINTS / "zlab-dflash-clean", "speculators-dflash", out, target=str(TARGET)
    )
    config = _config(out)
    assert config["block_size"] == 5
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["sample_from_anchor"] is False
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    added = {t.key for t in report.tensors} - set(
        open_checkpoint(CHECKPOINTS / "zlab-dflash-clean").tensors
    )
    assert added == {"embed_tokens.weight", "lm_head.weight"}
    draft, theirs = bytes_by_role(out, read(out)), open_checkpoint(TARGET)
    target = formats.read_target(theirs)
    assert target.embedding is not None
    raw = (TARGET / target.embedding.file).read_bytes()
    assert draft["embedding"] == raw[target.embedding.begin : target.embedding.end]


@pytest.mark.parametrize(
    ("name", "to", "options", "codes"),
    [
        ("zlab-dflash-clean", "speculators-dflash", {}, {"SD602"}),
        ("modelopt-dspark-clean", "deepspec-dspark", {}, {"SD602"}),
        ("speculators-dflash-clean", "zlab-dflash", {"target": str(TARGET)}, {"SD602"}),
        ("speculators-dflash2-clean", "zlab-dflash2", {}, {"SD602"}),
        ("speculators-dspark-anchor-false", "deepspec-dspark", {"target": str(TARGET)}, {"SD602"}),
        ("zlab-dflash-mask-file", "speculators-dflash", {"target": str(TARGET)}, {"SD602"}),
        ("laguna-dflash-clean", "speculators-dflash", {"target": str(TARGET)}, {"SD602"}),
        ("zlab-dflash-latent", "speculators-dflash", {"target": str(TARGET)}, {"SD602"}),
        ("deepspec-dspark-dflash", "modelopt-dspark", {}, {"SD602"}),
        ("zlab-dflash-clean", "deepspec-dspark", {"target": str(TARGET)}, {"SD602"}),
    ],
)
def test_what_a_dialect_cannot_hold_is_refused(
    name: str, to: str, options: dict[str, Any], codes: set[str], tmp_path: Path
) -> None:
    assert refused(name, to, tmp_path / "out", **options) == codes


def test_a_copy_of_the_targets_embedding_is_no_loss_and_another_one_is(tmp_path: Path) -> None:
    full, out = tmp_path / "full", tmp_path / "out"
    written(CHECKPOINTS / "zlab-dflash-clean", "speculators-dflash", full, target=str(TARGET))
    report = written(full, "zlab-dflash", out, target=str(TARGET))
    lost = [d for d in report.diagnostics if d.code == "SD601"]
    assert [d.severity for d in lost] == ["info", "info"]
    assert set(read(out).tensors) & SHARED == set()

    own = read(full).tensors["embedding"]
    raw = bytearray((full / own.file).read_bytes())
    raw[own.end - 1] ^= 1
    (full / own.file).write_bytes(raw)
    refusal = convert(str(full), to="zlab-dflash", out=str(tmp_path / "no"), target=str(TARGET))
    assert refusal.state == "refused"
    errors = [d for d in refusal.diagnostics if d.severity == "error"]
    assert [(d.code, d.expected) for d in errors] == [("SD601", "--allow embedding")]
    allowed = ("embedding",)
    written(full, "zlab-dflash", tmp_path / "yes", target=str(TARGET), allow=allowed)


def test_fewer_tokens_than_the_block_offers_are_a_loss_with_a_name(tmp_path: Path) -> None:
    source, out = CHECKPOINTS / "speculators-dflash2-clean", tmp_path / "out"
    given = Given(num_speculative_tokens=3)
    options: dict[str, Any] = {"target": str(TARGET), "given": given}
    assert refused(source.name, "dflash", out, **options) == {"SD601"}
    written(source, "dflash", out, allow=("token-count",), **options)
    geometry = read(out).geometry
    assert geometry is not None
    assert geometry.num_speculative_tokens == 4


def test_a_mask_vector_goes_with_the_weights(tmp_path: Path) -> None:
    """vLLM issue 46104."""
    source = CHECKPOINTS / "zlab-dflash-mask-file"
    written(source, "zlab-dflash", tmp_path / "out", target=str(TARGET))
    kept = (tmp_path / "out" / "mask_embedding.pt").read_bytes()
    assert kept == (source / "mask_embedding.pt").read_bytes()
