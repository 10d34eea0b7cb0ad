"""EAGLE dialects: names two-way, readers that never fail, writers that say why."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import checks, formats
from specctl.formats.eagle.eagle3 import SPECULATORS_NAMES
from specctl.formats.eagle.parallel_heads import MAX_TENSORS, heads_names, heads_roles
from specctl.formats.eagle.tables import TABLES
from specctl.formats.fields import ReaderFindings
from specctl.formats.registry import DRAFT_FORMATS
from specctl.formats.written import WriteRequest, num_bytes
from tests.property.test_formats import JSON_VALUES, judge, opened

FORMATS = tuple(
    entry for entry in DRAFT_FORMATS if entry.algorithm in ("eagle", "eagle3", "peagle")
)
CLEAN = tuple(f"{entry.name}-clean" for entry in FORMATS)
LAYER_1 = "layers.1."
ONE_LAYER = ("eagle", "vllm-eagle", "speculators-eagle")


def test_every_eagle_format_has_a_table_and_a_clean_fixture() -> None:
    assert sorted(TABLES) == sorted(entry.name for entry in FORMATS)
    assert all(formats.detect(opened(name)).format == name[: -len("-clean")] for name in CLEAN)


@pytest.mark.parametrize("dialect", sorted(TABLES))
def test_a_role_has_a_name_that_reads_back_as_the_role(dialect: str) -> None:
    table, last = TABLES[dialect].names, 0 if dialect in ONE_LAYER else 2
    for entry in TABLES[dialect].roles:
        for index in range(last + 1):
            role = entry.name.replace("{i}", str(index))
            key = table.key_of(role)
            assert key is not None, role
            assert table.roles_in([key]) == {role: key}


@pytest.mark.parametrize("dialect", sorted(TABLES))
def test_a_spelling_reads_as_its_role(dialect: str) -> None:
    table = TABLES[dialect].names
    for row in table.names:
        for key in row.keys:
            spelling = key.replace("{i}", "1")
            assert table.roles_in([spelling]) == {row.role.replace("{i}", "1"): spelling}


@pytest.mark.parametrize("name", CLEAN)
def test_the_names_of_a_clean_eagle_file_are_written_back(name: str) -> None:
    checkpoint = opened(name)
    table = TABLES[name[: -len("-clean")]].names
    matched = table.match(checkpoint.tensors, ReaderFindings())
    assert matched.unmapped == ()
    assert {table.key_of(role): ref.key for role, ref in matched.tensors.items()} == {
        key: key for key in checkpoint.tensors
    }


def test_parallel_heads_are_two_way_for_the_keys_of_a_file() -> None:
    keys = opened("modelopt-eagle3-parallel-heads").tensors
    table = heads_names(SPECULATORS_NAMES, keys)
    assert len(heads_roles(keys)) == 4
    for entry in heads_roles(keys):
        key = table.key_of(entry.name)
        assert key is not None
        assert key in keys
        assert table.roles_in([key]) == {entry.name: key}


def test_thousands_of_parallel_heads_make_a_bounded_table() -> None:
    keys = [f"parallel_draft_heads.{i}.medusa_layers.0.linear.weight" for i in range(5000)]
    assert len(heads_roles(keys)) == MAX_TENSORS
    assert len(heads_names(SPECULATORS_NAMES, keys).names) <= MAX_TENSORS + 200


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(CLEAN), st.data())
def test_no_eagle_config_makes_a_reader_check_or_writer_fail(
    name: str, data: st.DataObject
) -> None:
    checkpoint = opened(name)
    config = json.loads(json.dumps(checkpoint.config))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = config
        for _ in range(3):
            nested = sorted(key for key in holder if isinstance(holder[key], dict) and holder[key])
            if not nested or not data.draw(st.booleans()):
                break
            holder = holder[data.draw(st.sampled_from(nested))]
        if not holder:
            continue
        key = data.draw(st.sampled_from(sorted(holder)))
        if data.draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = data.draw(JSON_VALUES)
    changed = replace(checkpoint, config=config)
    judge(changed)
    if formats.detect(changed).role == "draft":
        write_everywhere(changed)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(CLEAN), st.data())
def test_no_eagle_tensor_table_makes_a_reader_check_or_writer_fail(
    name: str, data: st.DataObject
) -> None:
    checkpoint = opened(name)
    tensors = dict(checkpoint.tensors)
    for key in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=4, unique=True)):
        entry = tensors.pop(key)
        shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3)))
        edits = {
            "drop": None,
            "shape": msgspec.structs.replace(entry, shape=shape),
            "name": msgspec.structs.replace(entry, key=key + ".extra"),
            "layer": msgspec.structs.replace(entry, key=key.replace("layers.0.", LAYER_1)),
        }
        edited = edits[data.draw(st.sampled_from(sorted(edits)))]
        if edited is not None:
            tensors[edited.key] = edited
    changed = replace(checkpoint, tensors=tensors)
    judge(changed)
    if formats.detect(changed).role == "draft":
        write_everywhere(changed)


def write_everywhere(checkpoint: object) -> None:
    """Ask every writer; a description is complete or says why it is not."""
    draft = formats.read_draft(checkpoint)  # type: ignore[arg-type]
    target = formats.read_target(opened("hf-llama-tiny"))
    checks.check_draft(draft)
    for entry in FORMATS:
        if entry.write is None or entry.algorithm != draft.algorithm:
            continue
        for request in (
            WriteRequest(draft=draft),
            WriteRequest(draft=draft, target=target, target_name="example/tiny"),
        ):
            written = entry.write(request)
            json.dumps(dict(written.config))
            assert written.config or written.diagnostics
            assert all(num_bytes(source) >= 0 for source in written.tensors.values())
