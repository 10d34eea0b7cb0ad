"""Token ids to text, one token at a time, and stop strings; chat messages to prompt text.

Invariants: the concatenated deltas of a stream equal `tokenizer.decode` of all its ids (cut before
the first stop string); a delta never ends inside a UTF-8 sequence; what was handed out is never
taken back (the offset only grows, counted in code points).
Source: byte-fallback decoding (one replacement character for each byte of a run that is not UTF-8
as a whole) and the left strip of SentencePiece-style decoders are rules of the tokenizers library.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from specctl.contract.diagnostics import DiagnosticError, diagnose

_REPLACEMENT = "\ufffd"
_HEX = "0123456789abcdefABCDEF"


def longest_partial_stop(text: str, stop: Sequence[str]) -> int:
    """Return how many last characters of `text` may be the start of a stop string."""
    longest = 0
    for item in stop:
        for size in range(min(len(item) - 1, len(text)), longest, -1):
            if text.endswith(item[:size]):
                longest = size
                break
    return longest


@functools.lru_cache(maxsize=4)
def byte_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of tokens that stand for one byte each, such as `<0x0A>`."""
    tokens = (f"<0x{high}{low}>" for high in _HEX for low in _HEX)
    ids = (tokenizer.token_to_id(token) for token in tokens)
    return frozenset(token_id for token_id in ids if token_id is not None)


class TextStream:
    """Decodes one request's output token by token.

    Only a short window is decoded for each token: from a token boundary whose text is final and not
    empty, so that decoders which strip the first token's space do so to the part already known.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: tuple[str, ...], skip_special_tokens: bool = True
    ) -> None:
        """Start an empty stream; `stop` strings are searched in the decoded text."""
        assert all(stop), "an empty stop string matches everywhere"
        self._tokenizer = tokenizer
        self._byte_ids = byte_token_ids(tokenizer)
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        self._ids_target: list[int] = []
        self._window_start = 0  # first token of the decode window
        self._window_text = ""  # text of the window's tokens before `_pending_start`
        self._pending_start = 0  # first token whose text is not final
        self._settled = ""  # final text: decode of all tokens before `_pending_start`
        self._tail = ""  # what the pending tokens decode to now
        self._is_open = False  # later tokens may still change the text of the pending ones
        self._searched = 0  # no stop string starts before this offset
        self._taken = 0  # code points handed out
        self._is_stopped = False

    @property
    def text(self) -> str:
        """Decode of every token pushed so far, cut before the stop string once it is complete."""
        return self._settled + self._tail

    def push(self, token_id: int) -> bool:
        """Take the next target id; return whether it completes a stop string.

        The completing token belongs to the output ids; the text ends before the stop string.
        """
        assert not self._is_stopped, "a token was pushed after the stop string"
        self._ids_target.append(token_id)
        before = self._tail
        self._tail = self._decode(self._window_start)[len(self._window_text) :]
        if self._find_stop():
            return True
        is_skipped = self._tail == before  # a skipped token does not end a run of byte tokens
        self._is_open = self._ends_open(token_id) or (is_skipped and self._is_open)
        if not self._is_open:
            self._settle()
        return False

    def take_delta(self) -> str:
        """Return the text that became final since the last call; may be empty."""
        end = len(self._settled)
        if not self._is_stopped:
            end -= longest_partial_stop(self._settled, self._stop)
        return self._take(end)

    def finish(self) -> str:
        """Return everything not handed out yet: no more tokens come."""
        self._settled += self._tail
        self._tail = ""
        return self._take(len(self._settled))

    def _take(self, end: int) -> str:
        start, self._taken = self._taken, max(self._taken, end)
        return self._settled[start : self._taken]

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(
            self._ids_target[start:], skip_special_tokens=self._skip_special_tokens
        )

    def _ends_open(self, token_id: int) -> bool:
        """Tell whether the tokens so far end inside a character or a run of byte tokens."""
        if self._tail.endswith(_REPLACEMENT):
            return True
        return token_id in self._byte_ids

    def _settle(self) -> None:
        self._settled += self._tail
        self._tail = ""
        alone = self._decode(self._pending_start)
        if alone:  # an empty window start would expose the next token to a left strip
            self._window_start, self._window_text = self._pending_start, alone
        else:
            self._window_text = self._decode(self._window_start)
        self._pending_start = len(self._ids_target)

    def _find_stop(self) -> bool:
        """Cut the text at the earliest stop string, if one is complete."""
        if not self._stop:
            return False
        text = self._settled[self._searched :] + self._tail.rstrip(_REPLACEMENT)
        starts = [at for item in self._stop if (at := text.find(item)) >= 0]
        if starts:
            self._settled = self._settled[: self._searched] + text[: min(starts)]
            self._tail = ""
            self._is_stopped = True
            return True
        longest = max(len(item) for item in self._stop)
        self._searched = max(self._searched, len(self._settled) - longest + 1, 0)
        return False


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json` of a target directory.

    Raises:
        DiagnosticError: SD911 when there is none.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise DiagnosticError(
            diagnose(
                "SD911",
                where=str(path),
                message="the target has no `tokenizer.json`",
                expected="tokenizer.json beside config.json",
                found="no such file",
            )
        )
    return Tokenizer.from_file(str(path))


class ChatRenderer(Protocol):
    """Turns chat messages into prompt text."""

    def __call__(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Render with the generation prompt added.

        Raises:
            DiagnosticError: SD912 no template, SD913 the template refused the messages.
        """


class TemplateRenderer:
    """The target's own chat template, with the semantics of transformers."""

    def __init__(self, directory: Path) -> None:
        """Remember the directory; transformers is imported at the first call of `warm`."""
        self._directory = directory

    @functools.cached_property
    def _tokenizer(self) -> _TemplateTokenizer:
        from transformers import PreTrainedTokenizerFast  # AutoTokenizer reads config.json too

        tokenizer: _TemplateTokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(self._directory), local_files_only=True
        )
        return tokenizer

    @property
    def has_template(self) -> bool:
        """Whether the directory carries a chat template (read without transformers)."""
        if (self._directory / "chat_template.jinja").is_file():
            return True
        config = self._directory / "tokenizer_config.json"
        return config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")

    def warm(self) -> None:
        """Load the template now instead of at the first chat request."""
        if self.has_template:
            _ = self._tokenizer  # and keep it; an assert would be left out under -O

    def __call__(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Render messages; see `ChatRenderer`."""
        from jinja2 import TemplateError

        if not self.has_template:
            raise DiagnosticError(
                diagnose(
                    "SD912",
                    where=str(self._directory / "tokenizer_config.json"),
                    message="the target has no chat template",
                    expected="`chat_template` in tokenizer_config.json, or chat_template.jinja",
                    found="neither",
                )
            )
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError) as error:
            raise DiagnosticError(
                diagnose(
                    "SD913",
                    where="body#/messages",
                    message=f"the chat template refused the messages: {error}",
                )
            ) from error


class _TemplateTokenizer(Protocol):
    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str: ...
