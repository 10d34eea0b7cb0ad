"""Every request option of the HTTP endpoints, honoured or refused: one list, as data.

Invariants: the parser reads names, types and ranges from here and nowhere else; a field that is
not listed is refused as unknown; a listed one is honoured, or refused unless it asks for nothing.
docs/reference/server.md shows this table.
*Source:* OpenAI API reference for names and defaults; `top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `ignore_eos`, `stop_token_ids` and `return_token_ids` are spelt as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Endpoint = Literal["completions", "chat"]
Kind = Literal["integer", "number", "boolean", "string", "other"]
BOTH: tuple[Endpoint, ...] = ("completions", "chat")
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
CHAT: tuple[Endpoint, ...] = ("chat",)

ROUTES = (
    "GET /health",
    "GET /metrics",
    "GET /info",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /flush_cache",
)

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGPROBS = 20
MAX_INTEGER = 2**63 - 1
"""Of integers without a bound of their own: devices and messages between processes hold 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One request field.

    Args:
        kind: JSON type; `other` fields are parsed by hand.
        default: value used when the field is absent or null.
        low: least value (numbers).
        high: greatest value (numbers), None when it depends on the model or is `MAX_INTEGER`.
        is_low_open: the least value itself is outside.
        is_honoured: False when the field is refused.
        neutral: for refused fields: values that ask for nothing and pass.
        note: what it does, or why it is refused; one sentence for the documentation.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    kind: Kind
    default: float | bool | str | None = None
    low: float | None = None
    high: float | None = None
    is_low_open: bool = False
    is_honoured: bool = True
    neutral: tuple[object, ...] = ()
    note: str


def _refused(name: str, endpoints: tuple[Endpoint, ...], note: str, *neutral: object) -> Option:
    return Option(
        name=name,
        endpoints=endpoints,
        kind="other",
        is_honoured=False,
        neutral=(None, *neutral),
        note=note,
    )


