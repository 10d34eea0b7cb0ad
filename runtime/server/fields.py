"""Request fields that are not one plain value: prompts, messages, stop, bias, stream options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from runtime.server.options import MAX_PROMPTS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from runtime.server.reader import BodyReader, shown

Prompt: TypeAlias = str | tuple[int, ...]

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}", re.ASCII)


def read_prompts(reader: BodyReader) -> tuple[Prompt, ...]:
    value = reader.raw("prompt")
    if value is None:
        reader.problem("SD906", "prompt", "`prompt` is missing", expected="text or token ids")
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        reader.wrong_type("prompt", "a string, strings, token ids or lists of token ids", value)
        return ()
    if not value:
        reader.problem("SD908", "prompt", "`prompt` is an empty list", expected="1 prompt", found=0)
        return ()
    if len(value) > MAX_PROMPTS and not _is_id(value[0]):
        reader.problem(
            "SD904",
            "prompt",
            "`prompt` has too many prompts",
            expected=f"at most {MAX_PROMPTS}",
            found=len(value),
        )
        return ()
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value[0], list):
        return tuple(read_token_ids(reader, f"prompt/{i}", item) for i, item in enumerate(value))
    return (read_token_ids(reader, "prompt", value),)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_token_ids(reader: BodyReader, pointer: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        reader.wrong_type(pointer, "a list of token ids", value)
        return ()
    for position, item in enumerate(value):
        if not _is_id(item):
            reader.wrong_type(f"{pointer}/{position}", "a token id (integer)", item)
            return ()
    return tuple(value)


def read_messages(reader: BodyReader) -> tuple[Mapping[str, str], ...]:
    value = reader.raw("messages")
    if value is None:
        reader.problem("SD906", "messages", "`messages` is missing", expected="a list of messages")
        return ()
    if not isinstance(value, list):
        reader.wrong_type("messages", "a list of messages", value)
        return ()
    if not value:
        reader.problem("SD908", "messages", "`messages` is empty", expected="1 message", found=0)
        return ()
    return tuple(_message(reader, f"messages/{i}", item) for i, item in enumerate(value))


def _message(reader: BodyReader, pointer: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        reader.wrong_type(pointer, "an object with `role` and `content`", value)
        return {}
    readers: dict[str, Callable[[BodyReader, str, object], str | None]] = {
        "role": _text,
        "content": _content,
        "name": _text,
    }
    for name, item in value.items():
        if name not in readers and item is not None:
            reader.problem(
                "SD905",
                f"{pointer}/{name}",
                f"`{name}` of a message is not supported",
                expected="`role`, `content`, `name`",
                found=f"`{name}`",
            )
    message: dict[str, str] = {}
    for name, read in readers.items():
        item = value.get(name)
        if item is None and name != "name":
            reader.problem(
                "SD906", f"{pointer}/{name}", f"a message has no `{name}`", expected="text"
            )
        elif item is not None:
            text = read(reader, f"{pointer}/{name}", item)
            message[name] = text or ""
    return message


def _text(reader: BodyReader, pointer: str, value: object) -> str | None:
    if not isinstance(value, str):
        reader.wrong_type(pointer, "a string", value)
        return None
    return value


def _content(reader: BodyReader, pointer: str, value: object) -> str | None:
    """Read text content: a string, or parts of type `text`, which are joined by newlines."""
    if not isinstance(value, list):
        return _text(reader, pointer, value)
    texts: list[str] = []
    for position, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            reader.problem(
                "SD905",
                f"{pointer}/{position}",
                "only parts of type `text` are supported",
                expected="`text`",
                found=shown(kind),
            )
            return None
        texts.append(_text(reader, f"{pointer}/{position}/text", part.get("text")) or "")
    return "\n".join(texts)


def read_chat_logprobs(reader: BodyReader) -> int | None:
    """Read `logprobs` and `top_logprobs` of a chat body: how many, None where none are wanted."""
    is_wanted, num_top = reader.boolean("logprobs"), reader.integer("top_logprobs")
    if num_top and not is_wanted:
        reader.problem(
            "SD919",
            "top_logprobs",
            "`top_logprobs` is set and `logprobs` is not",
            expected="`logprobs`: true",
            found=num_top,
        )
    return (num_top or 0) if is_wanted else None


def read_stop(reader: BodyReader) -> tuple[str, ...]:
    value = reader.raw("stop")
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        reader.wrong_type("stop", "a string or a list of strings", value)
        return ()
    for position, item in enumerate(items):
        pointer = "stop" if isinstance(value, str) else f"stop/{position}"
        if not isinstance(item, str):
            reader.wrong_type(pointer, "a string", item)
            return ()
        if not 1 <= len(item) <= MAX_STOP_LENGTH:
            reader.problem(
                "SD904",
                pointer,
                "a stop string is empty or too long",
                expected=f"1 to {MAX_STOP_LENGTH} characters",
                found=len(item),
            )
    if len(items) > MAX_STOP_STRINGS:
        reader.problem(
            "SD904",
            "stop",
            "`stop` has too many strings",
            expected=f"at most {MAX_STOP_STRINGS}",
            found=len(items),
        )
    return tuple(items)


def read_logit_bias(reader: BodyReader) -> tuple[tuple[int, float], ...]:
    value = reader.raw("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        reader.wrong_type("logit_bias", "an object of token id -> number", value)
        return ()
    biases: dict[int, float] = {}
    for key, item in value.items():
        pointer = f"logit_bias/{key[:20]}"
        if _TOKEN_ID.fullmatch(key) is None:
            reader.problem(
                "SD903",
                pointer,
                "a key of `logit_bias` is not a token id",
                expected="decimal digits without leading zeros",
                found=shown(key),
            )
        elif not isinstance(item, (int, float)) or isinstance(item, bool):
            reader.wrong_type(pointer, "a number", item)
        elif not -100 <= item <= 100:
            reader.problem(
                "SD904",
                pointer,
                "a bias is outside its range",
                expected="-100 to 100",
                found=item,
            )
        else:
            biases[int(key)] = float(item)
    return tuple(sorted(biases.items()))


def read_include_usage(reader: BodyReader, *, is_stream: bool) -> bool:
    value = reader.raw("stream_options")
    if value is None:
        return False
    if not isinstance(value, dict):
        reader.wrong_type("stream_options", "an object", value)
        return False
    if not is_stream:
        reader.problem(
            "SD919",
            "stream_options",
            "`stream_options` is given without `stream`",
            expected="`stream: true`",
            found="`stream` is false",
        )
    for name in value:
        if name != "include_usage":
            reader.problem(
                "SD902",
                f"stream_options/{name}",
                f"`{name}` is not a stream option",
                expected="`include_usage`",
                found=f"`{name}`",
            )
    wanted = value.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        reader.wrong_type("stream_options/include_usage", "a boolean", wanted)
    return wanted is True
