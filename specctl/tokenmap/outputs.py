"""Read what a target itself wrote, the text whose coverage decides how many drafts a map loses.

Forms, decided by content: what `specctl bench --output` writes (the answers of one arm, each prompt
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.tokenmap.bench_outputs import (
    MeasuredDrafts,
    answers_once,
    is_record,
    measured_drafts,
    reduced_head,
)
from specctl.tokenmap.listing import reason_of

_ID_KEYS = ("ids", "token_ids", "output_ids", "output_token_ids", "completion_ids", "tokens")
_TEXT_KEYS = ("output", "response", "completion", "generated_text", "answer", "text", "content")
_LIST_KEYS = ("messages", "conversations")
_DOMAIN_KEYS = ("domain", "category", "class")
_ASSISTANT = ("assistant", "gpt", "model")
RECORDS_FILE = "records.jsonl"
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
    """All outputs that were read.

    Args:
        parts: in the order of their first answer.
        measured: of the first benchmark among them, one of a full head before one of a reduced.
    """

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

    def take(self, answer: Answer, encode: Encode) -> None:
        self.num_answers += 1
        if not isinstance(answer, str):
            self.add(answer)
            return
        self.texts.append(answer)
        if len(self.texts) >= _BATCH:
            self.flush(encode)

    def flush(self, encode: Encode) -> None:
        for ids in encode(self.texts):
            self.add(ids)
        self.texts.clear()


def read_outputs(paths: Iterable[Path | str], *, tokenizer_size: int, encode: Encode) -> Outputs:
    """Count the tokens of outputs.

    Args:
        paths: files, each with an optional `#key` of a JSON object; or directories of a benchmark.
        tokenizer_size: ids below it are counted one by one.
        encode: of the target's tokenizer, for answers that are texts.

    Raises:
        DiagnosticError: SD423 for what cannot be read, SD422 for a file without an answer.
    """
    parts: dict[str, _Part] = {}
    measured: MeasuredDrafts | None = None
    for path in paths:
        num_before = sum(part.num_answers for part in parts.values())
        file, items, found = _open(str(path))
        if measured is None or (measured.reduced and found and not found.reduced):
            measured = found
        for where, item in items:
            domain, answer = _answer(item, where)
            part = parts.setdefault(
                domain or file.name, _Part(per_id=array("Q", bytes(8 * tokenizer_size)))
            )
            part.take(answer, encode)
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


def check_outputs(paths: Iterable[str]) -> None:
    """Refuse outputs that cannot be opened; what they hold is not looked at.

    Raises:
        DiagnosticError: SD423 for each of them.
    """
    problems: list[Diagnostic] = []
    for path in paths:
        try:
            file, _ = _file_and_key(path)
            with _system_refusals(str(file)), file.open("rb"):
                pass
        except DiagnosticError as refused:
            problems += refused.diagnostics
    if problems:
        raise DiagnosticError(problems)


def _file_and_key(source: str) -> tuple[Path, str | None]:
    """Return the file that a source names, and the key of an object in it."""
    name, mark, key = source.rpartition("#")
    with _system_refusals(source):
        is_key = bool(mark) and not Path(source).exists()
        file = Path(name if is_key else source)
        return file / RECORDS_FILE if file.is_dir() else file, key if is_key else None


@contextmanager
def _system_refusals(where: str) -> Iterator[None]:
    """Raise what the system does not let read as SD423."""
    try:
        yield
    except OSError as error:
        raise _unreadable(where, f"cannot be read: {reason_of(error)}") from error


def _open(source: str) -> tuple[Path, Iterator[tuple[str, Any]], MeasuredDrafts | None]:
    """Return the file, place and value of each answer in it, and the acceptance it measured."""
    file, key = _file_and_key(source)
    try:
        with _system_refusals(str(file)):
            size = file.stat().st_size
            if size > _MAX_BYTES:
                raise _unreadable(str(file), f"{size} bytes, more than {_MAX_BYTES}")
            if file.suffix == ".jsonl":
                return _open_lines(file)
            document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(file), f"not JSON: {str(error)[:100]}") from error
    if key is not None:
        document = document.get(key) if isinstance(document, dict) else None
    requests = document.get("requests") if isinstance(document, dict) else None
    if isinstance(requests, list):
        once = ((f"{file}#/requests/{n}", record) for n, record in answers_once(requests))
        return file, once, measured_drafts(requests)
    items = document if isinstance(document, list) else [document]
    return file, ((f"{file}#/{n}", item) for n, item in enumerate(items)), None


def _open_lines(file: Path) -> tuple[Path, Iterator[tuple[str, Any]], MeasuredDrafts | None]:
    """Return the same for jsonl; records of a benchmark are read whole, other lines one by one."""
    lines = _lines(file)
    first = next(lines, None)
    if first is None or not is_record(first[1]):
        return file, _lines(file), None
    records = [first[1], *(item for _, item in lines)]
    once = ((f"{file}#{n + 1}", record) for n, record in answers_once(records))
    reduced = reduced_head(file.parent) if file.name == RECORDS_FILE else None
    return file, once, measured_drafts(records, reduced)


def _unreadable(where: str, message: str) -> DiagnosticError:
    return DiagnosticError(
        diagnose(
            "SD423",
            where=where,
            message=message,
            help="Give a directory of `specctl bench --output`, or jsonl with `ids` or `text` on "
            "each line",
        )
    )


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each line."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file}#{number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _unreadable(where, f"not JSON: {str(error)[:100]}") from error


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
            texts = list(_assistant_texts(item[key]))
            return "\n".join(texts) if texts else None
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
