"""Variants of block drafts: windows, latent attention, Gemma's norms, reduced vocabularies."""

from __future__ import annotations

import pytest

from tests.unit.specctl.formats.edits import all_codes, codes, draft

ZLAB, DEEPSPEC = "zlab-dflash-clean", "deepspec-dspark-clean"


@pytest.mark.parametrize(
    ("stated", "kept"), [(None, {}), (False, {"causal": False}), (True, {"causal": True})]
)
def test_a_flag_for_all_layers_is_kept_where_it_changes_one(
    stated: bool | None, kept: dict[str, bool]
) -> None:
    sliding = {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 16,
    }
    flag = {} if stated is None else {"dflash_config.causal": stated}
    assert dict(draft(ZLAB, {**sliding, **flag}).details) == kept
    # full layers are open anyway
    assert dict(draft(ZLAB, flag).details) == (kept if stated else {})


def test_a_trainers_window_switch_slides_every_layer() -> None:
    read = draft(ZLAB, {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 32})
    assert read.decoder is not None
    assert read.decoder.sliding_window == 32
    assert set(read.decoder.layer_types) == {"sliding_attention"}
    assert "SD208" in codes(
        draft(
            ZLAB,
            {
                "dflash_config.use_swa": True,
                "dflash_config.swa_window_size": 32,
                "sliding_window": 64,
            },
        ).diagnostics
    )


def test_a_reduced_vocabulary_without_a_map_is_refused() -> None:
    """SGLang pull request 34734 stops at such a file; C035."""
    assert "SD401" in all_codes(draft("speculators-dspark-clean", drop=("d2t", "t2d")))
    assert "SD401" in all_codes(draft("speculators-xpress-clean", drop=("d2t", "t2d")))


def test_layers_with_norms_around_both_parts_are_listed_by_size() -> None:
    """Gemma4DSparkModel: the target's layers, so that no Qwen3 layer describes them."""
    norms = [
        f"layers.{index}.{part}_feedforward_layernorm.weight"
        for index in range(2)
        for part in ("pre", "post")
    ]
    edits = {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}
    read = draft(DEEPSPEC, edits, add=dict.fromkeys(norms, (10,)))
    assert all_codes(read) == []
    assert read.decoder is None
    assert read.unmapped == ()
    narrow = draft(DEEPSPEC, edits, add={**dict.fromkeys(norms, (10,)), norms[0]: (9,)})
    assert "SD503" in all_codes(narrow)
    wrong = draft(DEEPSPEC, {**edits, "markov_rank": 4}, add=dict.fromkeys(norms, (10,)))
    assert {"SD503"} <= set(all_codes(wrong))


def test_latent_attention_needs_its_own_names() -> None:
    """lightseekorg/kimi-k3-dflash2 says qwen3 and has MLA tensors."""
    read = draft("zlab-dflash-latent")
    assert read.decoder is None
    assert set(read.sizes) >= {"QA", "QB", "KA", "KR", "KB", "OV", "H", "I"}
    missing = draft("zlab-dflash-latent", drop=("layers.1.self_attn.kv_b_proj.weight",))
    assert "SD501" in codes(missing.diagnostics)
