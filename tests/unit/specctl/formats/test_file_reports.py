"""Field reports on files, maps and flags that no format's own test repeats: the right behaviour.

The public issue is named in each docstring; tests of the others are in test_field_reports.py,
beside their formats, and in tests/unit/specctl/checks.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from specctl import checks, formats
from specctl.checkpoint import open_checkpoint
from specctl.contract.diagnostics import Diagnostic
from specctl.ops.deep import deep_findings
from specctl.ops.load import fit, load
from tests.unit.specctl.formats.edits import (
    CHECKPOINTS,
    DELETE,
    all_codes,
    codes,
    draft,
    opened,
    target,
)

EAGLE3 = "speculators-eagle3-clean"
EXPECTED = yaml.safe_load((CHECKPOINTS.parent / "expected.yaml").read_text("utf-8"))


def loaded(name: str) -> tuple[Diagnostic, ...]:
    return load(str(CHECKPOINTS / name)).diagnostics


def deep(name: str, owner: str | None = None) -> list[Diagnostic]:
    source = load(str(CHECKPOINTS / name))
    other = None if owner is None else load(str(CHECKPOINTS / owner))
    source = source if other is None else fit(source, other).draft
    return list(deep_findings(source, other, lambda file, done, total: None))


def test_torchspec_38_an_embedding_is_shared_trained_or_unrelated() -> None:
    """TorchSpec issue 38 (C005): the exporter wrote a random embedding."""
    kinds = {
        name: next(d for d in deep(f"speculators-eagle3-numbers-{name}", "hf-llama-tiny"))
        for name in ("shared", "trained", "unrelated")
    }
    assert {name: (d.code, d.severity) for name, d in kinds.items()} == {
        "shared": ("SD525", "info"),
        "trained": ("SD526", "info"),
        "unrelated": ("SD527", "warning"),
    }
    assert "cosine" in kinds["trained"].message


def test_vllm_28435_a_scale_is_listed_with_its_weight_and_never_lost() -> None:
    """Vllm issue 28435 (C007): scales of a fully quantised draft are no surplus tensors."""
    read = draft("speculators-eagle3-fp8")
    scales = [role for role in read.tensors if role.endswith("weight_scale")]
    assert len(scales) == 7
    assert all(role.replace("weight_scale", "weight") in read.tensors for role in scales)
    assert "SD511" in codes(loaded("speculators-eagle3-fp8-scale-missing"))


def test_vllm_12831_a_bias_is_read_from_the_tensors() -> None:
    """Vllm issue 12831 (C015): some heads have a bias and some do not."""
    assert draft("eagle-bias").has_fc_bias
    assert not draft("eagle-clean").has_fc_bias
    assert "SD501" in codes(loaded("eagle-bias-missing"))


def test_vllm_42376_the_directorys_name_says_nothing(tmp_path: Path) -> None:
    """Vllm issues 42376 and 47486 (C011): methods were guessed from a path."""
    place = tmp_path / "my-eagle3-mtp-model"
    shutil.copytree(CHECKPOINTS / "eagle-clean", place)
    assert load(str(place)).detection.format == "eagle"


def test_specforge_473_a_tied_target_gives_its_embedding_as_head() -> None:
    """SpecForge issue 473 (C029): tied embeddings were ignored, the head was random."""
    owner = target("hf-llama-tied")
    assert owner.is_head_tied
    assert owner.head == owner.embedding


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("container-lfs-pointer", "SD105"),
        ("container-web-page", "SD106"),
        ("container-zeros", "SD107"),
        ("container-header-too-long", "SD101"),
        ("container-trailing", "SD109"),
        ("container-overlap", "SD110"),
        ("container-gap", "SD111"),
        ("container-offsets-reversed", "SD112"),
        ("container-range-wrong", "SD113"),
        ("container-dtype-unknown", "SD114"),
        ("container-index-forgets", "SD126"),
        ("container-index-size", "SD129"),
    ],
)
def test_what_is_no_safetensors_file_is_called_by_its_name(name: str, code: str) -> None:
    """Safetensors issue 668, ComfyUI issue 15602, imp issue 1603 (C117, C119, C121, C131)."""
    found = [d for d in loaded(name) if d.code == code]
    assert found
    assert found[0].help


def test_transformers_30202_a_tie_is_read_only_where_the_config_says_so() -> None:
    """Transformers issue 30202 (C123): tied weights disappear on save."""
    assert codes(target("hf-llama-tied").diagnostics) == []
    (missing,) = target("hf-llama-tied", {"tie_word_embeddings": False}).diagnostics
    assert (missing.code, missing.expected) == ("SD501", "`lm_head.weight`")


def test_foundry_local_910_zeros_in_a_file_of_the_right_size(tmp_path: Path) -> None:
    """foundry-local issue 910 (C127): the second half of a shard is zero, its size is right."""
    place = tmp_path / "draft"
    shutil.copytree(CHECKPOINTS / EAGLE3, place)
    file = place / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(bytes(size - size // 2))
    source = load(str(place))
    assert source.checkpoint.diagnostics == ()
    found = deep_findings(source, None, lambda name, done, total: None)
    assert "SD521" in {d.code for d in found}


def test_automodel_2447_a_missing_map_is_never_the_first_ids() -> None:
    """Automodel issue 2447, verl-SpeCo issue 66 (7): draft ids were taken for target ids."""
    read = draft(EAGLE3, drop=("d2t", "t2d"))
    assert read.draft_to_target is None
    assert "SD401" in all_codes(read)


def test_tokenspeed_526_other_ids_than_the_formula_are_kept() -> None:
    """TokenSpeed issue 526 (17): readers replaced the list by the formula's."""
    read = draft(EAGLE3, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    assert formats.complete_draft(read, target("hf-llama-clean")).aux_layer_ids == (0, 1, 2)


def test_vllm_40727_zlab_ids_are_outputs_of_layers() -> None:
    """Vllm issue 40727 (18b): one numbering was read as the other, at a small loss."""
    read = draft("zlab-dflash-clean")
    assert read.aux_numbering == "output"
    assert read.aux_layer_ids == read.declared_aux_ids
    boundaries = draft("speculators-dflash-clean")
    assert boundaries.declared_aux_ids is not None
    assert boundaries.aux_layer_ids == tuple(k - 1 for k in boundaries.declared_aux_ids)


def test_specforge_139_a_reduced_head_is_never_tied() -> None:
    """SpecForge issue 139, Automodel issue 2319 (24): the flag came from a small target."""
    (found,) = [d for d in loaded("speculators-eagle3-tied-reduced") if d.code == "SD414"]
    assert "24" in found.message
    assert "64" in found.message
    full = draft("speculators-eagle3-identity-bare", {"tie_word_embeddings": True})
    assert "SD414" not in all_codes(full)


def test_vllm_38111_a_norm_and_its_flag_are_one_fact() -> None:
    """Vllm issue 38111 (30): the flag was not passed on, the tensor was surplus."""
    assert codes(loaded("speculators-eagle3-norm-unflagged")) == ["SD506"]
    assert codes(loaded("speculators-eagle3-norm-missing")) == ["SD501"]


@pytest.mark.parametrize(
    ("weights", "config"),
    [
        (EAGLE3, "speculators-eagle3-state-norms"),
        ("speculators-eagle3-last-state", EAGLE3),
        ("speculators-eagle3-wide-target", "speculators-eagle3-old-rope"),
        ("speculators-dspark-clean", "speculators-dspark-no-markov"),
    ],
)
def test_speculators_268_a_config_of_another_run_is_noticed(weights: str, config: str) -> None:
    """Speculators issue 268 (40): config.json was copied from another run."""
    own, other = opened(weights), opened(config)
    swapped = formats.read_draft(replace(own, config=other.config))
    assert {"SD501", "SD502", "SD503", "SD506"} & set(all_codes(swapped))
    assert all_codes(formats.read_draft(own)) == []


def test_vllm_54230_of_two_files_with_one_tensor_the_index_decides() -> None:
    """Vllm issue 54230 (56): a file beside the indexed ones overwrote their weights."""
    assert "SD104" in codes(loaded("container-two-shards"))
    (again,) = open_checkpoint(CHECKPOINTS / "container-stray-again").diagnostics
    assert (again.code, again.severity) == ("SD104", "error")
    assert "consolidated.safetensors" in again.where
    stray = open_checkpoint(CHECKPOINTS / "container-stray-file")
    assert codes(stray.diagnostics) == ["SD124"]
    assert {entry.file for entry in stray.tensors.values()} <= {file.file for file in stray.files}


def test_mlx_vlm_1464_what_lies_beside_the_read_files_is_named(tmp_path: Path) -> None:
    """mlx-vlm issue 1464 (C013): one file beside an index, and a pickle beside safetensors."""
    sharded = tmp_path / "sharded"
    shutil.copytree(CHECKPOINTS / "hf-llama-sharded", sharded)
    shutil.copy(CHECKPOINTS / "hf-llama-clean" / "model.safetensors", sharded)
    (single,) = load(str(sharded)).diagnostics
    assert (single.code, single.severity) == ("SD104", "error")
    assert "model.safetensors.index.json" in single.message
    both = tmp_path / "both"
    shutil.copytree(CHECKPOINTS / EAGLE3, both)
    (both / "pytorch_model.bin").write_bytes(b"PK")
    (pickle,) = load(str(both)).diagnostics
    assert (pickle.code, pickle.severity) == ("SD124", "info")
    assert pickle.where.endswith("pytorch_model.bin")


def test_coser_3_half_of_the_shards_is_not_a_checkpoint() -> None:
    """CoSER issue 3 (58): two files say that they are of four, and there is no index."""
    (found,) = loaded("container-half-uploaded")
    assert (found.code, found.severity) == ("SD122", "error")
    assert "model-00001-of-00004.safetensors" in str(found.found)


def test_no_file_matter_changes_with_the_target_family() -> None:
    """Vllm issues 36063, 46788, 46075 (20, 74): engine faults; the file is right and stays so."""
    assert all_codes(draft(EAGLE3)) == []
    assert codes(loaded("deepseek-mtp-clean")) == ["SD301"]


def test_real_unknown_fields_are_listed_and_clean_fixtures_have_none() -> None:
    """Every config field of a clean draft is read by a rule, or known to have no effect."""
    clean = [name for name in EXPECTED if name.endswith(("-clean", "smollm2-135m-eagle3"))]
    assert len(clean) > 25
    for name in clean:
        assert "SD211" not in EXPECTED[name]["codes"], name
    read = draft("speculators-eagle3-field-unknown")
    assert read.unknown_fields == ("/residual_gate",)
    assert draft("speculators-eagle3-field-unknown", {"residual_gate": DELETE}).unknown_fields == ()


def test_the_real_drafts_have_sound_weights() -> None:
    """The drafts that were trained for SmolLM2 hold no zero, broken or fresh weights."""
    shared = os.environ.get("SPECCTL_SHARED")
    places = [CHECKPOINTS.parent / "drafts" / "smollm2-135m-eagle3"]
    if shared is not None:
        places += [p for p in sorted(Path(shared, "models").iterdir()) if p.is_dir()]
    for place in places:
        source = load(str(place))
        found = deep_findings(source, None, lambda file, done, total: None)
        assert [d.oneline() for d in found] == []
        assert source.draft is not None
        assert source.draft.unknown_fields == ()


@pytest.mark.parametrize(
    ("layers", "severity"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "error"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "warning"),
        (
            {
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 8,
                "use_sliding_window": True,
            },
            None,
        ),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 8}, None),
    ],
)
def test_layers_slide_over_a_window_that_is_stated(
    layers: dict[str, object], severity: str | None
) -> None:
    """A draft trained with a window and served without it (C143) says both in one config."""
    edits = {f"transformer_layer_config.{key}": value for key, value in layers.items()}
    found = [d for d in draft("speculators-dspark-clean", edits).diagnostics if d.code == "SD208"]
    assert [d.severity for d in found] == ([] if severity is None else [severity])


def test_a_tied_draft_with_a_head_of_its_own_is_said_to_contradict() -> None:
    """lfm2.5-1.2b-dflash of SpecForge ties its head; a file that stores one as well says two."""
    name = "speculators-eagle3-identity-bare"
    own = {"embed_tokens.weight": (64, 10)}
    tied = draft(name, {"tie_word_embeddings": True}, add=own)
    assert "SD418" in codes(checks.check_draft(tied))
    assert "SD418" not in codes(checks.check_draft(draft(name, add=own)))
    assert "SD418" not in codes(checks.check_draft(draft(name, {"tie_word_embeddings": True})))


def test_checks_are_quiet_on_a_right_pair() -> None:
    """A draft that fits gives nothing, whichever of the numbers are compared."""
    assert checks.check_pair(draft(EAGLE3), target("hf-llama-clean")) == ()
