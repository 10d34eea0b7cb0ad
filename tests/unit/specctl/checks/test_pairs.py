"""Draft and target: a wrong pairing is refused with the numbers of both sides."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specctl import checks
from specctl.checks.tokenizers import check_tokenizers
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import Decoder, Rope
from specctl.ops.load import fit, load
from tests.unit.specctl.formats.edits import CHECKPOINTS, codes, draft, target

EAGLE3, LLAMA = "speculators-eagle3-clean", "hf-llama-clean"


def only(found: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    (finding,) = [d for d in found if d.code == code]
    return finding


def pair(name: str, owner: str) -> tuple[Diagnostic, ...]:
    return fit(load(str(CHECKPOINTS / name)), load(str(CHECKPOINTS / owner))).diagnostics


def test_vllm_ascend_6612_another_theta_is_a_fact_with_both_numbers() -> None:
    found = only(pair("speculators-eagle3-other-rope", "hf-llama-tiny"), "SD329")
    assert found.severity == "info"
    assert (found.expected, found.found) == ("theta 10000", "theta 500000")
    assert found.where.endswith("/rope_theta")
    read, owner = draft(EAGLE3), target(LLAMA)
    assert owner.decoder is not None
    scaled = Rope(theta=10000.0, kind="yarn", parameters={"factor": 4.0})
    other = replace(owner, decoder=_with_rope(owner.decoder, scaled))
    text = only(checks.check_pair(read, other), "SD329").expected
    assert text == "theta 10000, yarn (factor 4.0)"


def test_a_target_of_another_family_and_the_same_widths_is_named() -> None:
    found = only(pair("speculators-eagle3-other-architecture", "hf-llama-tiny"), "SD330")
    assert found.severity == "warning"
    assert (found.expected, found.found) == ("LlamaForCausalLM", "Qwen3ForCausalLM")
    read = draft(EAGLE3)
    for verifier in (None, {}, {"architectures": None}, {"architectures": []}):
        silent = replace(read, config={**read.config, "speculators_config": {"verifier": verifier}})
        assert "SD330" not in codes(checks.check_pair(silent, target(LLAMA)))


def test_a_draft_whose_file_cannot_be_read_lacks_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "draft"
    shutil.copytree(CHECKPOINTS / EAGLE3, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(b"\xff" + weights.read_bytes()[1:])
    found = fit(load(str(broken)), load(str(CHECKPOINTS / LLAMA))).diagnostics
    assert codes(found) == ["SD101"]


def _with_rope(decoder: Decoder, rope: Rope) -> Decoder:
    return msgspec.structs.replace(decoder, rope=rope)


def test_vllm_13849_a_map_entry_above_the_tokenizer_is_named() -> None:
    found = only(pair("speculators-eagle3-map-padding", "hf-llama-padded"), "SD416")
    assert found.severity == "warning"
    assert "draft id 23 is target id 70 of a tokenizer of 64" in found.message


def test_a_mask_token_needs_a_row_of_the_embedding_that_is_used() -> None:
    read = replace(draft("speculators-dspark-clean"), target_vocab_size=80, mask_token_id=70)
    found = only(checks.check_pair(read, target(LLAMA)), "SD314")
    assert (found.expected, found.found) == ("below 64", "70")
    owner = draft("speculators-eagle3-own-embedding")
    own = replace(read, tensors={**read.tensors, "embedding": owner.tensors["embedding"]})
    assert "SD314" not in codes(checks.check_pair(own, target(LLAMA)))


def test_vllm_13849_a_differing_token_is_named_by_its_id() -> None:
    found = only(pair("speculators-eagle3-other-tokenizer", "hf-llama-tiny"), "SD419")
    assert "2 ids" in found.message
    assert "the first is id 5" in found.message
    assert found.severity == "error"
    assert found.where.endswith("speculators-eagle3-other-tokenizer/tokenizer.json")


def test_vllm_35937_tokens_of_one_side_only_are_legal(tmp_path: Path) -> None:
    assert list(check_tokenizers({"a": 0, "b": 1}, {"a": 0})) == []
    assert list(check_tokenizers({"a": 0}, {"a": 0, "pad": 7})) == []
    place = tmp_path / "draft"
    shutil.copytree(CHECKPOINTS / EAGLE3, place)
    shutil.copy(CHECKPOINTS / LLAMA / "tokenizer.json", place)
    same = fit(load(str(place)), load(str(CHECKPOINTS / LLAMA)))
    assert same.diagnostics == ()
    (place / "tokenizer.json").write_text("{}")
    assert fit(load(str(place)), load(str(CHECKPOINTS / LLAMA))).diagnostics == ()


@pytest.mark.parametrize(
    ("name", "owner", "code", "expected", "found"),
    [
        ("speculators-eagle3-other-width", "hf-llama-wide", "SD305", "20", "10"),
        ("speculators-eagle3-other-vocab", "hf-llama-tiny", "SD411", "64", "60"),
        ("speculators-eagle3-layer-too-deep", "hf-llama-tiny", "SD304", "at most 8", "9"),
        ("deepseek-mtp-other-depth", "hf-llama-sharded", "SD317", "2", "8"),
        ("medusa-clean", "hf-llama-wide", "SD305", "20", "4"),
    ],
)
def test_a_wrong_pairing_is_refused_with_the_numbers(
    name: str, owner: str, code: str, expected: str, found: str
) -> None:
    finding = only(pair(name, owner), code)
    assert finding.severity == "error"
    assert str(finding.expected).startswith(expected)
    assert finding.found == found


def test_a_vocabulary_of_another_size_is_no_padding() -> None:
    """A draft of 49,152 ids does not fit a target of 64, however small its tokenizer is."""
    made = draft("speculators-eagle3-clean", {"transformer_layer_config.vocab_size": 49_152})
    found = [d.code for d in checks.check_pair(made, target("hf-llama-clean"))]
    assert "SD411" in found
    assert "SD412" not in found
