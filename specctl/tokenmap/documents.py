"""Take the text out of one line or row of a corpus.

Invariant: what holds no text is a SD423 with its place, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specctl.contract.diagnostics import DiagnosticError, diagnose

MAX_LINE_BYTES = 64 << 20
TEXT_FIELDS = ("text", "content")
CHAT_FIELDS = ("messages", "conversations", "turns")
PAIR_FIELDS = ("prompt", "completion")
ASSISTANT_ROLES = ("assistant", "gpt", "model")
_PAIR_ROLES = {"prompt": ("user", "human"), "completion": ASSISTANT_ROLES}
_MESSAGE_FIELDS = ("content", "value", "text")
_ROLE_FIELDS = ("role", "from")


def _unreadable(where: str, message: str, **details: Any) -> DiagnosticError:
    return DiagnosticError(diagnose("SD423", where=where, message=message, **details))


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
    """Return the text of one object or row, empty when no message is of the roles.

    Raises:
        DiagnosticError: SD423 when none of the fields holds a text.
    """
    texts = _named_texts(value, fields, roles) if fields else _usual_texts(value, roles)
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


def has_roles(value: Mapping[str, Any], fields: tuple[str, ...]) -> bool:
    """Whether roles choose among the texts of one object or row."""
    if fields:
        return any(isinstance(value.get(name), list) for name in fields)
    if any(isinstance(value.get(name), str) for name in TEXT_FIELDS):
        return False
    return any(name in value for name in (*CHAT_FIELDS, *PAIR_FIELDS))


def _named_texts(
    value: Mapping[str, Any], fields: tuple[str, ...], roles: tuple[str, ...]
) -> list[str] | None:
    texts: list[str] = []
    for name in fields:
        found = _chat_texts(value.get(name), roles) if name in value else None
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
    pair = [name for name in PAIR_FIELDS if isinstance(value.get(name), str)]
    if not pair:
        return None
    return [value[name] for name in pair if not roles or set(roles) & set(_PAIR_ROLES[name])]


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
