"""Prefill and decode in different layouts, every rank a thread: KV is spread by heads.

At unequal sizes of tensor parallelism numbers differ by design, so what is compared is the KV that
moved with the KV it was made as, and answers with those of the same layout without a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.disagg.frames import Failed, Prefill, Prefilled
from runtime.disagg.handshake import Layout
from runtime.disagg.outbox import wire_bytes
from runtime.disagg.reshard import plan_moves
from runtime.disagg.routes import side_of
from runtime.engine.prefill_role import PrefillEngine
from runtime.engine.request import RequestInput
from runtime.kv import KVLayer
from runtime.spec.types import SamplingParams
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.pd_layouts import NUM_LAYERS, Served, System
from tests.rank_harness import SMALL
from tests.tiny import Sizes, write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_last_state import write_mtp

pytestmark = pytest.mark.dist
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 5 + 11 * index),
        params=params,
        max_tokens=12,
        ignore_eos=True,
    )
    for index, params in enumerate(
        (SamplingParams(), SamplingParams(temperature=0.8, seed=7), SamplingParams())
    )
)


def write_eagle3(directory: Path) -> Manifest:
    return pair_of(directory, kv_heads=4)


def pair_of(directory: Path, *, kv_heads: int) -> Manifest:
    sizes = Sizes(hidden=32, heads=4, kv_heads=kv_heads, head_dim=8, inner=64)
    target = write_tiny_target(directory / "t", num_layers=NUM_LAYERS, layer_gain=0.15, sizes=sizes)
    draft = write_agreeing_eagle3(directory / "d", target)
    return emit_manifest(str(target), str(draft), num_speculative_tokens=3)


def write_mtp_layers(directory: Path) -> Manifest:
    sizes = Sizes(hidden=32, heads=4, kv_heads=4, head_dim=8, inner=64)
    target = write_tiny_target(directory / "t", num_layers=NUM_LAYERS, layer_gain=0.15, sizes=sizes)
    draft = write_mtp(directory / "d", target, num_layers=2, is_agreeing=True)
    return emit_manifest(str(target), str(draft), num_speculative_tokens=2)


def whole_heads(
    layout: Layout, pools: dict[int, tuple[KVLayer, ...]], layer: int, num_heads: int
) -> torch.Tensor:
    """Return keys and values of all heads of a layer, put together from a side's ranks."""
    side = side_of("x", layout)
    stage = side.stage_of(layer)
    split = side.split_of(layer)
    at = layer - sum(layout.stage_layers[:stage])
    parts = [pools[side.rank(stage, rank)][at] for rank in range(split)]
    whole = torch.stack(
        [torch.cat([part.k for part in parts], 1), torch.cat([part.v for part in parts], 1)]
    )
    assert whole.shape[2] == num_heads
    return whole


def assert_moved(served: Served, table_of: Callable[[str], Sequence[int]]) -> None:
    """Every block on the decode side is bit-equal to the one that was computed."""
    system = served.system
    made = {number: pool for rank in served.prefilling for number, pool in rank.pools.items()}
    got = {number: rank.caches.pool.layers for number, rank in enumerate(served.decoding)}
    for layer, heads in enumerate(system.kv_heads):
        source = whole_heads(system.layout, made, layer, heads)
        destination = whole_heads(system.decode_layout, got, layer, heads)
        for frame in served.asked:
            assert isinstance(frame, Prefill)
            sent, kept = table_of(frame.request_id), frame.blocks
            assert len(sent) == len(kept)
            assert source[:, list(sent)].any()
            assert torch.equal(source[:, list(sent)], destination[:, list(kept)])


