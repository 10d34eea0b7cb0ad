"""No config and no tensor table makes a reader, check or writer of block drafts fail."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import checks, formats
from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.formats.block import FORMATS
from specctl.formats.written import WriteRequest
from tests.fuzz_strategies import edited_tensors

CHECKPOINTS = Path(__file__).parents[2] / "fixtures" / "checkpoints"
NAMES = (
    "zlab-dflash-clean",
    "zlab-dflash-mask-file",
    "zlab-dflash-latent",
    "zlab-dflash2-clean",
    "laguna-dflash-clean",
    "domino-clean",
    "deepspec-dspark-bonus-anchor",
    "deepspec-dspark-logit-head",
    "modelopt-dspark-clean",
    "speculators-dflash-clean",
    "speculators-dflash2-clean",
    "speculators-dspark-rnn",
    "speculators-xpress-clean",
    "deepseek-v4-dspark-stages",
    "hf-deepseek-v4-dspark",
)
KEYS = (
    "block_size",
    "dspark_block_size",
    "sample_from_anchor",
    "dspark_bonus_anchor",
    "target_layer_ids",
    "layer_ids",
    "mask_token_id",
    "causal",
    "use_swa",
    "swa_window_size",
    "num_target_layers",
    "conv_group_size",
    "dflash_config",
    "dspark_config",
    "markov_rank",
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 99)
    | st.sampled_from([2**31, -(2**63), 1e308, "", "gated"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=2)
    ),
    max_leaves=4,
)


@cache
def opened(name: str) -> Checkpoint:
    return open_checkpoint(CHECKPOINTS / name)


def judge(checkpoint: Checkpoint) -> None:
    detection = formats.detect(checkpoint)
    if detection.format is None or (detection.role == "target" and detection.bundled is None):
        return
    target = formats.read_target(opened("hf-llama-tiny"))
    draft = formats.complete_draft(formats.read_draft(checkpoint, detection), target)
    checks.check_draft(draft)
    checks.check_pair(draft, target)
    draft.to_draft(source=".", revision=None)
    formats.with_given(draft, num_speculative_tokens=3)
    used = [ref.key for ref in draft.tensors.values()]
    assert len(used) == len(set(used))
    for other in (None, target):
        for entry in FORMATS:
            if entry.write is not None and entry.algorithm == draft.algorithm:
                entry.write(WriteRequest(draft=draft, target=other, target_name="example/target"))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_no_config_makes_reading_or_writing_fail(name: str, data: st.DataObject) -> None:
    checkpoint = opened(name)
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config or {}))
    for _ in range(data.draw(st.integers(1, 3))):
        holders = [config, *(value for value in config.values() if isinstance(value, dict))]
        holder = data.draw(st.sampled_from(holders))
        key = data.draw(st.sampled_from([*sorted(holder), *KEYS]))
        if data.draw(st.booleans()):
            holder.pop(key, None)
        else:
            holder[key] = data.draw(VALUES)
    judge(replace(checkpoint, config=config))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_no_tensor_table_makes_reading_or_writing_fail(name: str, data: st.DataObject) -> None:
    judge(data.draw(edited_tensors(opened(name), renamed=lambda key: key.replace(".0.", ".7."))))
