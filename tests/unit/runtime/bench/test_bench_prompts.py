"""Prompt files: four forms, and every way in which they can be wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from runtime.bench.prompts import PromptEncoder, read_prompts, read_references
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from tests.unit.runtime.server.scripted_engine import TOKENIZER

FIXTURES = Path(__file__).parents[4] / "fixtures" / "prompts"


def render(messages: Sequence[Mapping[str, object]]) -> str:
    return "|".join(f"{message['role']}:{message['content']}" for message in messages)


ENCODER = PromptEncoder(tokenizer=TOKENIZER, chat=render)


def read(tmp_path: Path, text: str, prompt_set: str | None = None) -> list[tuple[str, str]]:
    path = tmp_path / "prompts"
    path.write_text(text)
    prompts = read_prompts(path, prompt_set, ENCODER)
    return [(prompt.name, TOKENIZER.decode(list(prompt.ids_target))) for prompt in prompts]


def refused(tmp_path: Path, text: str, prompt_set: str | None = None) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        read(tmp_path, text, prompt_set)
    return caught.value.diagnostics[0]


def test_mt_bench_uses_the_first_turn(tmp_path: Path) -> None:
    lines = [{"question_id": 81, "turns": ["one", "two"]}, {"turns": ["three"]}]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    assert read(tmp_path, text) == [("81", "user:one"), ("line 2", "user:three")]


def test_one_line_of_jsonl_is_not_a_set_of_ids(tmp_path: Path) -> None:
    assert read(tmp_path, '{"turns": ["one"]}') == [("line 1", "user:one")]


def test_chat_ends_at_the_last_user_message(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "left out"},
    ]
    text = json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": messages[1:2]})
    assert read(tmp_path, text) == [("line 1", "system:s|user:a"), ("line 2", "user:a")]


def test_plain_text_is_encoded_as_it_is(tmp_path: Path) -> None:
    assert read(tmp_path, "one\n\n  two\n") == [("line 1", "one"), ("line 3", "  two")]


def test_sets_of_ids(tmp_path: Path) -> None:
    one = json.dumps({"note": "x", "a": [[5, 6], [7]]})
    two = json.dumps({"a": [[5, 6]], "b": [[7]]})
    assert len(read(tmp_path, one)) == 2
    assert read(tmp_path, two, "b") == [("0", TOKENIZER.decode([7]))]
    several = refused(tmp_path, two)
    assert several.code == "SD921"
    assert "`a`, `b`" in str(several.expected)
    assert refused(tmp_path, two, "bb").help == "--set b"


@pytest.mark.parametrize(
    ("text", "prompt_set", "code"),
    [
        ("", None, "SD920"),
        ("\n\n", None, "SD920"),
        ('{"turns": ["a"]}\n{"turns": [', None, "SD920"),
        ('{"turns": []}', None, "SD920"),
        ('{"turns": ["a"]}\n{"other": 1}', None, "SD920"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', None, "SD920"),
        ('{"a": [[1, "b"]]}', None, "SD920"),
        ('{"a": [[]]}', None, "SD920"),
        ('{"a": []}', None, "SD920"),
        ('{"note": "no set"}', None, "SD920"),
        ("plain\n", "a", "SD921"),
        ('{"turns": ["a"]}', "a", "SD921"),
    ],
)
def test_broken_files_are_refused(
    tmp_path: Path, text: str, prompt_set: str | None, code: str
) -> None:
    assert refused(tmp_path, text, prompt_set).code == code


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_prompts(tmp_path / "none", None, ENCODER)
    assert caught.value.diagnostics[0].code == "SD920"
    (tmp_path / "text").write_text("no json")
    with pytest.raises(DiagnosticError):
        read_references(tmp_path / "text", None)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("text")
    with pytest.raises(DiagnosticError) as caught:
        read_prompts(path, None, PromptEncoder(tokenizer=None, chat=render))
    assert caught.value.diagnostics[0].code == "SD911"


def test_the_fixtures_belong_together() -> None:
    prompts = read_prompts(FIXTURES / "smollm2_mt_bench_first8_ids.json", "mt_bench", ENCODER)
    references = read_references(FIXTURES / "smollm2_mt_bench_first8_greedy128.json", "f32")
    questions = (FIXTURES / "mt_bench_first8.jsonl").read_text().splitlines()
    assert len(prompts) == len(references) == len(questions) == 8
    assert {len(reference) for reference in references} == {128}
    assert [json.loads(line)["question_id"] for line in questions] == list(range(81, 89))


def test_a_file_that_is_not_there_asks_for_one_that_is(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_prompts(tmp_path / "absent.jsonl", None, ENCODER)
    found = caught.value.diagnostics[0]
    assert (found.code, found.help) == ("SD920", "Name a file that exists")
    assert found.message.endswith("No such file or directory")
