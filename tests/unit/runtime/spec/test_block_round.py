"""A round of a block draft on the device drafts what the eager path reads slot by slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.models import BlockModel
from runtime.spec import block_round
from runtime.spec.types import SamplingParams
from tests.block_rounds import NUM_PADDING, assert_drafted_alike, model_of, views_of
from tests.engine_harness import World
from tests.tiny_block import BlockCase, make_block_world

CASES = {
    "vanilla": BlockCase(),
    "vanilla-full-slot-0-silent": BlockCase(sample_from_anchor=False, draft_vocab_size=None),
    "gated": BlockCase(markov="gated"),
    "gated-full-slot-0-silent": BlockCase(
        markov="gated", sample_from_anchor=False, draft_vocab_size=None
    ),
    "rnn-full": BlockCase(markov="rnn", draft_vocab_size=None),
    "rnn-slot-0-silent": BlockCase(markov="rnn", sample_from_anchor=False, sliding_window=6),
    "dflash": BlockCase(markov=None),
    "dflash-full-slot-0-silent": BlockCase(
        markov=None, sample_from_anchor=False, draft_vocab_size=None
    ),
    "dflash2": BlockCase(
        markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None
    ),
}
PARAMS = {
    "greedy": (SamplingParams(),) * 4,
    "mixed": tuple(
        SamplingParams(temperature=0.3 * index, top_k=9 * (index % 2), seed=index)
        for index in range(4)
    ),
    "rejection": tuple(
        SamplingParams(temperature=0.4 * index, seed=index, verification="rejection")
        for index in range(4)
    ),
}
COUNTS = ((4, 4, 4, 4), (1, 4, 0, 2), (2, 0, 1, 2), (0, 0, 0, 1))


@pytest.fixture(scope="module", params=CASES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_block_world(tmp_path_factory.mktemp("block-round"), CASES[request.param])


@pytest.mark.parametrize(
    ("confidence", "kind"),
    [*(("own", kind) for kind in PARAMS), ("none", "greedy"), ("states", "greedy")],
)
def test_a_round_drafts_what_the_eager_path_does(world: World, confidence: str, kind: str) -> None:
    model, distinct = model_of(world, confidence), set()
    for counts in COUNTS:
        found = assert_drafted_alike(model, views_of(PARAMS[kind], counts))
        distinct.update(found.drafts_BG.flatten().tolist())
        assert bool((found.chances_SG < 1).any()) == (model.confidence is not None)
    assert len(distinct) > 3


def test_logits_of_some_slots_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the logits of all slots are too many, products of fewer slots give the same."""
    model, num_rows, product = model_of(world, "own"), [], BlockModel.base_logits
    num_requests = 4 + NUM_PADDING

    def noted(self: BlockModel, hidden_MH: torch.Tensor) -> torch.Tensor:
        num_rows.append(hidden_MH.shape[0])
        return product(self, hidden_MH)

    monkeypatch.setattr(BlockModel, "base_logits", noted)
    for count, slots in ((1, [1, 1, 1, 1]), (2, [2, 2]), (3, [3, 1])):
        size = 4 * num_requests * model.draft_to_target_R.shape[0]
        monkeypatch.setattr(block_round, "_LOGITS_BYTES", count * size)
        num_rows.clear()
        assert_drafted_alike(model, views_of(PARAMS["mixed"], (4, 4, 4, 4)))
        assert num_rows[-len(slots) :] == [num_requests * number for number in slots]


def test_a_round_is_the_same_alone_and_among_others(world: World) -> None:
    model, views = model_of(world, "own"), views_of(PARAMS["greedy"], (4, 4, 4, 4))
    together = assert_drafted_alike(model, views)
    for b, view in enumerate(views):
        alone = assert_drafted_alike(model, [replace(view, slot=0)])
        assert torch.equal(alone.drafts_BG[0], together.drafts_BG[b])
