"""Read the documents of one corpus file as pieces of bounded size, and name what is no text.

Invariants: the pieces of a document joined are its UTF-8 bytes; a document is cut only at
`cuts.PIECE_CUT`, and only when the tokenizer's structure allows it, so tokens do not depend on the
cut; memory is bounded by `MAX_PIECE_BYTES`. A defect is a counted `Defect`, never a silent skip.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.text import printable
from specctl.tokenmap.chat import ChatTemplate
from specctl.tokenmap.cuts import L, char_class
from specctl.tokenmap.documents import CHAT_FIELDS, MAX_LINE_BYTES, has_roles, line_value, row_text
from specctl.tokenmap.languages import language_of
from specctl.tokenmap.listing import reason_of, suffix_of
from specctl.tokenmap.sources import COLUMN_SUFFIXES, LINE_SUFFIXES, STDIN, SourceFile, Task

PIECE_BYTES = 4 << 20
MAX_PIECE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 16
_SKIP_BYTES = 1 << 20
UNREADABLE = "a file that cannot be read"
"""How kinds of defect begin whose cause is the system: SD423, all others are no text: SD434."""
REPLACED = "half surrogate pairs, counted as U+FFFD"
WITHOUT_ROLES = "without chat messages, counted as they stand"
"""The two kinds of defect whose text is counted; the second where roles or a template act."""
_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How documents are read.

    Args:
        fields: keys whose texts are joined; empty: by the usual names.
        roles: chat roles that count; empty: all.
        language_field: key that names a document's language; None: by suffix or script.
        can_cut: long documents may be cut at `cuts.PIECE_CUT`.
        chat: renders the messages of a row; None: their contents are joined.
    """

    fields: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    language_field: str | None = None
    can_cut: bool = True
    chat: ChatTemplate | None = None

    @property
    def is_for_texts(self) -> bool:
        """Whether nothing was asked that acts on chat messages only."""
        return not self.roles and self.chat is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of a document, most often all of it.

    Args:
        data: valid UTF-8.
        where: file name, with `#line` or `#row`.
        language: of the document.
        is_first: the document begins here.
        is_last: the document ends here.
    """

    data: bytes
    where: str
    language: str
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """Something that is no text and was left out.

    Args:
        kind: one phrase, the same for all of its kind.
        where: its place.
    """

    kind: str
    where: str


def read_pieces(file: SourceFile, task: Task, reading: Reading) -> Iterator[Piece | Defect]:
    """Yield the documents of one file of a task; blank ones are left out.

    Raises:
        DiagnosticError: SD435 when the file needs a package that is missing.
    """
    suffix = file.kind
    try:
        if suffix in COLUMN_SUFFIXES:
            yield from _from_table(file, reading)
            return
        with _opened(file.path) as stream:
            if suffix in LINE_SUFFIXES:
                yield from _from_lines(stream, file, task, reading)
            else:
                yield from _from_text(stream, file, reading)
    except (OSError, EOFError, zlib.error) as error:
        yield Defect(kind=_failure(error), where=file.path)


def _from_table(file: SourceFile, reading: Reading) -> Iterator[Piece | Defect]:
    from specctl.tokenmap.columnar import TableRefusedError, read_rows

    try:
        for where, row in read_rows(file.path, reading):
            yield from _from_row(row, where, file, reading)
    except TableRefusedError:
        yield Defect(kind="a table that is damaged or cut off", where=file.path)


def _failure(error: OSError | EOFError | zlib.error) -> str:
    # What unpacks raises OSError without a number of the system, gzip and zstd alike.
    if not isinstance(error, OSError) or error.errno is None:
        return "compressed data that is damaged or cut off"
    return f"{UNREADABLE} ({reason_of(error)})"


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    suffix = suffix_of(path).lower()
    if path == STDIN:
        yield sys.stdin.buffer
    elif suffix == ".gz":
        with gzip.open(path, "rb") as packed:
            yield cast("IO[bytes]", packed)
    elif suffix == ".zst":
        from specctl.tokenmap.columnar import open_zstd

        with open_zstd(path) as stream:
            yield stream
    else:
        with io.BufferedReader(io.FileIO(path), _BUFFER_BYTES) as plain:
            yield cast("IO[bytes]", plain)


def _from_text(stream: IO[bytes], file: SourceFile, reading: Reading) -> Iterator[Piece | Defect]:
    # One byte more than the file holds: a short read is its end and needs no second one.
    size = PIECE_BYTES
    if file.num_bytes and not file.is_packed:
        size = min(size, file.num_bytes + 1)
    buffer = stream.read(size)
    is_end = len(buffer) < size
    buffer = buffer.removeprefix(_BOM)
    if b"\0" in buffer[:8192]:
        is_wide = buffer.startswith(_WIDE_BOMS)
        kind = "text in UTF-16 or UTF-32; only UTF-8 is read" if is_wide else "a binary file"
        yield Defect(kind=kind, where=file.path)
        return
    if not reading.is_for_texts and buffer.strip():
        yield Defect(kind=WITHOUT_ROLES, where=file.path)
    language = language_of(file.kind, buffer)
    is_first, searched = True, 0
    while True:
        block = b"" if is_end else stream.read(PIECE_BYTES)
        place = len(buffer)
        if block:
            place = last_cut(buffer, searched, len(buffer)) if reading.can_cut else 0
            searched = 0 if place else len(buffer) - 1
        if not place and len(buffer) > MAX_PIECE_BYTES:
            yield Defect(kind="text without a place where it may be cut", where=file.path)
            return
        data = buffer[:place]
        if data and not (is_first and not block and not data.strip()):
            bad = _bad_byte(data)
            if bad is not None:
                yield Defect(kind="text that is not UTF-8", where=f"{file.path} byte {bad:#x}")
                return
            yield Piece(
                data=data, where=file.path, language=language, is_first=is_first, is_last=not block
            )
            is_first = False
        if not block:
            return
        buffer = buffer[place:] + block


def last_cut(data: bytes, start: int, end: int) -> int:
    """Return the last place in [start, end) where a document may be cut, 0: none."""
    while (at := data.rfind(b" ", max(start, 2), end)) >= 0:
        if _is_cut(data, at):
            return at
        end = at
    return 0


def next_cut(data: bytes, start: int) -> int:
    """Return the first place at or after `start` where a document may be cut, else its end."""
    at = max(start, 2)
    while (at := data.find(b" ", at)) >= 0:
        if _is_cut(data, at):
            return at
        at += 1
    return len(data)


def _is_cut(data: bytes, at: int) -> bool:
    """Whether `cuts.PIECE_CUT` holds at the space at `at`."""
    left, right = data[at - 2 : at], data[at + 1 : at + 2]
    if left.isascii() and right.isascii():
        return left.isalpha() and right.isalpha()  # bytes.isalpha knows ASCII letters only
    before = data[max(0, at - 8) : at].decode("utf-8", "ignore")[-2:]
    after = data[at + 1 : at + 5].decode("utf-8", "ignore")[:1]
    return len(before + after) == 3 and all(char_class(ord(c)) == L for c in before + after)


def _bad_byte(data: bytes) -> int | None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return data[error.start]
    return None


def _from_lines(
    stream: IO[bytes], file: SourceFile, task: Task, reading: Reading
) -> Iterator[Piece | Defect]:
    number, at = 0, task.begin
    if at:  # a line belongs to the range that holds its first byte
        stream.seek(at - 1)
        at = _after_line(stream, at - 1, task.end)
    while task.end is None or at < task.end:
        raw = stream.readline(MAX_LINE_BYTES + 1)
        if not raw:
            return
        number += 1
        at += len(raw)
        where = f"{file.path}#{number}" if not task.begin else f"{file.path}@{at - len(raw)}"
        if len(raw) > MAX_LINE_BYTES:
            if not raw.endswith(b"\n"):
                at = _after_line(stream, at, task.end)
            yield Defect(kind="a line that is too long for one document", where=where)
        elif raw.strip():
            yield from _from_line(raw, where, file, reading)


def _after_line(stream: IO[bytes], at: int, end: int | None) -> int:
    """Return where the line of the byte at `at` ends; a place from `end` on when it ends later.

    A line over many ranges would be read to its end from each of them.
    """
    while end is None or at < end:
        raw = stream.readline(_SKIP_BYTES if end is None else min(_SKIP_BYTES, end - at))
        at += len(raw)
        if not raw or raw.endswith(b"\n"):
            break
    return at


def _from_line(
    raw: bytes, where: str, file: SourceFile, reading: Reading
) -> Iterator[Piece | Defect]:
    try:
        value = line_value(raw.removeprefix(_BOM), where)
    except DiagnosticError as error:
        yield Defect(kind=_kind(error), where=where)
        return
    yield from _from_row(value, where, file, reading)


def _from_row(
    value: str | dict[str, Any], where: str, file: SourceFile, reading: Reading
) -> Iterator[Piece | Defect]:
    """Yield the documents of one line or row."""
    if isinstance(value, str):
        if not reading.is_for_texts and value.strip():
            yield Defect(kind=WITHOUT_ROLES, where=where)
        yield from _from_value(value, where, file, None)
        return
    language = value.get(reading.language_field or "")
    try:
        texts = _chat_texts(value, reading)
        if texts is None:
            texts = [row_text(value, where, reading.fields, reading.roles)]
    except DiagnosticError as error:
        yield Defect(kind=_kind(error), where=where)
        return
    except TypeError:
        texts = []
        yield Defect(kind="messages that the chat template refuses", where=where)
    if any(texts) and not reading.is_for_texts and not _is_chat(value, reading):
        yield Defect(kind=WITHOUT_ROLES, where=where)
    for text in texts:
        yield from _from_value(text, where, file, language)


def _is_chat(value: dict[str, Any], reading: Reading) -> bool:
    """Whether what was asked of chat messages acts on a row."""
    if reading.chat is None:
        return has_roles(value, reading.fields)
    return any(isinstance(value.get(name), list) for name in reading.fields or CHAT_FIELDS)


def _chat_texts(value: dict[str, Any], reading: Reading) -> list[str] | None:
    """Return the texts of a rendered conversation, None when the row has none."""
    if reading.chat is None:
        return None
    for name in reading.fields or CHAT_FIELDS:
        messages = value.get(name)
        if isinstance(messages, list):
            texts = reading.chat.documents(messages, reading.roles)
            if texts is None:
                raise TypeError("the template refuses the messages")
            return texts
    return None


def _from_value(
    text: str, where: str, file: SourceFile, language: object
) -> Iterator[Piece | Defect]:
    clean, num_replaced = _SURROGATES.subn("\ufffd", text)
    if num_replaced:
        yield Defect(kind=REPLACED, where=where)
    if clean.strip():
        data = clean.encode("utf-8")
        is_named = isinstance(language, str) and language
        name = printable(language) if is_named else language_of("", data)
        yield Piece(data=data, where=where, language=name)


def _kind(error: DiagnosticError) -> str:
    message = error.diagnostics[0].message
    if message.startswith("not UTF-8"):
        return "a line that is not UTF-8"
    return (
        "a line without a text in the named fields"
        if "no text" in message
        else (
            "a line that is not JSON"
            if "JSON" in message
            else "a line that is no object and no text"
        )
    )


def missing_package(name: str, where: str, extra: str = "tokenmap") -> DiagnosticError:
    """Return the SD435 for a package that a file or an engine needs."""
    return DiagnosticError(
        diagnose(
            "SD435",
            where=where,
            message=f"needs the package `{name}`",
            expected=f"`pip install 'specctl[{extra}]'`",
            found="not installed",
        )
    )
