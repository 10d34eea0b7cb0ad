"""Properties of maps, detection, name tables and readers over generated inputs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import checks, formats
from specctl.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.map_encoding import decide_map_encoding
from specctl.contract.roles import ROLES_BY_ALGORITHM, TARGET_ROLES
from specctl.contract.vocabulary_map import absolute_to_offsets, offsets_to_absolute, target_mask
from specctl.formats import huggingface
from specctl.formats.block.names import DSPARK_NAMES
from specctl.formats.eagle.eagle3 import SAFEAILAB_NAMES, SPECULATORS_NAMES
from specctl.formats.fields import ReaderFindings
from specctl.formats.mtp import generic
from specctl.formats.mtp.families import DEEPSEEK, SPECULATORS
from specctl.formats.mtp.part import find_part
from specctl.formats.names import NameTable
from tests.fuzz_strategies import edited_tensors

CHECKPOINTS = Path(__file__).parents[2] / "fixtures" / "checkpoints"
CLEAN = (
    "hf-llama-clean",
    "hf-qwen3-clean",
    "hf-llama-tied",
    "speculators-eagle3-clean",
    "speculators-dspark-clean",
    "speculators-mtp-clean",
    "safeailab-eagle3-clean",
    "deepseek-mtp-clean",
)
FUZZED = (
    *CLEAN,
    "hf-glm45-mtp",
    "hf-nemotron-h-mtp",
    "hf-qwen35-moe-mtp",
    "qwen-mtp-clean",
    "speculators-mtp-experts",
    "gemma4-assistant-ordered",
)
QUICK = settings(max_examples=60, deadline=None)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 99)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = st.sampled_from(
    [
        "fc.weight",
        "midlayer.hidden_norm.weight",
        "layers.0.hidden_norm.weight",
        "layers.0.self_attn.q_proj.weight",
        "markov_head.markov_w1.weight",
        "confidence_head.proj.weight",
        "mtp_layers.0.input_proj.weight",
        "mtp.fc.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.0.e_proj.weight",
        "mtp.layers.0.eh_proj.weight",
        "model.mtp.layers.0.enorm.weight",
        "model.mtp_layers.0.input_proj.weight",
        "pre_projection.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.8.eh_proj.weight",
        "model.embed_tokens.weight",
        "embed_tokens.weight",
        "transformer.wte.weight",
        "mask_hidden",
        "hidden_norm.weight",
        "lm_head.weight",
        "d2t",
    ]
)


@cache
def opened(name: str) -> Checkpoint:
    return open_checkpoint(CHECKPOINTS / name)


def judge(checkpoint: Checkpoint) -> None:
    """Detect, read and check; only a coded refusal may be raised."""
    detection = formats.detect(checkpoint)
    if detection.format is None:
        with pytest.raises(DiagnosticError):
            formats.read_draft(checkpoint)
        return
    if detection.role == "draft":
        draft = formats.read_draft(checkpoint)
        for name in ("hf-llama-clean", "hf-llama-wide", "hf-gpt2-unsupported"):
            target = formats.read_target(opened(name))
            completed = formats.complete_draft(draft, target)
            for draft_form in (draft, completed):
                checks.check_draft(draft_form)
                checks.check_pair(draft_form, target)
                draft_form.to_draft(source=".", revision=None)
    else:
        target = formats.read_target(checkpoint)
        checks.check_target(target)
        if detection.bundled is not None:
            checks.check_draft(formats.read_draft(checkpoint, detection))
        target.to_target(source=".", revision=None)


@st.composite
def maps(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    size = draw(st.integers(2, 80))
    ids = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    return tuple(ids), size


@QUICK
@given(maps())
def test_offsets_and_absolute_ids_are_inverse(drawn: tuple[tuple[int, ...], int]) -> None:
    ids, _ = drawn
    assert offsets_to_absolute(absolute_to_offsets(ids)) == ids
    assert absolute_to_offsets(offsets_to_absolute(ids)) == ids


@QUICK
@given(maps())
def test_a_mask_marks_as_many_ids_as_the_map_has(drawn: tuple[tuple[int, ...], int]) -> None:
    ids, size = drawn
    mask = target_mask(ids, size)
    assert sum(mask) == len(ids)
    assert all(mask[token] for token in ids)


@QUICK
@given(maps(), st.sampled_from(["offset", "absolute"]))
def test_a_mask_decides_the_encoding_unless_both_readings_fit(
    drawn: tuple[tuple[int, ...], int], kind: str
) -> None:
    ids, size = drawn
    stored = absolute_to_offsets(ids) if kind == "offset" else ids
    found = decide_map_encoding(stored, target_mask(ids, size), size)
    if found.kind == "ambiguous":
        readings = (offsets_to_absolute(stored), stored)
        assert set(readings[0]) == set(readings[1])
    else:
        assert found.draft_to_target == ids


@QUICK
@given(maps())
def test_without_a_mask_the_right_map_is_found_or_nothing(
    drawn: tuple[tuple[int, ...], int],
) -> None:
    ids, size = drawn
    found = decide_map_encoding(absolute_to_offsets(ids), None, size)
    assert found.draft_to_target in (ids, None)
    assert (found.draft_to_target is None) == (found.kind == "ambiguous")


@QUICK
@given(
    st.lists(KEYS, unique=True),
    st.dictionaries(
        st.sampled_from(
            ["speculators_model_type", "architectures", "dflash_config", "draft_vocab_size"]
        ),
        st.sampled_from(["eagle3", "dspark", "mtp", "dflash", ["LlamaForCausalLM"], 24, None]),
    ),
)
def test_detection_is_total_and_unique(keys: list[str], config: dict[str, Any]) -> None:
    entries = {
        key: TensorEntry(key=key, file="f", dtype="BF16", shape=(2, 2), begin=0, end=8)
        for key in keys
    }
    base = opened("speculators-eagle3-clean")
    found = formats.detect(replace(base, config=config, tensors=entries))
    assert (found.format is None) == (found.role is None)
    assert len(found.diagnostics) == (1 if found.format is None else 0)
    order = list(entries.items())
    random.Random(7).shuffle(order)
    again = formats.detect(replace(base, config=config, tensors=dict(order)))
    assert again == found


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FUZZED), st.data())
def test_no_config_makes_a_reader_or_check_fail(name: str, data: st.DataObject) -> None:
    checkpoint = opened(name)
    config = json.loads(json.dumps(checkpoint.config))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = config
        while True:
            key = data.draw(st.sampled_from(sorted(holder)))
            value = holder[key]
            if isinstance(value, dict) and value and data.draw(st.booleans()):
                holder = value
                continue
            break
        if data.draw(st.booleans()):
            del holder[key]
            if not config:
                break
            if not holder:
                holder["left"] = 1
        else:
            holder[key] = data.draw(JSON_VALUES)
    judge(replace(checkpoint, config=config))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FUZZED), st.data())
def test_no_tensor_table_makes_a_reader_or_check_fail(name: str, data: st.DataObject) -> None:
    judge(data.draw(edited_tensors(opened(name), renamed=lambda key: key + ".extra")))


@QUICK
@given(st.sampled_from(CLEAN), st.lists(st.text("abc.0123{}i", min_size=1, max_size=9), max_size=4))
def test_every_tensor_is_consumed_once_or_reported(name: str, extra: list[str]) -> None:
    checkpoint = opened(name)
    some = next(iter(checkpoint.tensors.values()))
    tensors = {
        **checkpoint.tensors,
        **{key: msgspec.structs.replace(some, key=key) for key in extra},
    }
    changed = replace(checkpoint, tensors=tensors)
    if formats.detect(changed).role == "draft":
        read: Any = formats.read_draft(changed)
    else:
        read = formats.read_target(changed)
    used = [ref.key for ref in read.tensors.values()]
    assert len(used) == len(set(used))
    assert sorted([*used, *read.unmapped]) == sorted(tensors)


TABLES: Mapping[str, tuple[NameTable, tuple[Any, ...]]] = {
    "speculators-eagle3": (SPECULATORS_NAMES, ROLES_BY_ALGORITHM["eagle3"]),
    "safeailab-eagle3": (SAFEAILAB_NAMES, ROLES_BY_ALGORITHM["eagle3"]),
    "speculators-dspark": (DSPARK_NAMES, ROLES_BY_ALGORITHM["dspark"]),
    "speculators-mtp": (
        generic.names_of(generic.empty_part(SPECULATORS, 0)),
        ROLES_BY_ALGORITHM["mtp"],
    ),
    "deepseek-mtp": (generic.names_of(generic.empty_part(DEEPSEEK, 61)), ROLES_BY_ALGORITHM["mtp"]),
    "huggingface": (huggingface.NAMES, TARGET_ROLES),
}


@pytest.mark.parametrize("dialect", sorted(TABLES))
def test_every_role_has_a_name_that_reads_back_as_the_role(dialect: str) -> None:
    table, roles = TABLES[dialect]
    last = 0 if dialect.endswith("mtp") else 2
    for entry in roles:
        for index in range(last + 1):
            role = entry.name.replace("{i}", str(index))
            key = table.key_of(role)
            assert key is not None, role
            assert table.roles_in([key]) == {role: key}


@pytest.mark.parametrize("dialect", sorted(TABLES))
def test_every_spelling_of_a_table_reads_as_its_role(dialect: str) -> None:
    table, _ = TABLES[dialect]
    for row in table.names:
        for key in row.keys:
            spelling = key.replace("{i}", "1")
            assert table.roles_in([spelling]) == {row.role.replace("{i}", "1"): spelling}


@pytest.mark.parametrize("name", CLEAN)
def test_the_names_of_a_clean_file_are_written_back(name: str) -> None:
    checkpoint = opened(name)
    detection = formats.detect(checkpoint)
    part = find_part(DEEPSEEK, checkpoint.tensors)
    dialect = detection.format or ""
    table = TABLES[dialect][0] if part is None else generic.names_of(part)
    matched = table.match(checkpoint.tensors, ReaderFindings())
    assert {table.key_of(role): ref.key for role, ref in matched.tensors.items()} == {
        key: key for key in checkpoint.tensors
    }
