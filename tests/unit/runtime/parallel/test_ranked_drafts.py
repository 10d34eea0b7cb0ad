"""Drafts over tensor-parallel ranks: no token changes, and every rank commits the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.loading import load_models
from runtime.models import DraftModel, VocabHead, pick_rows, rank_rows
from runtime.parallel.ranks import ONE_RANK, Ranks
from runtime.spec.types import SamplingParams
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.rank_harness import SMALL, Outcome, answer, on_ranks, ranked_engine
from tests.tiny import Sizes, write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_block import BlockCase, write_tiny_block
from tests.tiny_last_state import write_eagle1, write_mtp
from tests.tiny_parallel import write_tiny_peagle

FOUR_HEADS = Sizes(hidden=32, heads=4, kv_heads=4, head_dim=8, inner=64)
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=12),
)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 2 + 7 * index),
        params=params,
        max_tokens=14,
        ignore_eos=True,
    )
    for index, params in enumerate(PARAMS)
)


def manifest_of(target: Path, draft: Path, token_map: str | None = None) -> Manifest:
    return emit_manifest(str(target), str(draft), num_speculative_tokens=3, token_map=token_map)


def target_of(directory: Path, **given: object) -> Path:
    return write_tiny_target(directory / "t", **{"num_layers": 4, "layer_gain": 0.15, **given})  # type: ignore[arg-type]


def eagle3(directory: Path) -> Manifest:
    target = target_of(directory)
    return manifest_of(target, write_agreeing_eagle3(directory / "d", target))


def eagle3_full_head(directory: Path) -> Manifest:
    target = target_of(directory)
    draft = write_agreeing_eagle3(directory / "d", target, draft_vocab_size=None)
    return manifest_of(target, draft)


def peagle(directory: Path) -> Manifest:
    target = target_of(directory)
    return manifest_of(target, write_tiny_peagle(directory / "d", target))


def eagle1(directory: Path) -> Manifest:
    target = target_of(directory, num_layers=2)
    return manifest_of(target, write_eagle1(directory / "d", target, is_agreeing=True))


def mtp(directory: Path) -> Manifest:
    target = target_of(directory, num_layers=2)
    return manifest_of(target, write_mtp(directory / "d", target, is_agreeing=True))


def mtp_of_layers_and_a_map(directory: Path) -> Manifest:
    """The reduced head is made of rows of the target's, which lie on both ranks."""
    target = target_of(directory, num_layers=2)
    draft = write_mtp(directory / "d", target, num_layers=3, is_agreeing=True)
    path = directory / "map.json"
    path.write_text(str([*range(90, 2, -1)]), encoding="utf-8")
    return manifest_of(target, draft, str(path))


def mtp_with_its_own_vocabulary(directory: Path) -> Manifest:
    target = target_of(directory, num_layers=2, is_tied=True)
    return manifest_of(target, write_mtp(directory / "d", target, has_own_vocabulary=True))


def block_of(case: BlockCase) -> Callable[[Path], Manifest]:
    def write(directory: Path) -> Manifest:
        target = target_of(directory, num_layers=2, layer_gain=0.08)
        return emit_manifest(str(target), str(write_tiny_block(directory / "d", target, case)))

    return write


CASES: dict[str, Callable[[Path], Manifest]] = {
    "eagle3": eagle3,
    "eagle3-full-head": eagle3_full_head,
    "peagle": peagle,
    "eagle": eagle1,
    "mtp": mtp,
    "mtp-layers-map": mtp_of_layers_and_a_map,
    "mtp-own-vocabulary": mtp_with_its_own_vocabulary,
    "dspark": block_of(BlockCase()),
    "dspark-rnn-own": block_of(
        BlockCase(markov="rnn", sample_from_anchor=False, has_own_embedding=True)
    ),
    "dflash": block_of(BlockCase(markov=None, sample_from_anchor=False)),
    "dflash2": block_of(
        BlockCase(markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None)
    ),
}
WHOLE = ("peagle", "mtp-layers-map", "dspark-rnn-own")
"""Cases of a draft whose own tensors are whole on every rank."""
RANDOM_DRAFTS = ("dflash", "dflash2", "mtp-own-vocabulary")


def run(
    manifest: Manifest, size: int, overrides: Overrides = SMALL, *, is_draft_split: bool = True
) -> list[Outcome]:
    return on_ranks(
        size,
        lambda ranks: answer(
            ranked_engine(manifest, ranks, overrides, is_draft_split=is_draft_split), REQUESTS
        ),
    )


@pytest.mark.parametrize(
    ("name", "is_draft_split"),
    [*((name, True) for name in CASES), *((name, False) for name in WHOLE)],
)
def test_a_draft_over_two_ranks_changes_no_token(
    tmp_path: Path, name: str, is_draft_split: bool
) -> None:
    manifest = CASES[name](tmp_path)
    alone = run(manifest, 2, replace(SMALL, proposer="none"))
    drafted = run(manifest, 2, is_draft_split=is_draft_split)
    for outcome in (*alone, *drafted):
        assert outcome.ids_target == alone[0].ids_target
    assert drafted[0].usages == drafted[1].usages
    if name not in RANDOM_DRAFTS:
        assert drafted[0].num_accepted_drafts > 5


