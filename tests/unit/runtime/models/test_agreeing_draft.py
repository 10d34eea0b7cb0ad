"""The whole chain by hand on a draft that is often right: text, alignment and every pattern.

A round here is the shortest correct one: draft entries for the tokens just committed, a chain of
four, one verify forward. It uses the models only, no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from runtime.kv import KVLayer
from runtime.loading import LoadedModels
from tests.paged import Paged, Span
from tests.tiny_agreeing import write_agreeing_pair
from tests.tiny_manifest import load_tiny

GAMMA, NEW_TOKENS = 4, 40


def test_rounds_give_the_greedy_text_and_accept_to_every_depth(tmp_path: Path) -> None:
    models = load_tiny(write_agreeing_pair(tmp_path).manifest())
    patterns: Counter[int] = Counter()
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        for _ in range(6):
            prompt = torch.randint(3, 99, (8,), generator=generator).tolist()
            text, accepted = _speculate(models, prompt)
            patterns.update(accepted)
            assert text == _plain(models, prompt)
    assert set(patterns) == set(range(GAMMA + 1)), patterns
    assert 1.4 < 1 + sum(k * n for k, n in patterns.items()) / patterns.total() < 2.5


def _plain(models: LoadedModels, prompt: list[int]) -> list[int]:
    target = models.target
    paged = Paged(target.kv_specs, num_requests=1, max_length=len(prompt) + NEW_TOKENS)
    rows, start, text = prompt, 0, list[int]()
    while len(text) < NEW_TOKENS:
        batch = paged.batch([Span(request=0, start=start, ids=rows)])
        hidden = target.forward(batch, paged.pool.layers).hidden_ND
        start += len(rows)
        rows = target.greedy_ids(hidden[-1:]).tolist()
        text += rows
    return text


def _speculate(models: LoadedModels, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Return the text and the accepted drafts of each round."""
    target, draft = models.target, models.draft
    assert draft is not None
    aux_layer_ids = draft.facts.aux_layer_ids or ()
    length = len(prompt) + NEW_TOKENS + 2 * GAMMA
    paged = Paged([*target.kv_specs, *draft.kv_specs], num_requests=1, max_length=length)
    target_kv = paged.pool.layers[: target.num_layers]
    draft_kv = paged.pool.layers[target.num_layers :]
    out = target.forward(
        paged.batch([Span(request=0, start=0, ids=prompt)]), target_kv, aux_layer_ids
    )
    ids, start, accepted = [*prompt, *target.greedy_ids(out.hidden_ND[-1:]).tolist()], 0, []
    aux = out.aux_hidden_NA
    while len(ids) < len(prompt) + NEW_TOKENS:
        assert aux is not None
        drafts = _chain(models, paged, draft_kv, ids, start, aux)
        start = len(ids) - 1
        batch = paged.batch([Span(request=0, start=start, ids=[ids[-1], *drafts])])
        out = target.forward(batch, target_kv, aux_layer_ids)
        chosen = target.greedy_ids(out.hidden_ND).tolist()
        count = next((j for j in range(GAMMA) if drafts[j] != chosen[j]), GAMMA)
        ids += chosen[: count + 1]
        accepted.append(count)
        aux = None if out.aux_hidden_NA is None else out.aux_hidden_NA[: count + 1]
    return ids[len(prompt) :][:NEW_TOKENS], accepted


def _chain(
    models: LoadedModels,
    paged: Paged,
    kv: Sequence[KVLayer],
    ids: list[int],
    start: int,
    aux: torch.Tensor,
) -> list[int]:
    """Return the drafts after `ids`; `aux` are the target's states at `start` and on."""
    draft = models.draft
    assert draft is not None
    batch = paged.batch([Span(request=0, start=start, ids=ids[start + 1 :])])
    hidden = draft.forward(batch, draft.fuse(aux), kv)
    drafts = draft.propose_ids(hidden.head_input_NH[-1:]).tolist()
    while len(drafts) < GAMMA:
        position = len(ids) - 2 + len(drafts)
        batch = paged.batch([Span(request=0, start=position, ids=drafts[-1:])])
        hidden = draft.forward(batch, hidden.feedback_NH[-1:], kv)
        drafts += draft.propose_ids(hidden.head_input_NH).tolist()
    return drafts
