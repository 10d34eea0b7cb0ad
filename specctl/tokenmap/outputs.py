"""Read what a target itself wrote, the text whose coverage decides how many drafts a map loses.

Forms, decided by content: the JSON of `specctl bench --json` (the answers of one arm, each prompt
once, and the measured acceptance); jsonl whose lines hold token ids or text under the usual names,
chat messages (the assistant's) or an OpenAI response; a JSON list of lists of ids, also as one key
of an object (`file.json#key`).
Invariants: ids are counted as they are, also those that the tokenizer does not have; a line without
an answer is an error, not skipped.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.tokenmap.cost import accepted_drafts

_ID_KEYS = ("ids", "token_ids", "output_ids", "output_token_ids", "completion_ids", "tokens")
_TEXT_KEYS = ("output", "response", "completion", "generated_text", "answer", "text", "content")
_LIST_KEYS = ("messages", "conversations")
_DOMAIN_KEYS = ("domain", "category", "class")
_ASSISTANT = ("assistant", "gpt", "model")
_MAX_BYTES = 4 << 30
_BATCH = 256

Answer = str | tuple[int, ...]
"""One answer: its text, or its target ids."""


class Encode(Protocol):
    """Encodes texts without added special tokens."""

    def __call__(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Return the target ids of each text."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDrafts:
    """What a bench report says about its draft.

    Args:
        num_speculative_tokens: drafts of a round.
        acceptance: at every position alike, the one that gives the measured accept length.
        accept_length: as reported.
    """

    num_speculative_tokens: int
    acceptance: float
    accept_length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputCounts:
    """Occurrences in one part of the outputs.

    Args:
        name: of the domain that the lines name, else of the file.
        per_id: [tokenizer_size] occurrences.
        num_answers: answers.
        num_tokens: tokens, those outside the tokenizer included.
        num_outside: tokens whose id the tokenizer does not have.
    """

    name: str
    per_id: array[int]
    num_answers: int
    num_tokens: int
    num_outside: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """All outputs that were read: parts in the order of their first answer."""

    parts: tuple[OutputCounts, ...]
    measured: MeasuredDrafts | None


@dataclass(slots=True)
class _Part:
    """A part while it is counted."""

    per_id: array[int]
    num_answers: int = 0
    num_outside: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, ids: Iterable[int]) -> None:
        size = len(self.per_id)
        for target_id in ids:
            if 0 <= target_id < size:
                self.per_id[target_id] += 1
            else:
                self.num_outside += 1

    def flush(self, encode: Encode) -> None:
        for ids in encode(self.texts):
            self.add(ids)
        self.texts.clear()


def read_outputs(paths: Iterable[Path | str], *, tokenizer_size: int, encode: Encode) -> Outputs:
    """Count the tokens of outputs.

    Args:
        paths: files, each with an optional `#key` of a JSON object.
        tokenizer_size: ids below it are counted one by one.
        encode: of the target's tokenizer, for answers that are texts.

    Raises:
        DiagnosticError: SD423 for what cannot be read, SD422 for a file without an answer.
    """
    parts: dict[str, _Part] = {}
    measured: MeasuredDrafts | None = None
    for path in paths:
        num_before = sum(part.num_answers for part in parts.values())
        file, document, key = _open(str(path))
        report = document if isinstance(document, dict) else None
        measured = measured or (None if report is None else _measured(report))
        for domain, answer in _answers(file, document, key):
            name = domain or file.name
            part = parts.setdefault(name, _Part(per_id=array("Q", bytes(8 * tokenizer_size))))
            part.num_answers += 1
            if isinstance(answer, str):
                part.texts.append(answer)
                if len(part.texts) >= _BATCH:
                    part.flush(encode)
            else:
                part.add(answer)
        if sum(part.num_answers for part in parts.values()) == num_before:
            raise DiagnosticError(
                diagnose("SD422", where=str(path), message="the file holds no answer of a target")
            )
    counted = []
    for name, part in parts.items():
        part.flush(encode)
        counted.append(
            OutputCounts(
                name=name,
                per_id=part.per_id,
                num_answers=part.num_answers,
                num_tokens=sum(part.per_id) + part.num_outside,
                num_outside=part.num_outside,
            )
        )
    return Outputs(parts=tuple(counted), measured=measured)


def _open(source: str) -> tuple[Path, Any, str | None]:
    """Return the file, its JSON document (None: it is jsonl) and the key after `#`."""
    name, mark, key = source.rpartition("#")
    file = Path(source if not mark or Path(source).exists() else name)
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise _unreadable(str(file), f"{size} bytes, more than {_MAX_BYTES}")
        if file.suffix == ".jsonl":
            return file, None, None
        return file, json.loads(file.read_bytes()), key if file.name != Path(source).name else None
    except OSError as error:
        raise _unreadable(str(file), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(file), f"not JSON: {str(error)[:100]}") from error


def _unreadable(where: str, message: str) -> DiagnosticError:
    return DiagnosticError(
        diagnose(
            "SD423",
            where=where,
            message=message,
            help="Give the JSON of `specctl bench --json`, or jsonl with `ids` or `text` on each "
            "line",
        )
    )


def _answers(file: Path, document: Any, key: str | None) -> Iterator[tuple[str | None, Answer]]:
    """Yield the domain that is named and the answer, for everything in a file."""
    if file.suffix == ".jsonl":
        yield from _lines(file)
        return
    if key:
        document = document.get(key) if isinstance(document, dict) else None
    if isinstance(document, dict) and isinstance(document.get("requests"), list):
        yield from _bench_answers(file, document["requests"])
        return
    items = document if isinstance(document, list) else [document]
    for number, item in enumerate(items):
        yield _answer(item, f"{file}#/{number}")


def _lines(file: Path) -> Iterator[tuple[str | None, Answer]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file}#{number}"
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _unreadable(where, f"not JSON: {str(error)[:100]}") from error
            yield _answer(item, where)


def _bench_answers(file: Path, records: Sequence[Any]) -> Iterator[tuple[str | None, Answer]]:
    """Yield each prompt's answer once: the first run of the first arm that the report has."""
    table = [record for record in records if isinstance(record, dict)]
    arms = [record.get("arm") for record in table]
    arm = "target-only" if "target-only" in arms else next(iter(arms), None)
    seen: set[Any] = set()
    for number, record in enumerate(table):
        if record.get("arm") != arm or record.get("prompt") in seen:
            continue
        seen.add(record.get("prompt"))
        yield None, _answer(record, f"{file}#/requests/{number}")[1]


