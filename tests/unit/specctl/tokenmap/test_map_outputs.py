"""What a target wrote is read in every form, counted exactly, and never skipped silently."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.bench.raw import RECORDS_FILE, SETTINGS_FILE, RequestRecord, Settings
from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap.bench_outputs import REDUCED_KEY, ReducedHead
from specctl.tokenmap.cost import accepted_drafts
from specctl.tokenmap.outputs import OutputCounts, Outputs, read_outputs

SIZE = 50


def encode(texts: Sequence[str]) -> Iterable[Sequence[int]]:
    return [[ord(character) % SIZE for character in text] for text in texts]


def read(*paths: Path | str) -> Outputs:
    return read_outputs(paths, tokenizer_size=SIZE, encode=encode)


def counts(outputs: Outputs) -> dict[str, dict[int, int]]:
    return {
        part.name: {i: count for i, count in enumerate(part.per_id) if count}
        for part in outputs.parts
    }


@pytest.mark.parametrize(
    "line",
    [
        {"ids": [1, 2, 2]},
        {"output_token_ids": [1, 2, 2], "text": "ignored"},
        [1, 2, 2],
        {"text": "\x01\x02\x02"},
        "\x01\x02\x02",
        {"choices": [{"text": "\x01\x02\x02"}]},
        {"choices": [{"message": {"role": "assistant", "content": "\x01\x02\x02"}}]},
        {"messages": [{"role": "user", "content": "?"},
                      {"role": "assistant", "content": "\x01\x02\x02"}]},
        {"conversations": [{"from": "human", "value": "?"},
                           {"from": "gpt", "value": "\x01\x02\x02"}]},
    ],
)  # fmt: skip
def test_forms_of_one_answer(tmp_path: Path, line: object) -> None:
    path = tmp_path / "o.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    outputs = read(path)
    assert counts(outputs) == {"o.jsonl": {1: 1, 2: 2}}
    assert outputs.parts[0].num_answers == 1


def test_lists_of_ids_under_a_key(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"note": "x", "f32": [[1], [2, 2]], "other": [[9]]}))
    assert counts(read(f"{path}#f32")) == {"o.json": {1: 1, 2: 2}}
    path.write_text("[[1], [2, 2]]")
    assert counts(read(path)) == {"o.json": {1: 1, 2: 2}}


def test_domains_and_ids_that_the_tokenizer_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    lines = [{"ids": [1, 60], "category": "code"}, {"text": "\x02", "category": "prose"}] * 300
    path.write_text("\n".join(map(json.dumps, lines)))
    outputs = read(path)
    assert counts(outputs) == {"code": {1: 300}, "prose": {2: 300}}
    code, prose = outputs.parts
    assert (code.num_tokens, code.num_outside, prose.num_outside) == (600, 300, 0)


@pytest.mark.parametrize("number", [1, 3, 7])
def test_a_bench_report_says_what_its_draft_reaches(tmp_path: Path, number: int) -> None:
    accepted = round(accepted_drafts(0.6, number) * 10**6)
    drafted = {"rounds": 10**6, "proposed_drafts": number * 10**6, "accepted_drafts": accepted}
    report = {"requests": [{"arm": "speculative", "run": 0, "prompt": 4, "ids": [3], **drafted}]}
    path = tmp_path / "b.json"
    path.write_text(json.dumps(report))
    measured = read(path).measured
    assert measured is not None
    assert measured.num_speculative_tokens == number
    assert measured.accept_length == 1 + accepted / 10**6
    assert measured.acceptance == pytest.approx(0.6, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "code", "place"),
    [
        ("o.jsonl", "{}\n", "SD423", "#1"),
        ("o.jsonl", '{"ids": [1]}\n{"ids": [1, "x"]}', "SD423", "#2"),
        ("o.jsonl", '{"ids": [1]}\nnope', "SD423", "#2"),
        ("o.jsonl", '{"messages": [{"role": "user", "content": "?"}, 3]}', "SD423", "#1"),
        ("o.jsonl", "\n", "SD422", ""),
        ("o.json", "[]", "SD422", ""),
        ("o.json", "[[1], 3]", "SD423", "#/1"),
        ("o.json", "nope", "SD423", ""),
    ],
)
def test_what_is_no_answer_is_an_error(
    tmp_path: Path, name: str, text: str, code: str, place: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DiagnosticError) as caught:
        read(path)
    (found,) = caught.value.diagnostics
    assert (found.code, found.where) == (code, f"{path}{place}")
    with pytest.raises(DiagnosticError):
        read(tmp_path / "absent.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["ids", "text", "choices", "message", "messages", "role", "content", "arm",
                         "kind", "requests", "rounds", "category"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON, max_size=3), st.booleans())
def test_any_json_is_counted_or_refused_with_a_code(
    tmp_path_factory: pytest.TempPathFactory, items: list[object], is_lines: bool
) -> None:
    directory = tmp_path_factory.getbasetemp()
    path = directory / ("fuzz.jsonl" if is_lines else "fuzz.json")
    path.write_text("\n".join(map(json.dumps, items)) if is_lines else json.dumps(items))
    refused: set[str] = set()
    parts: tuple[OutputCounts, ...] = ()
    try:
        parts = read(path).parts
    except DiagnosticError as error:
        refused = {d.code for d in error.diagnostics}
    assert refused <= {"SD422", "SD423"}
    assert bool(refused) != bool(parts)
    for part in parts:
        assert part.num_tokens == sum(part.per_id) + part.num_outside


def request_record() -> RequestRecord:
    return RequestRecord(
        point=0,
        arm="speculative",
        run=0,
        prompt=0,
        turn=1,
        name="first",
        prompt_tokens=3,
        cached_tokens=0,
        ids=[1, 2, 2],
        finish_reason="length",
        rounds=2,
        proposed_drafts=6,
        accepted_drafts=1,
        submitted_s=0.0,
        arrivals=[(0.5, 3)],
    )


def test_the_records_that_a_benchmark_writes_are_read(tmp_path: Path) -> None:
    """The keys are those of the runtime's own record type."""
    record = request_record()
    again = msgspec.structs.replace(record, run=1)
    second = msgspec.structs.replace(record, turn=2, ids=[4])
    lines = [msgspec.json.encode(item) for item in (record, again, second)]
    (tmp_path / RECORDS_FILE).write_bytes(b"\n".join(lines))
    outputs = read(tmp_path)
    assert counts(outputs) == {RECORDS_FILE: {1: 1, 2: 2, 4: 1}}
    assert outputs.measured is not None
    assert outputs.measured.num_speculative_tokens == 3
    assert outputs.measured.accept_length == 1.5
    assert outputs.measured.reduced is None


