"""Rotary facts in both spellings, and the embedding among its copies."""

from __future__ import annotations

import pytest

from specctl.checkpoint import TensorEntry
from specctl.formats.embedding import EMBEDDING_KEYS, find_decoys, find_embedding, is_decoy
from specctl.formats.fields import Fields, ReaderFindings
from specctl.formats.rope import read_rope


def rope_of(config: dict[str, object]) -> tuple[object, list[str]]:
    findings = ReaderFindings()
    fields = Fields(
        data=config, pointer="", findings=findings, defaults={"rope_theta": 10000.0}, rule="r"
    )
    return read_rope(fields, "draft.decoder.rope"), [d.code for d in findings.result()]


def entry(key: str) -> TensorEntry:
    return TensorEntry(key=key, file="f", dtype="BF16", shape=(4, 4), begin=0, end=32)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_both_spellings_give_the_same_facts(config: dict[str, object]) -> None:
    rope, found = rope_of(config)
    assert found == []
    assert (
        rope == rope_of({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})[0]
    )
    assert (rope.theta, rope.kind, rope.parameters) == (5e5, "linear", {"factor": 2.0})  # type: ignore[attr-defined]


def test_a_whole_rotation_may_be_stated() -> None:
    rope, found = rope_of({"partial_rotary_factor": 1.0})
    assert found == []
    assert rope == rope_of({})[0]


def test_an_absent_theta_is_the_class_default() -> None:
    rope, found = rope_of({})
    assert (rope.theta, rope.kind, found) == (10000.0, "default", [])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "SD208"),
        (
            {
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"},
                "rope_scaling": {"type": "linear"},
            },
            "SD208",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "SD207"),
        ({"rope_theta": "big"}, "SD207"),
        ({"partial_rotary_factor": 0.5}, "SD207"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, "SD207"),
        ({"rope_theta": -1.0}, "SD207"),
    ],
)
def test_contradictions_are_reported_and_nothing_is_chosen(
    config: dict[str, object], code: str
) -> None:
    rope, found = rope_of(config)
    assert rope is None
    assert found == [code]


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rope_type": None}, "SD208"),  # numbers of a scaling whose kind was lost
        ({"rope_type": "default"}, "SD208"),
        ({"type": "linear"}, "SD208"),
        ({"factor": None}, "SD206"),
        ({"factor": "8.0"}, "SD207"),
        ({"factor": True}, "SD207"),
        ({"factor": 0}, "SD207"),
        ({"factor": -8.0}, "SD207"),
        ({"low_freq_factor": 4.0}, "SD207"),  # the interpolation divides by the difference
        ({"original_max_position_embeddings": [8192]}, "SD207"),
        ({"rope_type": "LLAMA3"}, "SD207"),
        ({"rope_type": ["llama3"]}, "SD207"),
    ],
)
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_numbers_of_a_scaling_must_make_that_scaling(
    section: str, change: dict[str, object], code: str
) -> None:
    rope, found = rope_of({"rope_theta": 5e5, section: {**_LLAMA3, **change}})
    assert rope is None
    assert found == [code]


def test_the_sound_numbers_are_read() -> None:
    rope, found = rope_of({"rope_theta": 5e5, "rope_scaling": _LLAMA3})
    assert found == []
    assert rope.kind == "llama3"  # type: ignore[attr-defined]


def test_two_sections_with_other_numbers_contradict() -> None:
    other = {**_LLAMA3, "factor": 32.0}
    rope, found = rope_of({"rope_theta": 5e5, "rope_parameters": _LLAMA3, "rope_scaling": other})
    assert (rope, found) == (None, ["SD208"])


@pytest.mark.parametrize(
    "section",
    [
        {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
        {"rope_type": "default", "factor": 1.0},
        {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "mscale_all_dim": 0},
        {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"rope_type": "default", "original_max_position_embeddings": 4096},
    ],
)
def test_sections_that_published_configs_hold_are_read(section: dict[str, object]) -> None:
    rope, found = rope_of({"rope_theta": 5e5, "rope_scaling": section})
    assert found == []
    assert rope is not None


@pytest.mark.parametrize("key", EMBEDDING_KEYS)
def test_every_spelling_is_found_and_none_is_a_decoy(key: str) -> None:
    assert not is_decoy(key)
    found = find_embedding({key: entry(key)}, None)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.61.embed_tokens.weight",
        "mtp.embed_tokens.weight",
        "model.mtp.embed_tokens.weight",
        "nextn.embed_tokens.weight",
        "eagle.model.embed_tokens.weight",
        "draft_model.embed_tokens.weight",
    ],
)
def test_a_copy_is_a_decoy_and_never_picked(key: str) -> None:
    tensors = {key: entry(key)}
    assert find_embedding(tensors, None) is None
    assert [found.key for found in find_decoys(tensors)] == [key]


def test_two_genuine_spellings_are_reported() -> None:
    findings = ReaderFindings()
    keys = ("model.embed_tokens.weight", "tok_embeddings.weight")
    found = find_embedding({key: entry(key) for key in keys}, findings)
    assert found is not None
    assert found.key == keys[0]
    assert [d.code for d in findings.result()] == ["SD505"]
