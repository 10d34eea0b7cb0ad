"""The page of the HTTP interface, from the option table and the error table of the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from runtime.server.errors import HTTP_STATUS
from runtime.server.options import OPTIONS, ROUTES, Option
from runtime.server.settings import DEFAULT_GRACE_S
from specctl.contract.codes import CODES

Table = Callable[[Iterable[str], Iterable[Iterable[str]]], list[str]]

INTRODUCTION = """\
`specctl serve MANIFEST` speaks the OpenAI API. Every option below is honoured, or refused with 400
and the field named; a field that is not listed is refused with its nearest match. Nothing is
clamped, and `null` means the default.
"""
STREAMING = f"""\
## Streaming, usage and seeds

- `stream: true` sends server-sent events: one chunk for each round that made final text (or ids,
  with `return_token_ids`), then `data: [DONE]`. A round commits up to `num_speculative_tokens` + 1
  tokens, so chunks are not token latencies; their `token_ids` add up to `usage.completion_tokens`.
  A chunk never ends inside a UTF-8 sequence or inside what may become a stop string.
- The status line is sent with the first chunk, so a request that cannot run has its 4xx or 5xx. An
  error after that is one `data: {{"error": ...}}` event, then `[DONE]`.
- `usage` counts kept tokens, the end token and the one that completes a stop string included, and a
  prompt once for all its choices. `prompt_tokens_details.cached_tokens` came from the prefix cache;
  `completion_tokens_details` counts accepted and rejected drafts before any stop or length cut.
- `seed` is in every response: the given one, or the one that was drawn. The same body with the same
  seed gives the same tokens, whatever else runs and whatever the draft. Choice `index` draws its
  noise from (seed, index), so equal prompts in one body differ.
- `finish_reason`: `stop` (end token, stop token or stop string) or `length`.
- A client that disconnects has its requests dropped before the next round.

## Overload and shutdown

- More than `--max-num-waiting` waiting requests: 429 with `Retry-After` (SD914).
- SIGTERM or SIGINT: no new connections, new requests on open ones get 503 (SD915), running ones
  have `--grace-s` ({DEFAULT_GRACE_S:g}) seconds, or until a second Ctrl-C; what is left ends with
  an SD915 error; exit 0.
- A fault in one request ends that request (SD916); the engine goes on with the others.
"""
ROUTE_NOTES = {
    "GET /health": "200 `ok`; 503 while stopping or when the engine has ended.",
    "GET /metrics": "Prometheus text; every HELP line states its definition.",
    "GET /info": "The resolved settings, each with its origin; what captured graphs cost.",
    "GET /v1/models": "The one served model.",
    "GET /v1/models/{model}": "The same by id.",
    "POST /v1/completions": "Completions; text is encoded with the tokenizer's own begin token.",
    "POST /v1/chat/completions": "Chat; the target's template renders the messages.",
    "POST /flush_cache": "Forgets cached prefixes and counters; running requests go on.",
}


def server_page(notice: str, table: Table) -> str:
    """Return the page as Markdown."""
    lines = ["# HTTP interface", "", notice, "", *INTRODUCTION.splitlines(), "", "## Routes", ""]
    lines += table(("route", "what it does"), ((f"`{r}`", ROUTE_NOTES[r]) for r in ROUTES))
    lines += ["", "## Request options", ""]
    honoured = [option for option in OPTIONS if option.is_honoured]
    lines += table(
        ("field", "endpoints", "type, range", "default", "meaning"),
        (
            (f"`{o.name}`", ", ".join(o.endpoints), range_text(o), default_text(o), o.note)
            for o in honoured
        ),
    )
    refused = [option for option in OPTIONS if not option.is_honoured]
    lines += ["", "Refused with SD905 unless the value asks for nothing:", ""]
    lines += table(
        ("field", "endpoints", "passes as", "why"),
        ((f"`{o.name}`", ", ".join(o.endpoints), neutral_text(o), o.note) for o in refused),
    )
    lines += ["", *STREAMING.splitlines(), "", "## Errors", ""]
    lines += ['`{"error": {"message", "type", "param", "code", "diagnostics"}}`; `param` is the']
    lines += ["first field, `diagnostics` holds every problem of the body.", ""]
    lines += table(
        ("code", "status", "what was seen"),
        (
            (f"[{c.code}](diagnostics.md#{c.code.lower()})", status(c.code), c.summary)
            for c in CODES.values()
            if "SD901" <= c.code <= "SD919" or c.code in HTTP_STATUS
        ),
    )
    return "\n".join(lines) + "\n"


def status(code: str) -> str:
    return str(HTTP_STATUS.get(code, 400))


def range_text(option: Option) -> str:
    if option.low is None and option.high is None:
        return "see meaning" if option.kind == "other" else option.kind
    if option.high == 2**63 - 1:
        return f"{option.kind}, signed 64 bits"
    low = "" if option.low is None else f"{'above ' if option.is_low_open else ''}{option.low:g}"
    high = "" if option.high is None else f" to {option.high:g}"
    return f"{option.kind}, {low}{high or ' or more'}"


def default_text(option: Option) -> str:
    return "" if option.default is None else f"`{str(option.default).lower()}`"


def neutral_text(option: Option) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in option.neutral)
