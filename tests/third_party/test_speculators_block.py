"""Speculators 0.9.0 loads every block draft that we convert to its types and computes the same.

"The same" is judged by an independent reference (tests/reference_block.py), which reads the
source's own files under the source's own names, and by the bytes of the heads that come after it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from specctl.checkpoint import open_checkpoint
from specctl.ops.convert import convert
from specctl.ops.given import Given
from specctl.ops.load import fit, load
from tests.reference_block import Shape, block_logits
from tests.third_party.library import Library
from tests.third_party.speculators_inputs import draft_inputs
from tests.third_party.zlab_files import floats as stored_floats

SHOWN = 2000  # logits that the worker returns, from the first block on
# Names of a source -> names of a DFlash file with DSpark's heads, written down by hand.
RENAMES = (
    ("logit_head.", ""),
    ("markov_w1.", "markov_head.markov_w1."),
    ("markov_w2.", "markov_head.markov_w2."),
    ("confidence_proj.", "confidence_head.proj."),
)
PAIRS = [
    ("zlab-dflash-clean", "dflash", "DFlashDraftModel"),
    ("zlab-dflash2-clean", "dflash2", "DFlash2DraftModel"),
    ("zlab-dflash2-suffixed", "dflash2", "DFlash2DraftModel"),
    ("deepspec-dspark-clean", "dspark", "DSparkDraftModel"),
    ("deepspec-dspark-dflash", "dspark", "DSparkDraftModel"),
    ("deepspec-dspark-logit-head", "dspark", "DSparkDraftModel"),
    ("modelopt-dspark-clean", "dspark", "DSparkDraftModel"),
]
TO_AND_FRO = [
    ("speculators-dspark-gated", "modelopt-dspark"),
    ("speculators-dspark-rnn", "deepspec-dspark"),
    ("speculators-dspark-no-markov", "deepspec-dspark"),
    ("speculators-dflash2-clean", "zlab-dflash2"),
]


@pytest.fixture
def target(checkpoints: Path) -> Path:
    return checkpoints / "hf-llama-tiny"


def written(source: Path, to: str, out: Path, target: Path, *allow: str) -> Path:
    given = Given(target_name=str(target))
    report = convert(str(source), to=to, out=str(out), target=str(target), given=given, allow=allow)
    assert report.state == "written", [d.message for d in report.diagnostics]
    return out


def renamed(key: str) -> str:
    for old, new in RENAMES:
        if key.startswith(old):
            key = new + key.removeprefix(old)
    if key.startswith("candidate_selector.") and "codebook" in key:
        key = key.removesuffix(".weight")
    return key


def stored(place: Path) -> dict[str, bytes]:
    opened = open_checkpoint(place)
    return {renamed(key): opened.read_bytes(key) for key in opened.tensors}


def floats(place: Path) -> dict[str, torch.Tensor]:
    return {renamed(key): value for key, value in stored_floats(place).items()}


def reference(source: Path, target: Path) -> torch.Tensor:
    """Return the first `SHOWN` logits, block after block from anchor 0 on."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    nested = config.get("dflash_config", {})
    tensors, theirs = floats(source), floats(target)
    shape = Shape(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        layers=2,
        eps=config["rms_norm_eps"],
        block=5,
        mask_id=2,
        group=nested.get("conv_group_size", 0),
    )
    ids, states = draft_inputs(config["vocab_size"], 5 * config["hidden_size"])
    count = -(-SHOWN // (shape.block * config["vocab_size"]))
    blocks = [
        block_logits(
            tensors,
            shape,
            embedding=tensors.get("embed_tokens.weight", theirs["model.embed_tokens.weight"]),
            head=tensors.get("lm_head.weight", theirs["lm_head.weight"]),
            ids=ids,
            states=states,
            anchor=anchor,
        )
        for anchor in range(count)
    ]
    return torch.cat(blocks).flatten()[:SHOWN]


@pytest.mark.parametrize(("name", "kind", "architecture"), PAIRS)
def test_the_library_computes_what_the_sources_own_files_give(
    library: Library,
    checkpoints: Path,
    target: Path,
    tmp_path: Path,
    name: str,
    kind: str,
    architecture: str,
) -> None:
    source = checkpoints / name
    out = written(source, f"speculators-{kind}", tmp_path / "out", target)
    loaded = library.load(out)
    assert loaded.type == architecture
    loaded.assert_strict()
    for key, data in stored(source).items():
        assert loaded.digests[key] == hashlib.sha256(data).hexdigest(), key
    found = library.trace(out)
    assert found["is_finite"]
    # float32 on both sides; two orders of summation over at most 133 positions.
    torch.testing.assert_close(
        torch.tensor(found["logits"]), reference(source, target), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize(("name", "between"), TO_AND_FRO)
def test_the_way_to_another_dialect_and_back_changes_nothing(
    library: Library, checkpoints: Path, target: Path, tmp_path: Path, name: str, between: str
) -> None:
    kind = name.removeprefix("speculators-").split("-")[0]
    first = written(checkpoints / name, f"speculators-{kind}", tmp_path / "first", target)
    other = written(first, between, tmp_path / "between", target)
    last = written(other, f"speculators-{kind}", tmp_path / "last", target)
    taken = () if kind == "dspark" else ("embed_tokens.weight", "lm_head.weight")
    library.load(last, may_miss=taken).assert_strict()
    before, after = library.trace(first), library.trace(last)
    assert before["is_finite"]
    assert before == after


def test_the_librarys_own_converter_and_ours_differ_in_the_last_boundary_only(
    library: Library, checkpoints: Path, target: Path, tmp_path: Path
) -> None:
    source = checkpoints / "zlab-dflash-clean"
    theirs = tmp_path / "theirs"
    library.convert(source, theirs, target=target, algorithm="dflash")
    ours = written(source, "speculators-dflash", tmp_path / "ours", target)
    assert library.load(ours).digests == library.load(theirs, may_miss=_TAKEN).digests
    assert library.trace(ours) == library.trace(theirs)
    found = fit(load(str(theirs)), load(str(target)))
    assert [d.code for d in found.diagnostics if d.severity == "error"] == []


_TAKEN = ("embed_tokens.weight", "lm_head.weight")
