"""EAGLE formats are told apart by names and config, and by nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specctl import formats
from specctl.checkpoint import open_checkpoint
from tests.unit.specctl.formats.edits import CHECKPOINTS, DELETE, codes, opened


@pytest.mark.parametrize(
    ("name", "config", "format"),
    [
        (
            "safeailab-eagle3-clean",
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "specforge-eagle3",
        ),
        ("specforge-eagle3-clean", {"architectures": ["LlamaForCausalLM"]}, "specforge-eagle3"),
        ("modelopt-eagle3-sorted", {"architectures": ["Qwen3Eagle3Model"]}, "deepspec-eagle3"),
        (
            "modelopt-eagle3-sorted",
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "modelopt-eagle3",
        ),
        ("mla-eagle3-clean", {"architectures": ["LlamaForCausalLMEagle3"]}, "mla-eagle3"),
        ("peagle-clean", {"parallel_drafting": DELETE}, "peagle"),
        ("peagle-mask-hidden-missing", {}, "peagle"),
        ("nemo-eagle3-clean", {"architectures": ["LlamaForCausalLMEagle3"]}, "nemo-eagle3"),
    ],
)
def test_what_tells_the_relatives_apart(name: str, config: dict[str, object], format: str) -> None:
    assert formats.detect(opened(name, config)).format == format


@pytest.mark.parametrize(
    ("name", "add"),
    [
        ("speculators-eagle3-clean", {"mask_hidden": (1, 1, 48)}),
        ("safeailab-eagle3-clean", {"fusion_fc.weight": (16, 32)}),
        ("vllm-eagle-clean", {"midlayer.hidden_norm.weight": (10,)}),
    ],
)
def test_a_config_that_the_tensors_contradict_is_refused(
    name: str, add: dict[str, tuple[int, ...]]
) -> None:
    found = formats.detect(opened(name, add=add))
    assert [d.code for d in found.diagnostics] == ["SD202"]


@pytest.mark.parametrize(
    "name", ["deepspec-dspark-clean", "modelopt-dspark-clean", "zlab-dflash2-clean", "domino-clean"]
)
def test_the_heads_of_a_block_draft_contradict_specforges_architecture(name: str) -> None:
    """speculators issue 268: config.json of another run."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 24}
    found = formats.detect(opened(name, config))
    assert [d.code for d in found.diagnostics] == ["SD202"]


def test_both_spellings_of_the_layer_are_one_format_and_refused() -> None:
    both = opened("safeailab-eagle3-clean", add={"layers.0.hidden_norm.weight": (16,)})
    assert formats.detect(both).format == "safeailab-eagle3"
    assert "SD505" in codes(formats.read_draft(both).diagnostics)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("safeailab-eagle3-clean", "safeailab-eagle3"),
        ("specforge-eagle3-clean", "specforge-eagle3"),
        ("peagle-clean", "peagle"),
        ("speculators-peagle-clean", "speculators-peagle"),
        ("mla-eagle3-clean", "mla-eagle3"),
        ("deepspec-eagle3-clean", "deepspec-eagle3"),
        ("vllm-eagle-clean", "vllm-eagle"),
        ("speculators-eagle-clean", "speculators-eagle"),
    ],
)
def test_a_config_alone_tells_the_format(name: str, format: str) -> None:
    assert formats.detect(replace(opened(name), tensors={})).format == format


def test_the_name_of_a_directory_says_nothing_about_an_eagle_1_draft(tmp_path: Path) -> None:
    """vLLM issues 42376 and 47486: the method was guessed from a substring of the path."""
    place = tmp_path / "my-eagle3-mtp-model"
    shutil.copytree(CHECKPOINTS / "eagle-clean", place)
    assert formats.detect(open_checkpoint(place)).format == "eagle"


def test_a_damaged_eagle_3_file_is_not_taken_for_eagle_1() -> None:
    """SGLang issue 21272: an EAGLE-3 draft that ran as EAGLE-1 accepted nothing."""
    layer = tuple(k for k in opened("specforge-eagle3-clean").tensors if k.startswith("midlayer."))
    bare = opened("specforge-eagle3-clean", drop=layer)
    assert formats.detect(bare).format == "specforge-eagle3"
    assert "SD501" in codes(formats.read_draft(bare).diagnostics)
    unnamed = opened("safeailab-eagle3-clean", drop=layer)
    assert [d.code for d in formats.detect(unnamed).diagnostics] == ["SD201"]
