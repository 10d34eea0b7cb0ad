"""Speculators 0.9.0 loads every EAGLE draft that we convert to its types and computes the same.

"The same" is judged by an independent reference, which reads the source's own files under the
source's own names: nothing of our name tables or writers takes part in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.checkpoint import open_checkpoint
from specctl.ops.convert import convert
from specctl.ops.given import Given
from specctl.ops.load import fit, load
from tests import reference_eagle3
from tests.third_party.library import Library
from tests.third_party.speculators_inputs import SEQUENCE, draft_inputs

AUX = "eagle_aux_hidden_state_layer_ids"
# Names of the source -> names of the reference, written down by hand.
RENAMES = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
# Source -> boundary ids of a target of eight layers, and the flags that are not false.
SOURCES: Mapping[str, tuple[list[int], dict[str, bool]]] = {
    "safeailab-eagle3-clean": ([2, 4, 5], {}),
    "safeailab-eagle3-two-layers": ([2, 4, 5], {}),
    "safeailab-eagle3-head-dim-absent": ([2, 4, 5], {}),
    "specforge-eagle3-clean": ([2, 4, 5], {}),
    "specforge-eagle3-new-rope": ([2, 4, 5], {}),
    "specforge-eagle3-norm-output": ([2, 4, 5], {"fc_norm": True, "norm_output": True}),
    "specforge-eagle3-aux-norms": ([2, 4, 5], {"fc_norm": True}),
    "modelopt-eagle3-clean": ([2, 4, 5], {}),
    "modelopt-eagle3-nested-norm": ([2, 4, 5], {"norm_before_fc": True}),
    "nemo-eagle3-clean": ([2, 4, 5], {}),
    "deepspec-eagle3-clean": ([2, 3, 5, 6, 7], {}),
    "speculators-eagle3-last-state": ([4, 6, 8], {"norm_before_fc": True}),
    "speculators-eagle3-identity": ([2, 4, 5], {}),
}


def written(source: Path, to: str, out: Path, target: Path) -> Path:
    given = Given(num_speculative_tokens=4, target_name=str(target))
    report = convert(str(source), to=to, out=str(out), target=str(target), given=given)
    assert report.state == "written", [d.message for d in report.diagnostics]
    return out


def target_of(name: str, checkpoints: Path) -> Path:
    is_clean = name == "safeailab-eagle3-clean"
    return checkpoints / ("hf-llama-clean" if is_clean else "hf-llama-tiny")


def stored(place: Path) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(place)
    found = {}
    for key, entry in opened.tensors.items():
        if entry.dtype == "BF16":
            values = torch.frombuffer(bytearray(opened.read_bytes(key)), dtype=torch.bfloat16)
            found[key] = values.view(entry.shape).to(torch.float32)
    return found


def reference_logits(source: Path, target: Path, ids: list[int], flags: dict[str, bool]) -> Any:
    """Return the logits [SEQUENCE, R] that the source's own files give."""
    tensors = {}
    for key, value in stored(source).items():
        for pattern, new in RENAMES:
            key = re.sub(pattern, new, key)
        tensors[key] = value
    config = json.loads((source / "config.json").read_text("utf-8"))
    flat = config.get("transformer_layer_config", config)
    heads = flat["num_attention_heads"]
    rows = tensors["layers.0.self_attn.q_proj.weight"].shape[0]
    layer = {
        "rms_norm_eps": flat["rms_norm_eps"],
        "num_attention_heads": heads,
        "num_key_value_heads": flat["num_key_value_heads"],
        "head_dim": rows // heads,
        "num_hidden_layers": 1 + any(key.startswith("layers.1.") for key in tensors),
        "rope_parameters": {"rope_theta": 10000.0},
    }
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    facts = {
        **{name: flags.get(name, False) for name in names},
        "transformer_layer_config": layer,
        "target_hidden_size": flat["hidden_size"],
    }
    own = tensors.get("embed_tokens.weight")
    embedding = stored(target)["model.embed_tokens.weight"] if own is None else own
    tokens, states = draft_inputs(flat["vocab_size"], len(ids) * flat["hidden_size"])
    fused = reference_eagle3.fuse(tensors, facts, states)
    return reference_eagle3.run(
        tensors, facts, embedding=embedding, ids=tokens, states=fused
    ).logits


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_library_computes_what_the_sources_own_files_give(
    library: Library, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    ids, flags = SOURCES[name]
    target = target_of(name, checkpoints)
    out = written(checkpoints / name, "speculators-eagle3", tmp_path / "out", target)
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config[AUX] == ids
    loaded = library.load(out)
    assert loaded.type == "Eagle3DraftModel"
    loaded.assert_strict()
    expected = reference_logits(checkpoints / name, target, ids, flags)
    found = library.trace(out)
    assert found["shape"] == [1, SEQUENCE, expected.shape[1]]
    # float32 on both sides; two orders of summation over at most 128 positions.
    torch.testing.assert_close(
        torch.tensor(found["logits"]), expected.flatten()[:2000], atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["peagle-clean", "peagle-depths", "speculators-peagle-clean"])
def test_parallel_drafts_load_strictly_and_survive_the_way_there_and_back(
    library: Library, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    target = checkpoints / "hf-llama-tiny"
    first = written(checkpoints / name, "speculators-peagle", tmp_path / "first", target)
    loaded = library.load(first)
    assert loaded.type == "PEagleDraftModel"
    loaded.assert_strict()
    between = written(first, "peagle", tmp_path / "between", target)
    last = written(between, "speculators-peagle", tmp_path / "last", target)
    before, after = library.trace(first), library.trace(last)
    assert before["is_finite"]
    assert before == after


@pytest.mark.parametrize("between", ["nemo-eagle3", "specforge-eagle3", "modelopt-eagle3"])
def test_a_map_in_rank_order_gives_the_same_logits_by_every_way(
    library: Library, checkpoints: Path, tmp_path: Path, between: str
) -> None:
    target = checkpoints / "hf-llama-tiny"
    source = checkpoints / "modelopt-eagle3-clean"
    first = written(source, "speculators-eagle3", tmp_path / "first", target)
    other = written(first, between, tmp_path / "between", target)
    last = written(other, "speculators-eagle3", tmp_path / "last", target)
    assert library.trace(first) == library.trace(last)


@pytest.mark.parametrize(
    ("kind", "architecture", "more"),
    [
        ("eagle3", "Eagle3DraftModel", {}),
        ("eagle3", "Eagle3DraftModel", {"norm_before_fc": True, "norm_output": True}),
        ("eagle3", "Eagle3DraftModel", {"fc_norm": True}),
        ("peagle", "PEagleDraftModel", {"mask_token_id": 63}),
    ],
)
def test_what_the_library_writes_inspects_clean(
    library: Library,
    checkpoints: Path,
    tmp_path: Path,
    kind: str,
    architecture: str,
    more: dict[str, object],
) -> None:
    target = checkpoints / "hf-llama-tiny"
    config = json.loads((checkpoints / "speculators-eagle3-clean/config.json").read_text("utf-8"))
    config["speculators_model_type"] = kind
    config["speculators_config"]["algorithm"] = kind
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    config["transformer_layer_config"] |= {"hidden_size": 10, "intermediate_size": 7}
    config["transformer_layer_config"] |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config |= more
    ids = [0, 1, 2, 3, *range(5, 25)]
    assert library.build(tmp_path, config, ids) == architecture
    pair = fit(load(str(tmp_path)), load(str(target)))
    assert sorted({d.code for d in pair.diagnostics} - {"SD204"}) == []
    assert pair.draft.draft is not None
    assert pair.draft.draft.unmapped == ()
