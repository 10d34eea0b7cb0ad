"""Block drafts over generated configs: names are two-way, and what is written reads as it was."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import formats
from specctl.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from specctl.draft import DraftCheckpoint
from specctl.formats.block import FORMATS
from specctl.formats.block.places import Place, Sections, settle
from specctl.formats.block.tables import TABLES
from specctl.formats.fields import ReaderFindings, root_fields
from specctl.formats.written import Copy, WriteRequest, Written
from tests.unit.specctl.formats.edits import BLOCK_FACTS, CHECKPOINTS

CLEAN = (
    "zlab-dflash-clean",
    "zlab-dflash2-clean",
    "speculators-dflash-clean",
    "speculators-dflash2-clean",
    "speculators-dspark-gated",
    "speculators-dspark-rnn",
    "speculators-xpress-clean",
    "deepspec-dspark-clean",
    "deepspec-dspark-dflash",
    "modelopt-dspark-clean",
)


@cache
def opened(name: str) -> Checkpoint:
    return open_checkpoint(CHECKPOINTS / name)


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_role_has_a_name_that_reads_back_as_the_role(table: str) -> None:
    names_, roles_ = TABLES[table].names, TABLES[table].roles
    for entry in roles_:
        for index in range(3):
            role = entry.name.replace("{i}", str(index))
            key = names_.key_of(role)
            assert key is not None, role
            assert names_.roles_in([key]) == {role: key}


@pytest.mark.parametrize("table", sorted(TABLES))
def test_no_spelling_stands_for_two_roles(table: str) -> None:
    spelled = [key for row in TABLES[table].names.names for key in row.keys]
    assert len(spelled) == len(set(spelled))
    for row in TABLES[table].names.names:
        for key in row.keys:
            spelling = key.replace("{i}", "1")
            role = row.role.replace("{i}", "1")
            assert TABLES[table].names.roles_in([spelling]) == {role: spelling}


def written_back(checkpoint: Checkpoint, written: Written) -> Checkpoint:
    """Return what reading the written files would see; copied bytes stay where they are."""
    tensors = {
        key: TensorEntry(
            key=key,
            file=source.ref.file,
            dtype=source.dtype,
            shape=source.out_shape,
            begin=source.ref.begin,
            end=source.ref.end,
        )
        for key, source in written.tensors.items()
        if isinstance(source, Copy)
    }
    assert len(tensors) == len(written.tensors)
    return replace(checkpoint, config=dict(written.config), tensors=tensors)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[str, DraftCheckpoint, Checkpoint]:
    name = draw(st.sampled_from(CLEAN))
    checkpoint = opened(name)
    config: dict[str, Any] = copy.deepcopy(dict(checkpoint.config or {}))
    is_nested = "transformer_layer_config" in config
    layers = config["transformer_layer_config"] if is_nested else config
    size = draw(st.integers(2, 9))
    outputs = sorted(draw(st.sets(st.integers(0, 7), min_size=5, max_size=5)))
    mask = draw(st.integers(0, 63))
    if draw(st.booleans()):
        kinds = draw(st.lists(st.booleans(), min_size=2, max_size=2))
        layers["layer_types"] = ["sliding_attention" if k else "full_attention" for k in kinds]
        layers |= {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 99))}
    layers["rms_norm_eps"] = draw(st.sampled_from([1e-6, 1e-5]))
    if is_nested:
        config["aux_hidden_state_layer_ids"] = [index + 1 for index in outputs]
        config["mask_token_id"] = mask
        anchor = draw(st.booleans()) and "dflash2" not in name
        config["sample_from_anchor"] = anchor
        config["sliding_window_non_causal"] = draw(st.booleans())
        method = config["speculators_config"]["proposal_methods"][0]
        method["speculative_tokens"] = size if anchor else size - 1
        config["block_size"] = size
    else:
        _edit_flat(config, size, outputs, mask)
    changed = replace(checkpoint, config=config)
    return name, formats.read_draft(changed), changed


def _edit_flat(config: dict[str, Any], size: int, outputs: list[int], mask: int) -> None:
    config.pop("block_size", None)
    nested = config.setdefault("dflash_config", {})
    nested.pop("block_size", None)
    holder = nested if size % 2 else config
    holder["block_size"] = size
    for key, value in (("target_layer_ids", outputs), ("mask_token_id", mask)):
        for place in (config, nested):
            if key in place:
                place[key] = value


@settings(max_examples=120, deadline=None)
@given(drafts(), st.data())
def test_a_draft_read_back_has_the_facts_that_were_written(
    drawn: tuple[str, DraftCheckpoint, Checkpoint], data: st.DataObject
) -> None:
    name, draft, checkpoint = drawn
    target = formats.read_target(opened("hf-llama-tiny"))
    writable = [f for f in FORMATS if f.write is not None and f.algorithm == draft.algorithm]
    entry = data.draw(st.sampled_from(writable))
    assert entry.write is not None
    request = WriteRequest(draft=draft, target=target, target_name="example/target")
    written = entry.write(request)
    codes = {d.code for d in written.diagnostics}
    assert codes <= {"SD601", "SD602"}
    if codes:
        assert entry.name != formats.detect(checkpoint).format
        return
    again = written_back(checkpoint, written)
    assert formats.detect(again).format == entry.name, name
    read = formats.read_draft(again)
    for fact in BLOCK_FACTS:
        assert getattr(read, fact) == getattr(draft, fact), (name, entry.name, fact)
    taken = {source.ref.key for source in written.tensors.values() if isinstance(source, Copy)}
    assert {ref.key for ref in draft.tensors.values()} <= taken


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=5))
def test_a_fact_in_several_places_is_the_first_and_every_other_one_is_named(
    values: list[int | None],
) -> None:
    keys = [f"k{place}" for place in range(len(values))]
    config = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
    root = root_fields(config, ReaderFindings())
    sections = Sections(root=root, nested={})
    found = settle(sections.places(*keys))
    stated = [value for value in values if value is not None]
    if not stated:
        assert found is None
        return
    assert isinstance(found, Place)
    assert found.fields.raw(found.key) == stated[0]
    others = [value for value in stated if value != stated[0]]
    assert len([d for d in root.findings.result() if d.code == "SD208"]) == len(others)
