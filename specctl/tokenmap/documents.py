"""Find the files of a corpus and read their documents, one at a time.

Invariants: file order does not depend on the machine (sorted by path); nothing is skipped silently;
memory is bounded by `MAX_DOCUMENT_BYTES` for text and `MAX_LINE_BYTES` for one jsonl line.
A text or Markdown file is one document; a larger one is cut at paragraph ends. A jsonl line is one
document. Token pairs across a cut are the only difference to encoding the whole file.
"""

from __future__ import annotations

import glob
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

MAX_DOCUMENT_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
SUFFIXES = (".txt", ".md", ".jsonl")

Advance = Callable[[int], None]
"""Called with the UTF-8 bytes of what was just read or counted."""

_SURROGATES = re.compile("[\ud800-\udfff]")
TEXT_FIELDS = ("text", "content")
CHAT_FIELDS = ("messages", "conversations", "turns")
PAIR_FIELDS = ("prompt", "completion")
_MESSAGE_FIELDS = ("content", "value", "text")
_ROLE_FIELDS = ("role", "from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text of a corpus.

    Args:
        text: valid Unicode.
        where: file name, with `#line` for jsonl.
        was_replaced: half surrogate pairs of a JSON text were replaced with U+FFFD.
    """

    text: str
    where: str
    was_replaced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The files of a corpus and how jsonl lines are read.

    Args:
        files: in reading order.
        fields: keys of jsonl lines whose texts are joined; empty: by the usual names.
        roles: chat roles that count; empty: all.
    """

    files: tuple[Path, ...]
    fields: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield every document that is not blank.

        Raises:
            DiagnosticError: SD423 at the first document that cannot be read.
        """
        for path in self.files:
            try:
                if path.suffix == ".jsonl":
                    yield from _jsonl_documents(path, self.fields, self.roles)
                else:
                    yield from _text_documents(path)
            except OSError as error:
                raise _unreadable(str(path), f"cannot be read: {error.strerror}") from error
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise _unreadable(str(path), f"not UTF-8: byte 0x{byte:02x}") from error


def _unreadable(where: str, message: str, **details: Any) -> DiagnosticError:
    return DiagnosticError(diagnose("SD423", where=where, message=message, **details))


def find_corpus(
    sources: Sequence[str | Path], *, fields: Sequence[str] = (), roles: Sequence[str] = ()
) -> Corpus:
    """Return the corpus that files, directories and quoted patterns name.

    A directory is searched in depth for `SUFFIXES`, hidden entries left out. A file that is named
    itself is read whatever its suffix: `.jsonl` as lines, anything else as text.

    Raises:
        DiagnosticError: SD422 for each source that names no file.
    """
    found: dict[Path, Path] = {}
    problems: list[Diagnostic] = []
    for source in sources:
        paths = matching_files(str(source), _has_suffix)
        if not paths:
            problems.append(
                diagnose(
                    "SD422",
                    where=str(source),
                    message="no file of a corpus here",
                    expected="a file, a directory with "
                    + ", ".join(f"*{s}" for s in SUFFIXES)
                    + ", or a pattern",
                    found="nothing that matches",
                )
            )
        for path in paths:
            found.setdefault(path.resolve(), path)
    if not sources:
        problems.append(diagnose("SD422", where="CORPUS", message="no corpus was named"))
    if problems:
        raise DiagnosticError(problems)
    return Corpus(files=tuple(found.values()), fields=tuple(fields), roles=tuple(roles))


def _has_suffix(path: Path) -> bool:
    return path.suffix in SUFFIXES


def matching_files(source: str, is_read: Callable[[Path], bool]) -> list[Path]:
    """Return the files that a path or pattern names, sorted; of a directory those `is_read`."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = (p for p in path.rglob("*") if is_read(p) and p.is_file())
        visible = (
            p for p in inside if not any(s.startswith(".") for s in p.relative_to(path).parts)
        )
        return sorted(visible, key=lambda p: p.relative_to(path).as_posix())
    if glob.has_magic(source):
        # The user's own pattern may be absolute, which Path.glob refuses.
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207
        return sorted((Path(m) for m in matches if Path(m).is_file()), key=lambda p: p.as_posix())
    return []


def _text_documents(path: Path) -> Iterator[Document]:
    if path.stat().st_size <= MAX_DOCUMENT_BYTES:
        text = path.read_bytes().decode("utf-8-sig")
        if text.strip():
            yield Document(text=text, where=str(path))
        return
    with path.open(encoding="utf-8-sig", newline="") as stream:
        for number, piece in enumerate(_pieces(stream), start=1):
            if piece.strip():
                yield Document(text=piece, where=f"{path}#part{number}")


def _pieces(stream: TextIO) -> Iterator[str]:
    """Cut a text at paragraph ends, else line ends, else spaces, else anywhere."""
    limit = MAX_DOCUMENT_BYTES // 4  # characters; at most 4 bytes each
    rest = ""
    while chunk := stream.read(limit):
        rest += chunk
        while len(rest) > limit:
            cut = _cut_place(rest, limit)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _cut_place(text: str, limit: int) -> int:
    for mark in ("\n\n", "\n", " "):
        place = text.rfind(mark, limit // 2, limit)
        if place >= 0:
            # A space starts the next piece: tokenizers join it to the word after it.
            return place + len(mark) if mark != " " else place
    return limit


def _jsonl_documents(
    path: Path, fields: tuple[str, ...], roles: tuple[str, ...]
) -> Iterator[Document]:
    with path.open("rb") as stream:
        number = 0
        while raw := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}#{number}"
            if len(raw) > MAX_LINE_BYTES:
                raise _unreadable(
                    where,
                    "the line is too long for one document",
                    expected=f"at most {MAX_LINE_BYTES} bytes",
                    found=f"more than {MAX_LINE_BYTES} bytes",
                )
            if not raw.strip():
                continue
            text = line_text(raw.removeprefix(b"\xef\xbb\xbf"), where, fields, roles)
            clean, num_replaced = _SURROGATES.subn("\ufffd", text)
            if clean.strip():
                yield from _bounded(clean, where, was_replaced=num_replaced > 0)


def _bounded(text: str, where: str, *, was_replaced: bool) -> Iterator[Document]:
    if len(text) <= MAX_DOCUMENT_BYTES // 4:
        yield Document(text=text, where=where, was_replaced=was_replaced)
        return
    for number, piece in enumerate(_pieces(io.StringIO(text, newline="")), start=1):
        yield Document(text=piece, where=f"{where}.{number}", was_replaced=was_replaced)


def line_text(raw: bytes, where: str, fields: tuple[str, ...], roles: tuple[str, ...]) -> str:
    """Return the text of one jsonl line.

    Raises:
        DiagnosticError: SD423 when it is not UTF-8, not JSON or holds no text.
    """
    value = line_value(raw, where)
    return value if isinstance(value, str) else row_text(value, where, fields, roles)


def line_value(raw: bytes, where: str) -> str | dict[str, Any]:
    """Return the text or object of one jsonl line.

    Raises:
        DiagnosticError: SD423 when it is not UTF-8, not JSON or something else.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _unreadable(where, f"not UTF-8: byte 0x{raw[error.start]:02x}") from error
    except RecursionError as error:
        raise _unreadable(where, "the JSON is nested too deeply to be read") from error
    except ValueError as error:
        reason = getattr(error, "msg", "a number that cannot be read")
        raise _unreadable(where, f"the line is not JSON: {reason}") from error
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise _unreadable(
            where, "the line is neither an object nor a text", found=type(value).__name__
        )
    return value


def row_text(
    value: Mapping[str, Any], where: str, fields: tuple[str, ...], roles: tuple[str, ...]
) -> str:
    """Return the text of one object or row.

    Raises:
        DiagnosticError: SD423 when none of the fields holds a text.
    """
    texts = _named_texts(value, fields) if fields else _usual_texts(value, roles)
    if texts is None:
        keys = ", ".join(f"`{key}`" for key in list(value)[:12])
        wanted = fields or (*TEXT_FIELDS, *CHAT_FIELDS, *PAIR_FIELDS)
        raise _unreadable(
            where,
            "the line has no text in " + ", ".join(f"`{name}`" for name in wanted),
            expected="one of them with a text or a list of messages",
            found=f"keys {keys}" if keys else "an empty object",
            help="Name the field: `--field NAME`, more than once to join several",
        )
    return "\n".join(texts)


def _named_texts(value: Mapping[str, Any], fields: tuple[str, ...]) -> list[str] | None:
    texts: list[str] = []
    for name in fields:
        found = _chat_texts(value.get(name), ()) if name in value else None
        if found is None:
            return None
        texts += found
    return texts


def _usual_texts(value: Mapping[str, Any], roles: tuple[str, ...]) -> list[str] | None:
    for name in TEXT_FIELDS:
        if isinstance(value.get(name), str):
            return [value[name]]
    for name in CHAT_FIELDS:
        texts = _chat_texts(value.get(name), roles)
        if texts is not None:
            return texts
    return [value[name] for name in PAIR_FIELDS if isinstance(value.get(name), str)] or None


def _chat_texts(value: Any, roles: tuple[str, ...]) -> list[str] | None:
    """Return the texts of a message list; None when `value` is no text and no such list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return None
    texts: list[str] = []
    for message in value:
        if isinstance(message, str):
            texts.append(message)
        elif isinstance(message, dict):
            role = next((message[name] for name in _ROLE_FIELDS if name in message), None)
            if not roles or role is None or role in roles:
                texts += _message_texts(message)
    return texts


def _message_texts(message: Mapping[str, Any]) -> list[str]:
    for name in _MESSAGE_FIELDS:
        content = message.get(name)
        if isinstance(content, str):
            return [content]
        if isinstance(content, list):  # parts of a multimodal message
            parts = (p.get("text") for p in content if isinstance(p, dict))
            return [part for part in parts if isinstance(part, str)]
    return []
