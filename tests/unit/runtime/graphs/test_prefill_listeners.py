"""What a prefill server hears of its prompts' layers after one of them failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from runtime.engine.forwards import RowsListener
from runtime.engine.request import RequestDelta, RequestInput
from tests.engine_harness import prompt_of
from tests.fake_graph import make_agreeing_world, make_llm
from tests.tiny import VOCAB_SIZE
from tests.tiny_grammar import Grammar


def nothing(output: Sequence[int]) -> torch.Tensor:
    """No id at all."""
    return torch.zeros(VOCAB_SIZE, dtype=torch.bool)


def test_what_is_left_of_a_round_that_failed_is_heard(tmp_path: Path) -> None:
    """A prefill server sends each layer as it hears of it: unheard ones would never arrive."""
    world = make_agreeing_world(tmp_path)
    llm, (graph,) = make_llm(world, proposer="eagle3", num_speculative_tokens=3, max_num_requests=2)
    ill, well = (
        RequestInput(
            request_id=name,
            prompt_ids_target=prompt_of(seed, length),
            max_tokens=9,
            ignore_eos=True,
            masks=masks,
        )
        for name, seed, length, masks in (("ill", 1, 12, Grammar(nothing)), ("well", 2, 9, None))
    )
    llm.engine.add_request(ill)
    llm.engine.add_request(well)
    layers: list[int] = []
    sent_off: list[int] = []
    listener = RowsListener(
        on_sent_off=lambda news: sent_off.append(len(news)),
        on_layer=lambda layer, _: layers.append(layer),
    )
    found: list[RequestDelta] = []
    while all(delta.error is not None for delta in found):
        found += llm.own_engine.step(listener)
    assert [delta.error and delta.error.code for delta in found] == ["SD924", None]
    assert len(found[1].ids_target) == 1
    assert graph.prefills == []
    assert sent_off == [2, 1]
    assert layers == 2 * list(range(llm.models.target.num_layers))
