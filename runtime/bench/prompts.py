"""Prompt files: four forms, told apart by their content, each line used or refused.

MT-Bench jsonl (`turns`: the first turn as a user message, the second one after its answer), chat
jsonl (`messages`: up to the last user message), both through the target's chat template; plain text
(one prompt a line, encoded as it is); JSON of token ids (`{"set": [[id, ...], ...]}`). Random ids
stand in where no file is given.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from runtime.bench.settings import Turns
from runtime.engine.text import ChatRenderer
from specctl.contract.diagnostics import DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPrompt:
    """One prompt.

    Args:
        name: where it stands (`question_id` or line).
        question: the user's first question, if the prompt starts a conversation.
        follow_up: the second one, asked after the first answer; None: there is none to ask.
    """

    name: str
    ids_target: tuple[int, ...]
    question: str = ""
    follow_up: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptEncoder:
    """Turns text and messages into target ids; the tokenizer is None where the target has none."""

    tokenizer: Tokenizer | None
    chat: ChatRenderer

    def text(self, text: str, where: str) -> tuple[int, ...]:
        """Encode plain text with the tokenizer's own begin token."""
        return tuple(self._tokenizer(where).encode(text).ids)

    def messages(self, messages: Sequence[Mapping[str, object]], where: str) -> tuple[int, ...]:
        """Render and encode chat messages; the template writes its own begin token."""
        tokenizer = self._tokenizer(where)
        return tuple(tokenizer.encode(self.chat(messages), add_special_tokens=False).ids)

    def second_turn(self, prompt: BenchPrompt, answer: str) -> tuple[int, ...]:
        """Render and encode a conversation up to its second question.

        Args:
            prompt: with a `follow_up`.
            answer: text of the answer to its first question.
        """
        messages: list[Mapping[str, object]] = [
            {"role": "user", "content": prompt.question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": prompt.follow_up},
        ]
        return self.messages(messages, prompt.name)

    def _tokenizer(self, where: str) -> Tokenizer:
        if self.tokenizer is None:
            raise DiagnosticError(
                diagnose(
                    "SD911",
                    where=where,
                    message="text prompts need a tokenizer.json in the target directory",
                    expected="tokenizer.json, or prompts as token ids",
                    found="text",
                )
            )
        return self.tokenizer


def random_prompts(count: int, *, num_tokens: int, num_ids: int, seed: int) -> list[BenchPrompt]:
    """Return prompts of random target ids, the same for the same arguments.

    Args:
        count: prompts; the first ones do not depend on how many follow.
        num_tokens: length of each.
        num_ids: ids are below this.
        seed: of the draws.
    """
    prompts = []
    for index in range(count):
        draw = random.Random(f"{seed}/{num_tokens}/{index}")
        ids = tuple(draw.randrange(num_ids) for _ in range(num_tokens))
        prompts.append(BenchPrompt(name=f"random {index}", ids_target=ids))
    return prompts


def read_prompts(
    path: Path, prompt_set: str | None, encoder: PromptEncoder, *, turns: Turns = "first"
) -> list[BenchPrompt]:
    """Read a prompt file.

    Args:
        path: the file.
        prompt_set: which set of a token-id JSON; needed where it has several.
        encoder: makes target ids of text.
        turns: `both` wants a second question in each line.

    Raises:
        DiagnosticError: SD911-SD913 (encoding), SD920 (form), SD921 (set).
    """
    prompts = _read_prompts(path, prompt_set, encoder)
    if turns == "first":
        return prompts
    for prompt in prompts:
        if prompt.follow_up is None:
            raise _broken(
                f"{path.name}: {prompt.name}",
                "there is no second question",
                expected='{"turns": ["...", "..."]}',
                help="leave `--turns both` out, or give MT-Bench jsonl",
            )
    return prompts


def _read_prompts(path: Path, prompt_set: str | None, encoder: PromptEncoder) -> list[BenchPrompt]:
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        _refuse_set(path, prompt_set)
        return _nonempty(path, _plain(path, text, encoder))
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        document = None  # more than one line: jsonl
    if isinstance(document, dict) and not document.keys() & {"turns", "messages"}:
        rows = read_id_set(path, document, prompt_set, option="--set")
        return [BenchPrompt(name=str(i), ids_target=ids) for i, ids in enumerate(rows)]
    _refuse_set(path, prompt_set)
    return _nonempty(path, _jsonl(path, text, encoder))


def read_references(path: Path, reference_set: str | None) -> list[tuple[int, ...]]:
    """Read reference continuations: a JSON of token ids.

    Raises:
        DiagnosticError: SD920, SD921.
    """
    try:
        document = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise _broken(f"{path.name}", f"the file is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise _broken(f"{path.name}#", "the file is not a JSON object of token-id sets")
    return read_id_set(path, document, reference_set, option="--reference-set")


def read_id_set(
    path: Path, document: Mapping[str, object], name: str | None, *, option: str
) -> list[tuple[int, ...]]:
    """Return one set of a `{"set": [[id, ...], ...]}` document; other keys are notes.

    Raises:
        DiagnosticError: SD920 (not ids), SD921 (no such set, or several and none named).
    """
    sets = {key: value for key, value in document.items() if isinstance(value, list)}
    if not sets:
        raise _broken(f"{path.name}#", "the file has no set of token ids", found=list(document))
    if name is None and len(sets) == 1:
        name = next(iter(sets))
    if name is None or name not in sets:
        near = difflib.get_close_matches(name or "", sets, n=1)
        raise DiagnosticError(
            diagnose(
                "SD921",
                where=f"{path.name}#",
                message=f"there is no set `{name}`" if name else "the file has several sets",
                expected=f"`{option}` with one of {', '.join(f'`{key}`' for key in sets)}",
                found=f"`{name}`" if name else "none named",
                help=f"{option} {near[0]}" if near else None,
            )
        )
    rows = sets[name]
    for index, row in enumerate(rows):
        if not isinstance(row, list) or not row or any(type(item) is not int for item in row):
            raise _broken(f"{path.name}#/{name}/{index}", "a row is not a list of token ids")
    if not rows:
        raise _broken(f"{path.name}#/{name}", "the set is empty", expected="1 row", found=0)
    return [tuple(row) for row in rows]


def _plain(path: Path, text: str, encoder: PromptEncoder) -> list[BenchPrompt]:
    return [
        BenchPrompt(name=f"line {number}", ids_target=encoder.text(line, f"{path.name}:{number}"))
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]


def _jsonl(path: Path, text: str, encoder: PromptEncoder) -> list[BenchPrompt]:
    prompts: list[BenchPrompt] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise _broken(where, f"the line is not JSON: {error}") from error
        messages = _messages_of(record, where)
        prompts.append(
            BenchPrompt(
                name=str(record.get("question_id", f"line {number}")),
                ids_target=encoder.messages(messages, where),
                question=str(messages[0]["content"]),
                follow_up=_second_question(record),
            )
        )
    return prompts


def _second_question(record: object) -> str | None:
    turns = record.get("turns") if isinstance(record, dict) else None
    if isinstance(turns, list) and len(turns) > 1 and isinstance(turns[1], str):
        return turns[1]
    return None


def _messages_of(record: object, where: str) -> list[dict[str, object]]:
    if isinstance(record, dict) and isinstance(record.get("turns"), list):
        turns = record["turns"]
        if turns and isinstance(turns[0], str):
            return [{"role": "user", "content": turns[0]}]
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        messages = record["messages"]
        users = [
            index
            for index, message in enumerate(messages)
            if isinstance(message, dict)
            and message.get("role") == "user"
            and isinstance(message.get("content"), str)
        ]
        if users:
            return [dict(message) for message in messages[: users[-1] + 1]]
    raise _broken(
        where,
        "the line has neither `turns` nor `messages` with a user message",
        expected='{"turns": ["..."]} or {"messages": [{"role": "user", "content": "..."}]}',
        found=sorted(record) if isinstance(record, dict) else type(record).__name__,
    )


def read_text(path: Path) -> str:
    """Return the text of a file of prompts.

    Raises:
        DiagnosticError: SD920, it cannot be read or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise _broken(
            str(path), f"the file cannot be read: {reason}", help="Name a file that exists"
        ) from error
    except UnicodeDecodeError as error:
        raise _broken(str(path), f"the file is not UTF-8 text: {error.reason}") from error


def _nonempty(path: Path, prompts: list[BenchPrompt]) -> list[BenchPrompt]:
    if not prompts:
        raise _broken(path.name, "the file has no prompt", expected="1 prompt", found=0)
    return prompts


def _refuse_set(path: Path, prompt_set: str | None) -> None:
    if prompt_set is not None:
        raise DiagnosticError(
            diagnose(
                "SD921",
                where=path.name,
                message="only a JSON of token ids has sets",
                expected="no `--set`",
                found=f"`{prompt_set}`",
                help="leave `--set` out",
            )
        )


def _broken(
    where: str,
    message: str,
    *,
    expected: object = None,
    found: object = None,
    help: str | None = None,
) -> DiagnosticError:
    return DiagnosticError(
        diagnose("SD920", where=where, message=message, expected=expected, found=found, help=help)
    )
