"""Drafts of heads: read as their projects name them, counted by tensors, judged by their sizes.

Names and relations are those of the projects' classes: FasterDecoding/Medusa `medusa_model.py`
(`Sequential` of residual blocks and a linear), zankner/Hydra `hydra_heads`, fms-extras
`MLPSpeculator`, vLLM `medusa.py`.
"""

from __future__ import annotations

import pytest

from specctl import checks, formats
from specctl.formats.registry import BY_NAME
from tests.unit.specctl.formats.edits import DELETE, all_codes, codes, draft, opened, target

HEADS, H, V = 3, 4, 20


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("medusa-clean", HEADS * 3),  # a block's weight and bias, and a head
        ("vllm-medusa-clean", HEADS * 3 + 1),  # and token_map
        ("hydra-clean", HEADS * (4 + 2 + 2)),  # grounded block, plain block, head with bias
        ("hydra-prefix", HEADS * 8 + 9 + 1),  # a decoder layer and a norm before them
        ("mlp-speculator-clean", HEADS * 5),  # emb, proj, head, and a norm of two
        ("mlp-speculator-tied", 6),  # one of each and a second projection
        ("pard-clean", 9 + 3),  # a layer, embedding, norm and head
        ("pard-tied", 9 + 2 + 1),  # the head is the embedding
    ],
)
def test_every_tensor_has_one_role(name: str, count: int) -> None:
    read = draft(name)
    assert len(read.tensors) == count
    assert read.unmapped == ()
    assert read.unknown_fields == ()


def test_medusa_sizes_follow_from_the_tensors() -> None:
    read = draft("medusa-no-count")
    assert (read.hidden_size, read.target_hidden_size, read.target_vocab_size) == (H, H, V)
    assert read.details["num_heads"] == HEADS
    assert read.declared_num_speculative_tokens == HEADS
    assert read.target_name == "example/tiny-llama"
    assert read.origins["draft.target_hidden_size"].kind == "derived"
    assert read.tensors["heads.1.head"].key == "1.1.weight"


def test_medusa_vicuna_says_two_heads_and_holds_more() -> None:
    (found,) = draft("medusa-count-wrong").diagnostics
    assert (found.code, found.severity) == ("SD328", "warning")
    assert (found.expected, found.found) == ("3", "2")
    blocks = draft("medusa-clean", {"medusa_num_layers": 2})
    assert codes(blocks.diagnostics) == ["SD310"]


def test_medusa_fits_a_target_of_its_width_only() -> None:
    read = draft("medusa-clean")
    assert checks.check_pair(read, target("hf-llama-narrow")) == ()
    found = checks.check_pair(read, target("hf-llama-wide"))
    assert [d.code for d in found] == ["SD305", "SD411"]
    assert (found[0].expected, found[0].found) == ("20", "4")


def test_a_token_map_holds_absolute_ids() -> None:
    read = draft("vllm-medusa-clean")
    assert read.map_kind == "reduced"
    assert read.draft_to_target is not None
    assert read.draft_to_target[4] == 7
    assert read.d2t is None
    whole = draft("vllm-medusa-full-rows")
    assert whole.sizes["S"] == V
    assert checks.check_draft(whole) == ()
    short = draft("vllm-medusa-clean", {"truncated_vocab_size": 6})
    assert codes(checks.check_draft(short)) == ["SD410", "SD503"]


def test_a_hydra_head_reads_one_embedding_more_than_the_one_before() -> None:
    read = draft("hydra-clean")
    widths = [read.tensors[f"heads.{h}.blocks.0.weight"].shape[1] for h in range(HEADS)]
    assert widths == [2 * H, 3 * H, 4 * H]
    assert read.tensors["heads.0.blocks.1.weight"].key == "hydra_mlp.0.3.linear.weight"
    assert read.details["head_arch"] == "mlp"
    assert draft("hydra-clean", {"hydra_head_arch": DELETE}).details["head_arch"] == "mlp"


def test_tied_speculator_weights_are_stored_once() -> None:
    read = draft("mlp-speculator-tied")
    assert "emb.1" not in read.tensors
    assert "proj.1" in read.tensors
    untied = draft("mlp-speculator-tied", {"tie_weights": False})
    assert codes(untied.diagnostics) == ["SD328", "SD501"]
    assert all_codes(draft("mlp-speculator-clean", {"inner_dim": 0})) == ["SD503"]


def test_pard_is_a_draft_and_the_same_files_without_the_key_a_target() -> None:
    assert formats.detect(opened("pard-clean")).format == "pard"
    plain = formats.detect(opened("pard-clean", {"pard_token": DELETE}))
    assert (plain.role, plain.format) == ("target", "huggingface")
    read = draft("pard-clean")
    assert (read.hidden_size, read.target_hidden_size, read.mask_token_id) == (6, None, 18)
    assert read.decoder is not None
    assert checks.check_pair(read, target("hf-llama-narrow")) == ()
    tied = draft("pard-tied")
    assert tied.tensors["head"] == tied.tensors["embedding"]


def test_redrafter_is_named_and_declined() -> None:
    assert BY_NAME["redrafter"].read is None
    (found,) = formats.detect(opened("redrafter-declined")).diagnostics
    assert found.code == "SD205"
    assert "ReDrafter" in found.message


def test_a_huge_head_number_makes_no_table() -> None:
    read = draft("medusa-clean", {"medusa_num_heads": DELETE}, add={"999.0.linear.weight": (H, H)})
    assert read.details["num_heads"] == HEADS
    assert "SD502" in codes(read.diagnostics)