@pytest.mark.parametrize("name", ["records.jsonl", ""])
def test_the_settings_beside_records_tell_a_reduced_head(tmp_path: Path, name: str) -> None:
    """The key is that of the runtime's own settings."""
    (tmp_path / RECORDS_FILE).write_bytes(msgspec.json.encode(request_record()))
    facts = tmp_path / SETTINGS_FILE
    facts.write_text(json.dumps({"proposer": "mtp"}))
    full = read(tmp_path / name).measured
    assert full is not None
    assert full.reduced is None
    assert REDUCED_KEY in Settings.__struct_fields__
    facts.write_text(json.dumps({"proposer": "mtp", REDUCED_KEY: 24}))
    measured = read(tmp_path / name).measured
    assert measured is not None
    assert measured.reduced == ReducedHead(draft_vocab_size=24, where=f"{facts}#/{REDUCED_KEY}")
    assert measured.accept_length == full.accept_length


def test_acceptance_of_a_full_head_goes_before_that_of_a_reduced_one(tmp_path: Path) -> None:
    for name, facts in (("reduced", {REDUCED_KEY: 24}), ("full", {})):
        (tmp_path / name).mkdir()
        record = msgspec.structs.replace(request_record(), accepted_drafts=len(facts))
        (tmp_path / name / RECORDS_FILE).write_bytes(msgspec.json.encode(record))
        (tmp_path / name / SETTINGS_FILE).write_text(json.dumps(facts))
    measured = read(tmp_path / "reduced", tmp_path / "full").measured
    assert measured is not None
    assert (measured.reduced, measured.accept_length) == (None, 1.0)


@pytest.mark.parametrize("content", ["nope", "[1]", f'{{"{REDUCED_KEY}": "24"}}', None])
def test_settings_that_cannot_be_read_are_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / RECORDS_FILE).write_bytes(msgspec.json.encode(request_record()))
    facts = tmp_path / SETTINGS_FILE
    if content is None:
        facts.mkdir()
    else:
        facts.write_text(content)
    with pytest.raises(DiagnosticError) as caught:
        read(tmp_path)
    (found,) = caught.value.diagnostics
    assert found.code == "SD423"
    assert found.where.startswith(str(facts))
