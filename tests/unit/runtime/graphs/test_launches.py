"""How many kernels a round launches: what a captured round is made of, counted on a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from runtime.batch import RoundKind
from runtime.graphs.state import RoundShape
from tests.engine_harness import World, make_world
from tests.fake_graph import make_llm
from tests.launches import LAYER, counted_launches
from tests.tiny import EOS_ID, TOKENIZER_SIZE
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import Kind, last_state_world

NUM_TARGET_LAYERS = 2
GAMMA = 4
HEAD = {"head_argmax": 2}
HALF = (EOS_ID, *range(TOKENIZER_SIZE - 1, 3, -2))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("launches"))


def launches_of(
    world: World,
    proposer: str,
    gamma: int,
    batch: int,
    kind: RoundKind = "greedy",
    **settings: int,
) -> tuple[Counter[str], Counter[str]]:
    """Return what the draft phase of a round launches, and what the rest of it does."""
    llm, made = make_llm(world, proposer=proposer, num_speculative_tokens=gamma, **settings)
    shape = RoundShape(batch=batch, num_drafts=gamma, context=128, kind=kind)
    assert llm.config.num_speculative_tokens == gamma
    round_ = made[0].round
    with torch.inference_mode():
        round_.run(shape)  # what a shape fixes is made once
        with counted_launches() as whole:
            round_.run(shape)
        with counted_launches() as draft:
            round_.draft_phase(shape)
    return draft, whole - draft


@pytest.mark.parametrize("batch", [1, 4])
def test_a_round_without_drafts(world: World, batch: int) -> None:
    draft, rest = launches_of(world, "none", 0, batch)
    assert draft == {"prepare_round": 1}
    layers = Counter(LAYER * NUM_TARGET_LAYERS)
    assert rest == layers + Counter(embed_stream=1, finish_round=1, **HEAD)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_of_an_eagle3_draft_is_its_layer_and_its_head(world: World, batch: int) -> None:
    """Seven launches a step: five of the layer, whose first product joins, and two of the head."""
    draft, rest = launches_of(world, "eagle3", GAMMA, batch)
    layer = Counter(LAYER) - Counter(scaled_linear=1) + Counter(joined_linear=1)
    steps: Counter[str] = Counter()
    for _ in range(GAMMA - 1):
        steps += layer + Counter(HEAD)
    assert steps.total() == 7 * (GAMMA - 1)
    assert draft == steps + Counter(prepare_round=1, embed_stream=1, **HEAD)
    assert rest == Counter(LAYER * NUM_TARGET_LAYERS) + layer + Counter(
        embed_stream=1, finish_round=1, linear=1, keep_rows=1, **HEAD
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_mtp_has_no_library_operations(batch: int, tmp_path: Path) -> None:
    world = last_state_world(tmp_path, "mtp", num_layers=1)
    draft, rest = launches_of(world, "mtp", 3, batch)
    step = Counter(LAYER) + Counter(joined_linear=1, enter_stream=1, rms_norm=1, **HEAD)
    assert draft == step + step + Counter(prepare_round=1, take_rows=1, **HEAD)
    assert rest == Counter(LAYER * NUM_TARGET_LAYERS) + step + Counter(
        embed_stream=1, finish_round=1, rms_norm=1, keep_rows=1
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_a_block_is_its_layers_and_a_choice_for_each_draft(batch: int, tmp_path: Path) -> None:
    """A draft that a plain Markov head corrects takes two launches.

    Slices of several requests' rows are copied: states of predicting rows, ids before each draft.
    """
    block = Counter(LAYER * 2) + Counter(
        prepare_round=1, place_blocks=1, embed_stream=1, rms_norm=1
    )
    copied = Counter(contiguous=1) if batch > 1 else Counter()
    world = make_block_world(tmp_path / "dspark", BlockCase(sample_from_anchor=False))
    draft, rest = launches_of(world, "dspark", GAMMA, batch)
    confidence = Counter(embed=1, cat=1, linear=1, sigmoid=1, keep_chances=1)
    before = Counter(flatten=1) if batch > 1 else Counter()
    assert draft == block + copied + before + confidence + Counter(
        head_logits=1, corrected_argmax=2 * GAMMA
    )
    target = Counter(LAYER * NUM_TARGET_LAYERS) + Counter(embed_stream=1, finish_round=1, **HEAD)
    context = Counter(linear=1, rms_norm=1) + Counter(linear=2, write_context_kv=2)
    assert rest == target + context + Counter(take_rows=1)  # of the chances
    world = make_block_world(tmp_path / "dflash", BlockCase(markov=None, sample_from_anchor=False))
    draft, rest = launches_of(world, "dflash", GAMMA, batch)
    assert rest == target + context
    assert draft == block + copied + Counter(HEAD) + Counter(copy_=1)


def test_a_sampled_block_reads_its_own_head_once(tmp_path: Path) -> None:
    """The other products with a head are those of the Markov head, one for each draft."""
    world = make_block_world(tmp_path, BlockCase())
    draft, _ = launches_of(world, "dspark", GAMMA, 4, "sampled")
    assert draft["head_logits"] == 1 + GAMMA
    assert draft["linear"] == 1  # of the confidence head


@pytest.mark.parametrize(("kind", "count"), [("sampled", 3), ("filtered", 5)])
def test_a_draw_is_its_logits_and_few_launches(world: World, kind: RoundKind, count: int) -> None:
    """Options are read by slot where they are needed: no library operation copies them."""
    draft, rest = launches_of(world, "eagle3", GAMMA, 4, kind)
    greedy_draft, greedy_rest = launches_of(world, "eagle3", GAMMA, 4)
    drawn = Counter(draw_tokens=count, head_logits=2)  # scales of rows, then their products
    for _ in range(GAMMA):
        greedy_draft = greedy_draft - Counter(HEAD) + drawn
    assert draft == greedy_draft
    assert rest == greedy_rest - Counter(HEAD) + drawn


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_own_ids_cost_one_launch_a_draft_and_one_a_round(
    kind: Kind, batch: int, tmp_path: Path
) -> None:
    world = last_state_world(tmp_path, kind, token_map=HALF)
    plain, plain_rest = launches_of(world, kind, GAMMA, batch)
    draft, rest = launches_of(world, kind, GAMMA, batch, dynamic_rows=6)
    assert plain["head_argmax"] == 2 * GAMMA
    assert draft - plain == {"joint_head_argmax": 3 * GAMMA}
    assert plain - draft == {"head_argmax": 2 * GAMMA}
    assert (rest - plain_rest, plain_rest - rest) == ({"keep_own_ids": 1}, {})


def test_scored_ids_add_their_projection_and_their_choice(tmp_path: Path) -> None:
    """The library's `topk` is one operation here and some kernels on a GPU."""
    world = last_state_world(tmp_path, "mtp", token_map=HALF)
    own, own_rest = launches_of(world, "mtp", GAMMA, 4, dynamic_rows=6)
    draft, rest = launches_of(world, "mtp", GAMMA, 4, dynamic_rows=6, dynamic_rank=8)
    assert draft - own == Counter(("linear", "head_logits", "topk", "index") * GAMMA)
    assert not own - draft
    assert rest == own_rest


def test_a_prefill_is_its_layers_and_few_others(world: World) -> None:
    _, made = make_llm(world, proposer="eagle3", num_speculative_tokens=GAMMA)
    round_ = made[0].round
    shape = made[0].prefill_shapes[0]
    assert round_.prefill is not None
    round_.prefill.write_padding(shape)
    with torch.inference_mode(), counted_launches() as launches:
        round_.run_prefill(shape)
    layer = Counter(LAYER) - Counter(scaled_linear=1) + Counter(joined_linear=1)
    assert launches == Counter(LAYER * NUM_TARGET_LAYERS) + layer + Counter(
        place_prompts=1, embed_stream=2, linear=1, keep_rows=1, index_copy_=1, copy_=1,
        attend_new_rows=2 * (NUM_TARGET_LAYERS + 1), **HEAD,  # three for each layer
    )  # fmt: skip