def tables_noted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Keep which blocks each prompt had on the prefill side."""
    found: dict[str, list[int]] = {}
    answer = PrefillEngine._answer

    def noted(self: PrefillEngine, request_id: str, *rest: object) -> None:
        request = self.engine.find(request_id)
        assert request is not None
        size = self.engine.config.kv_block_size
        count = -(-request.num_prompt_tokens // size)
        found[request_id] = list(request.placed.table.blocks[:count])
        answer(self, request_id, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillEngine, "_answer", noted)
    return found


LAYOUTS = {
    "tp2-pp2-to-tp4": ((2, 2), 4, (True, True)),
    "tp2-to-tp1": ((1, 2), 1, (True, True)),
    "tp1-to-tp2": ((1, 1), 2, (True, True)),
    "tp2-to-tp2": ((1, 2), 2, (True, True)),
    "tp2-whole-draft-to-tp4": ((1, 2), 4, (False, True)),
    "pp2-to-tp2-whole-draft": ((2, 1), 2, (True, False)),
}


@pytest.mark.parametrize(
    ("write", "name"),
    [
        *((write_eagle3, name) for name in LAYOUTS),
        (write_mtp_layers, "tp2-pp2-to-tp4"),
        (write_mtp_layers, "pp2-to-tp2-whole-draft"),
    ],
)
def test_kv_is_spread_over_other_ranks_and_a_draft_changes_no_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], Manifest],
    name: str,
) -> None:
    manifest = write(tmp_path)
    prefill, decode, split = LAYOUTS[name]
    assert manifest.draft is not None
    if manifest.draft.decoder.num_kv_heads < decode:  # two heads: whole on each of four ranks
        split = (split[0], False)
    tables = tables_noted(monkeypatch)
    system = System(manifest, SMALL, prefill=prefill, decode=decode, is_draft_split=split)
    served = system.serve(REQUESTS)
    assert_moved(served, tables.__getitem__)
    block_bytes = [2 * heads * 8 * 8 * 4 for heads in system.kv_heads]
    if not split[1]:  # every decode rank gets the whole draft
        block_bytes[NUM_LAYERS:] = [decode * size for size in block_bytes[NUM_LAYERS:]]
    assert served.num_kv_bytes() == sum(
        wire_bytes(
            len(request.prompt_ids_target),
            first_position=0,
            kv_block_size=8,
            block_bytes=block_bytes,
        )
        for request in REQUESTS
    )
    drafted, num_accepted = served.answers()
    alone = System(manifest, replace(SMALL, proposer="none"), prefill=prefill, decode=decode).serve(
        REQUESTS
    )
    expected, _ = alone.answers()
    assert drafted == expected
    assert num_accepted > 3


@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), 1), ((1, 1), 2)])
def test_c073_two_heads_on_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefill: tuple[int, int], decode: int
) -> None:
    manifest = pair_of(tmp_path, kv_heads=2)
    tables = tables_noted(monkeypatch)
    served = System(manifest, SMALL, prefill=prefill, decode=decode).serve(REQUESTS)
    assert_moved(served, tables.__getitem__)
    expected, _ = (
        System(manifest, replace(SMALL, proposer="none"), prefill=prefill, decode=decode)
        .serve(REQUESTS)
        .answers()
    )
    assert served.answers()[0] == expected


def test_c073_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """A decode server of three ranks cannot take four heads: the request ends with the numbers."""
    manifest = write_eagle3(tmp_path)
    system = System(manifest, SMALL, prefill=(1, 1), decode=1)
    system.decode_layout = Layout(stage_layers=(NUM_LAYERS,), tensor_parallel=3)
    served = system.serve(REQUESTS[:1])
    (frame,) = served.prefilling[0].port.sent
    assert isinstance(frame, Failed)
    assert (frame.problem.code, frame.problem.found) == ("SD862", "3")
    assert not any(layer.k.any() for layer in served.decoding[0].caches.pool.layers)


def test_drafts_of_sampled_requests_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """In rejection mode the prefill side makes the first drafts, on all ranks of its last stage."""
    overrides = replace(SMALL, verification="rejection")
    served = System(write_eagle3(tmp_path), overrides, prefill=(2, 2), decode=2).serve(REQUESTS)
    frames = {frame.request_id: frame for frame in served.merged() if isinstance(frame, Prefilled)}
    assert [len(frames[f"d/{number}"].draft_ids_target) for number in range(3)] == [0, 3, 0]
    ids, num_accepted = served.answers()  # alike on all ranks of the decode side
    assert [len(found) for found in ids.values()] == [12, 12, 12]
    assert num_accepted > 0


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_cannot_write_fails_the_prompt_on_all_ranks(tmp_path: Path, rank: int) -> None:
    """Last stage or one before it: the decode side hears SD863, and no rank keeps a block."""
    system = System(write_eagle3(tmp_path), SMALL, prefill=(2, 2), decode=1)
    system.muted.add(rank)
    served = system.serve(REQUESTS[:2])
    for prefilling in served.prefilling:
        frames = prefilling.port.sent
        assert [type(frame) for frame in frames] == [Failed, Failed]
        assert {frame.problem.code for frame in frames if isinstance(frame, Failed)} == {"SD863"}


def test_whole_drafts_are_sent_in_turns() -> None:
    """Two ranks that hold the whole draft send it to two ranks each, every head once."""
    prefill = side_of("prefill", Layout(stage_layers=(1,), tensor_parallel=2, is_draft_split=False))
    decode = side_of("decode", Layout(stage_layers=(1,), tensor_parallel=4, is_draft_split=False))
    moves = [move for move in plan_moves(prefill, decode, (4, 4)) if move.layer == 1]
    assert [(move.source, move.destination, move.num_heads) for move in moves] == [
        (0, 0, 4),
        (0, 1, 4),
        (1, 2, 4),
        (1, 3, 4),
    ]
