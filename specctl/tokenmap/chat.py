"""Render conversations with the target's chat template, whole or only the turns that count.

Invariants: the template runs in jinja2's sandbox and sees the messages and the special tokens only;
a turn's text is what the template adds after the prompt for that turn, its end marker included.
*Source:* the template globals and block trimming of the transformers library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specctl.contract.diagnostics import DiagnosticError, diagnose

_CONFIG = "tokenizer_config.json"
_FILE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """A chat template and the tokens it may name.

    Args:
        source: Jinja text.
        bos_token: text of the token, empty: none.
        eos_token: text of the token, empty: none.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def documents(self, messages: Sequence[Any], roles: Sequence[str]) -> list[str] | None:
        """Return the texts to count, None when the template refuses the messages.

        Args:
            messages: objects with `role` and `content`.
            roles: each turn of these is one text; empty: the conversation is one text.
        """
        from jinja2 import TemplateError

        turns = [_turn(message) for message in messages]
        try:
            if not roles:
                return [self._render(turns, has_prompt=False)]
            texts = []
            for place, turn in enumerate(turns):
                if turn.get("role") in roles:
                    before = self._render(turns[:place], has_prompt=True)
                    after = self._render(turns[: place + 1], has_prompt=False)
                    if not after.startswith(before):  # it rewrites earlier turns
                        before = self._render(turns[:place], has_prompt=False)
                    texts.append(after.removeprefix(before))
        except (TemplateError, TypeError, KeyError, ValueError):
            return None
        return texts

    def _render(self, turns: list[dict[str, Any]], *, has_prompt: bool) -> str:
        if not turns and not has_prompt:
            return ""
        text: str = _compiled(self.source).render(
            messages=turns,
            add_generation_prompt=has_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
        )
        return text


def _turn(message: Any) -> dict[str, Any]:
    """Return a message with the names that templates use."""
    if not isinstance(message, dict):
        raise TypeError("a message is no object")
    names = {"from": "role", "value": "content", "human": "user", "gpt": "assistant"}
    turn: dict[str, Any] = {names.get(str(key), str(key)): value for key, value in message.items()}
    turn["role"] = names.get(str(turn.get("role")), str(turn.get("role")))
    return turn


@lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def load_chat_template(directory: Path) -> ChatTemplate:
    """Return the chat template beside a tokenizer.json.

    Raises:
        DiagnosticError: SD425 when there is none or it cannot be compiled, SD435 without jinja2.
    """
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        from specctl.tokenmap.readers import missing_package

        raise missing_package("jinja2", "--chat-template") from error
    try:
        config = json.loads((directory / _CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict):
        config = {}
    path = directory / _FILE
    source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        raise _unusable(directory, "there is no chat template")
    try:
        _compiled(source)
    except TemplateError as error:
        raise _unusable(directory, f"the chat template is refused: {error}") from error
    return ChatTemplate(
        source=source,
        bos_token=_content(config.get("bos_token")),
        eos_token=_content(config.get("eos_token")),
    )


def _content(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _unusable(directory: Path, message: str) -> DiagnosticError:
    return DiagnosticError(
        diagnose(
            "SD425",
            where=str(directory / _CONFIG),
            message=message,
            expected=f"`chat_template` in `{_CONFIG}`, or `{_FILE}`",
            help="Copy the tokenizer's files from where the weights were published, or count "
            "messages without `--chat-template`",
        )
    )
