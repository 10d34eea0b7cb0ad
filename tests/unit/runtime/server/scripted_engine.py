"""A scripted engine and a served model without weights: the HTTP side alone, fast and exact."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models

from runtime.engine.request import Admission, RequestDelta, RequestInput, Usage
from runtime.engine.stats import EngineStats
from runtime.server.prepare import ServedModel

CHARACTERS = "".join(chr(code) for code in range(32, 127))
VOCAB_SIZE = 3 + len(CHARACTERS) + 5
REFUSE_ID, BREAK_STEP_ID = 100, 101


def character_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {character: len(vocab) + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


TOKENIZER = character_tokenizer()


def render(messages: Sequence[Mapping[str, object]]) -> str:
    return "".join(f"{message['role']}: {message['content']}|" for message in messages)


def served_model(**changes: object) -> ServedModel:
    facts: dict[str, object] = {
        "name": "tiny",
        "target_vocab_size": VOCAB_SIZE,
        "max_model_len": 512,
        "num_speculative_tokens": 4,
        "fingerprint": "fp_test",
        "created": 1,
        "tokenizer": TOKENIZER,
        "chat": render,
    }
    return ServedModel(**(facts | changes))  # type: ignore[arg-type]


def answer_ids(request: RequestInput) -> list[int]:
    """The scripted answer: letters that depend on prompt, seed and choice index only."""
    start = sum(request.prompt_ids_target) + request.params.seed + 7 * request.params.choice_index
    return [3 + (start + 5 * i) % len(CHARACTERS) for i in range(request.max_tokens or 8)]


class ScriptedEngine:
    """Commits `tokens_per_step` tokens for each of the first `max_running` requests.

    A step waits for `gate`, and for it alone once a request has `hold_at` tokens: tests decide what
    has happened before they act.
    """

    def __init__(self, *, tokens_per_step: int = 3, max_running: int = 8) -> None:
        self.tokens_per_step = tokens_per_step
        self.max_running = max_running
        self.requests: dict[str, tuple[RequestInput, list[int], int]] = {}
        self.aborted: list[str] = []
        self.finished: Counter[str] = Counter()
        self.num_flushes = 0
        self.hold_at = 0
        self.is_broken = False
        self.gate = threading.Event()
        self.gate.set()

    @property
    def num_sent(self) -> int:
        """Tokens of the request that is furthest."""
        return max((sent for _, _, sent in list(self.requests.values())), default=0)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(self, request: RequestInput) -> Admission:
        if REFUSE_ID in request.prompt_ids_target:
            raise RuntimeError("scripted refusal")
        self.requests[request.request_id] = (request, answer_ids(request), 0)
        return Admission(request_id=request.request_id, seed=request.params.seed)

    def abort(self, request_id: str) -> bool:
        if self.is_broken:
            raise RuntimeError("scripted death")
        self.aborted.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def step(self) -> tuple[RequestDelta, ...]:
        if self.num_sent >= self.hold_at:
            self.gate.wait(120)
        running = list(self.requests.items())[: self.max_running]
        if any(BREAK_STEP_ID in request.prompt_ids_target for _, (request, _, _) in running):
            raise RuntimeError("scripted fault")
        return tuple(self._advance(request_id, *state) for request_id, state in running)

    def _advance(
        self, request_id: str, request: RequestInput, answer: list[int], sent: int
    ) -> RequestDelta:
        ids = answer[sent : sent + self.tokens_per_step]
        is_last = sent + len(ids) == len(answer)
        if is_last:
            del self.requests[request_id]
            self.finished["length"] += 1
        else:
            self.requests[request_id] = (request, answer, sent + len(ids))
        return RequestDelta(
            request_id=request_id,
            ids_target=tuple(ids),
            text=TOKENIZER.decode(ids),
            finish_reason="length" if is_last else None,
            usage=Usage(
                num_prompt_tokens=len(request.prompt_ids_target),
                num_cached_tokens=1,
                num_output_tokens=sent + len(ids),
                num_rounds=2,
                num_drafts=6,
                num_accepted_drafts=4,
            ),
        )

    def stats(self) -> EngineStats:
        num_running = min(len(self.requests), self.max_running)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self.requests) - num_running,
            num_kv_blocks=10,
            num_free_kv_blocks=10 - num_running,
            num_cached_kv_blocks=0,
            num_preemptions=0,
            num_steps=3,
            num_rows=12,
            num_prompt_tokens=5,
            num_cached_tokens=1,
            num_output_tokens=9,
            num_rounds=4,
            num_drafts=12,
            num_accepted_drafts=6,
            num_accepted_at=(3, 2, 1, 0),
            rounds_by_key={},
            finished=dict(self.finished),  # type: ignore[arg-type]
        )

    def flush_cache(self) -> None:
        self.num_flushes += 1