def test_a_draft_over_four_ranks_changes_no_token(tmp_path: Path) -> None:
    """104 and 80 rows: four ranks hold 26 and 20 of them."""
    target = target_of(tmp_path, sizes=FOUR_HEADS)
    manifest = manifest_of(target, write_agreeing_eagle3(tmp_path / "d", target))
    alone = run(manifest, 4, replace(SMALL, proposer="none"))
    drafted = run(manifest, 4)
    for outcome in (*alone, *drafted):
        assert outcome.ids_target == alone[0].ids_target
    assert drafted[0].num_accepted_drafts > 5


@pytest.mark.parametrize(
    "name", ["mtp-layers-map", "mtp-own-vocabulary", "eagle3", "dspark-rnn-own"]
)
def test_vocabulary_parts_of_a_draft_have_the_bits_of_the_whole(tmp_path: Path, name: str) -> None:
    manifest = CASES[name](tmp_path)
    whole = draft_of(manifest, ONE_RANK)
    ids = torch.arange(whole.embedding_VH.shape[0]).flip(0)
    hidden = torch.randn(5, whole.head_RH.shape[1], generator=torch.Generator().manual_seed(3))

    def work(ranks: Ranks) -> tuple[torch.Tensor, ...]:
        draft = draft_of(manifest, ranks)
        head = draft.head
        return draft.embedding.rows(ids), head.logits(hidden), head.argmax(hidden), draft.head_RH

    results = on_ranks(2, work)
    for rows, logits, best, _ in results:
        assert torch.equal(rows, whole.embedding.rows(ids))
        assert torch.equal(logits, whole.head.logits(hidden))
        assert torch.equal(best, whole.head.argmax(hidden))
    assert torch.equal(torch.cat([rows for *_, rows in results]), whole.head_RH)
    assert results[0][3].shape[0] < whole.head_RH.shape[0], "each rank holds a part"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("is_source_split", [True, False])
def test_rows_of_a_map_are_picked_over_ranks(size: int, is_source_split: bool) -> None:
    """Sizes that do not divide 50 rows or 23 ids are padded; no padding row has an id."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(50, 16, generator=generator)
    weight[10:14] = weight[30:34]  # ties, which the lowest draft id wins
    ids = torch.randperm(50, generator=generator)[:23]
    hidden = torch.randn(9, 16, generator=generator)
    whole = pick_rows(VocabHead(weight_RD=weight, num_ids=50, ranks=ONE_RANK), ids, ONE_RANK)
    assert torch.equal(whole.weight_RD, weight[ids])

    def work(ranks: Ranks) -> VocabHead:
        source = VocabHead(weight_RD=weight, num_ids=50, ranks=ONE_RANK)
        if is_source_split:
            rows = rank_rows(50, size)
            padded = torch.nn.functional.pad(weight, (0, 0, 0, rows * size - 50))
            part = padded[ranks.rank * rows : (ranks.rank + 1) * rows]
            source = VocabHead(weight_RD=part, num_ids=50, ranks=ranks)
        return pick_rows(source, ids, ranks)

    def both(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        head = work(ranks)
        return head.logits(hidden), head.argmax(hidden), head.reachable_rows

    results = on_ranks(size, both)
    for logits, best, _ in results:
        assert torch.equal(logits, whole.logits(hidden))
        assert torch.equal(best, whole.argmax(hidden))
    assert torch.equal(torch.cat([rows for *_, rows in results]), whole.weight_RD)


def test_ranks_choose_the_same_tokens_in_fifty_sampled_rounds(tmp_path: Path) -> None:
    """Field case C059: temperature 1, fifty rounds, the same accepted ids on both ranks."""
    manifest = CASES["eagle3"](tmp_path)
    request = RequestInput(
        request_id="long",
        prompt_ids_target=prompt_of(4, 6),
        params=SamplingParams(temperature=1.0, seed=3),
        max_tokens=96,
        ignore_eos=True,
    )
    overrides = replace(SMALL, max_model_len=200)
    for verification in ("seeded", "rejection"):
        settings = replace(overrides, verification=verification)
        results = on_ranks(
            2,
            lambda ranks, given=settings: answer(ranked_engine(manifest, ranks, given), [request]),
        )
        assert results[0] == results[1]
        assert results[0].usages["long"].num_rounds >= 50
        assert results[0].num_accepted_drafts > 10


def test_rows_of_a_split_draft_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """The requests of a batch get what each gets alone, drafts included."""
    manifest = CASES["eagle3"](tmp_path)
    together = run(manifest, 2)
    for request in REQUESTS:
        alone = on_ranks(
            2, lambda ranks, one=request: answer(ranked_engine(manifest, ranks, SMALL), [one])
        )
        name = request.request_id
        assert alone[0].ids_target[name] == together[0].ids_target[name]
        assert alone[0].usages[name] == together[0].usages[name]


def draft_of(manifest: Manifest, ranks: Ranks) -> DraftModel:
    models = load_models(
        manifest, Path("/"), device=torch.device("cpu"), dtype=torch.float32, ranks=ranks
    )
    assert models.draft is not None
    return models.draft