def _answer(item: Any, where: str) -> tuple[str | None, Answer]:
    """Return the domain that an item names and its answer."""
    if isinstance(item, list) and all(type(i) is int for i in item):
        return None, tuple(item)
    if isinstance(item, str):
        return None, item
    if isinstance(item, dict):
        domain = next((item[k] for k in _DOMAIN_KEYS if isinstance(item.get(k), str)), None)
        answer = _field(item)
        if answer is not None:
            return domain, answer
    keys = ", ".join(map(str, item)) if isinstance(item, dict) else type(item).__name__
    raise _unreadable(where, f"no ids and no text of an answer; there is {keys[:120]}")


def _field(item: Mapping[str, Any]) -> Answer | None:
    for key in _ID_KEYS:
        value = item.get(key)
        if isinstance(value, list) and all(type(i) is int for i in value):
            return tuple(value)
    for key in _LIST_KEYS:
        if isinstance(item.get(key), list):
            return "\n".join(_assistant_texts(item[key]))
    choices = item.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        return _field(message if isinstance(message, dict) else choices[0])
    return next((item[key] for key in _TEXT_KEYS if isinstance(item.get(key), str)), None)


def _assistant_texts(messages: Sequence[Any]) -> Iterator[str]:
    for message in messages:
        if not isinstance(message, dict):
            continue
        role = message.get("role", message.get("from"))
        text = message.get("content", message.get("value"))
        if role in _ASSISTANT and isinstance(text, str):
            yield text


def _measured(report: Mapping[str, Any]) -> MeasuredDrafts | None:
    """Return the acceptance that a bench report measured."""
    length, arms = report.get("accept_length"), report.get("arms")
    if not isinstance(length, (int, float)) or not isinstance(arms, list):
        return None
    counts = [arm.get("num_speculative_tokens") for arm in arms if isinstance(arm, dict)]
    number = max((count for count in counts if type(count) is int), default=0)
    if number < 1 or not 1 <= length <= number + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # accepted_drafts rises with acceptance
        middle = (low + high) / 2
        low, high = (
            (middle, high) if accepted_drafts(middle, number) < length - 1 else (low, middle)
        )
    return MeasuredDrafts(
        num_speculative_tokens=number, acceptance=low, accept_length=float(length)
    )