OPTIONS: tuple[Option, ...] = (
    Option(
        name="model",
        endpoints=BOTH,
        kind="string",
        note="The served model's id; absent means that model, another name is 404.",
    ),
    Option(
        name="prompt",
        endpoints=COMPLETIONS,
        kind="other",
        note="A string, a list of strings, a list of token ids, or a list of such lists.",
    ),
    Option(
        name="messages",
        endpoints=CHAT,
        kind="other",
        note="Chat messages with `role` and text `content`; rendered by the target's own template.",
    ),
    Option(
        name="max_tokens",
        endpoints=BOTH,
        kind="integer",
        low=1,
        note="New tokens at most. Default: 16 for completions, the rest of the context for chat.",
    ),
    Option(
        name="max_completion_tokens",
        endpoints=CHAT,
        kind="integer",
        low=1,
        note="The newer name of `max_tokens`.",
    ),
    Option(
        name="temperature",
        endpoints=BOTH,
        kind="number",
        default=1.0,
        low=0,
        high=2,
        note="0 is greedy. The default is the API's 1.0, not the model's generation config.",
    ),
    Option(
        name="top_p",
        endpoints=BOTH,
        kind="number",
        default=1.0,
        low=0,
        high=1,
        is_low_open=True,
        note="Smallest set of tokens with this probability.",
    ),
    Option(
        name="top_k",
        endpoints=BOTH,
        kind="integer",
        default=0,
        low=-1,
        note="The k likeliest tokens; 0 or -1 keeps all.",
    ),
    Option(
        name="min_p",
        endpoints=BOTH,
        kind="number",
        default=0.0,
        low=0,
        high=1,
        note="Tokens at least this fraction as likely as the likeliest.",
    ),
    Option(
        name="n",
        endpoints=BOTH,
        kind="integer",
        default=1,
        low=1,
        high=MAX_CHOICES,
        note="Choices for each prompt; choice i draws its own noise from (seed, i).",
    ),
    Option(
        name="seed",
        endpoints=BOTH,
        kind="integer",
        low=-(2**63),
        high=MAX_INTEGER,
        note="Fixes the noise; without it one is drawn. The response reports it as `seed`.",
    ),
    Option(
        name="presence_penalty",
        endpoints=BOTH,
        kind="number",
        default=0.0,
        low=-2,
        high=2,
        note="Subtracted from the logit of every token generated so far.",
    ),
    Option(
        name="frequency_penalty",
        endpoints=BOTH,
        kind="number",
        default=0.0,
        low=-2,
        high=2,
        note="Subtracted once for each time the token was generated.",
    ),
    Option(
        name="repetition_penalty",
        endpoints=BOTH,
        kind="number",
        default=1.0,
        low=0,
        high=2,
        is_low_open=True,
        note="Divides positive and multiplies negative logits of tokens seen, prompt included.",
    ),
    Option(
        name="logit_bias",
        endpoints=BOTH,
        kind="other",
        note="Object: token id (as a string) -> number in [-100, 100], added to the logit.",
    ),
    Option(
        name="min_tokens",
        endpoints=BOTH,
        kind="integer",
        default=0,
        low=0,
        note="End tokens are masked until so many tokens are out.",
    ),
    Option(
        name="ignore_eos",
        endpoints=BOTH,
        kind="boolean",
        default=False,
        note="End tokens of the model do not end the answer.",
    ),
    Option(
        name="stop",
        endpoints=BOTH,
        kind="other",
        note="A string or up to 16; text ends before it, the completing token counts in usage.",
    ),
    Option(
        name="stop_token_ids",
        endpoints=BOTH,
        kind="other",
        note="Token ids that end the answer like the model's own end tokens.",
    ),
    Option(
        name="stream",
        endpoints=BOTH,
        kind="boolean",
        default=False,
        note="Server-sent events: one chunk for each round that made text, then `[DONE]`.",
    ),
    Option(
        name="stream_options",
        endpoints=BOTH,
        kind="other",
        note="`{include_usage: true}` sends a last chunk with the usage; needs `stream`.",
    ),
    Option(
        name="return_token_ids",
        endpoints=BOTH,
        kind="boolean",
        default=False,
        note="Adds `token_ids` to every choice and chunk.",
    ),
    Option(
        name="num_speculative_tokens",
        endpoints=BOTH,
        kind="integer",
        low=0,
        note="Drafts per round for this request, 0 to the served number; the answer is the same.",
    ),
    Option(
        name="user",
        endpoints=BOTH,
        kind="string",
        note="An opaque name of the end user; accepted, not stored and without effect.",
    ),
    Option(
        name="logprobs",
        endpoints=COMPLETIONS,
        kind="integer",
        low=0,
        high=MAX_LOGPROBS,
        note="Log probability of each token and of this many of the likeliest ones: the target's "
        "own, before temperature, penalties, bias and filters.",
    ),
    Option(
        name="logprobs",
        endpoints=CHAT,
        kind="boolean",
        default=False,
        note="Log probability of each token: the target's own, before temperature, penalties, bias "
        "and filters.",
    ),
    Option(
        name="top_logprobs",
        endpoints=CHAT,
        kind="integer",
        low=0,
        high=MAX_LOGPROBS,
        note="This many of the likeliest tokens with each; needs `logprobs`.",
    ),
    _refused("best_of", COMPLETIONS, "Candidates are not ranked; use `n`.", 1),
    _refused("echo", COMPLETIONS, "The prompt is not returned.", False),
    _refused("suffix", COMPLETIONS, "Insertion needs a model trained for it.", ""),
    _refused("prompt_logprobs", BOTH, "Log probabilities of the prompt are not computed."),
    _refused("bad_words", BOTH, "Use `logit_bias` for single tokens.", []),
    _refused("response_format", BOTH, "Structured output is not constrained.", {"type": "text"}),
    _refused("tools", CHAT, "Tool calls are not parsed.", []),
    _refused("tool_choice", CHAT, "Tool calls are not parsed.", "none", "auto"),
    _refused("parallel_tool_calls", CHAT, "Tool calls are not parsed.", True, False),
    _refused("functions", CHAT, "Tool calls are not parsed.", []),
    _refused("function_call", CHAT, "Tool calls are not parsed.", "none", "auto"),
    _refused("modalities", CHAT, "Text is the only output.", ["text"]),
    _refused("audio", CHAT, "Text is the only output."),
    _refused("prediction", CHAT, "Drafts come from the draft model."),
    _refused("reasoning_effort", CHAT, "The template has no such switch."),
    _refused("verbosity", CHAT, "The template has no such switch."),
    _refused("web_search_options", CHAT, "There is no search."),
    _refused("store", CHAT, "Answers are not stored.", False),
    _refused("metadata", CHAT, "Answers are not stored.", {}),
    _refused("service_tier", CHAT, "There is one tier.", "auto", "default"),
)


def options_for(endpoint: Endpoint) -> dict[str, Option]:
    """Return the options of one endpoint by name."""
    return {option.name: option for option in OPTIONS if endpoint in option.endpoints}
