"""Prefill and decode in different layouts, every rank a thread: KV is spread by heads.

At unequal sizes of tensor parallelism numbers differ by design, so what is compared is the KV that
moved with the KV it was made as, and answers with those of the same layout without a draft.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from runtime.config import DRAFT_PROPOSERS, Overrides, RuntimeConfig, resolve_config
from runtime.disagg.agreement import RankAgreement
from runtime.disagg.early import EarlySender
from runtime.disagg.frames import Failed, Frame, Offer, Prefill, Prefilled
from runtime.disagg.handshake import Hello, Layout
from runtime.disagg.listen import Arrived, PeerEvent, Said
from runtime.disagg.memory import MemoryTransport
from runtime.disagg.outbox import wire_bytes
from runtime.disagg.reshard import plan_moves
from runtime.disagg.routes import Routes, side_of
from runtime.engine.caches import Caches, make_caches
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.llm import build_engine
from runtime.engine.prefill_role import PrefillEngine, PrefillParts, StagePool
from runtime.engine.request import RequestInput
from runtime.engine.stages import StageLine, StageWorker
from runtime.kv import KVLayer
from runtime.loading import load_models
from runtime.parallel.channels import QueueChannel
from runtime.parallel.ranks import Ranks, ThreadExchange
from runtime.spec.types import SamplingParams
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import split_stages
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.pd_harness import DECODE, TIMEOUT_S, through_the_wire
from tests.rank_harness import SMALL
from tests.tiny import Sizes, write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_last_state import write_mtp

pytestmark = pytest.mark.dist
T = TypeVar("T")
NUM_LAYERS = 4
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


def in_threads(
    ranks: Sequence[Ranks], work: Callable[[Ranks], T], exchange: ThreadExchange
) -> list[T]:
    """Run `work` in a thread for each rank; a thread that fails wakes the others."""

    def guarded(one: Ranks) -> T:
        is_done = False
        try:
            result = work(one)
            is_done = True
            return result
        finally:
            if not is_done:
                exchange.abort()

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(guarded, ranks))


class Port:
    """One rank's port, filled by hand; every rank of a side gets the same."""

    has_news = False

    def __init__(self) -> None:
        self.incoming: list[PeerEvent | Frame] = []
        self.sent: list[Frame] = []

    def poll(self):  # type: ignore[no-untyped-def]
        found, self.incoming = tuple(self.incoming), []
        return found

    def wait(self, timeout_s: float) -> bool:
        return False

    def may_write(self, peer: str) -> bool:
        return True


class AskingPort(Port):
    def send(self, frame: Frame) -> None:
        self.sent.append(through_the_wire(frame))


class AnsweringPort(Port):
    def send(self, peer: str, frame: Frame) -> None:
        self.sent.append(through_the_wire(frame))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRank:
    engine: DecodeEngine
    port: AskingPort
    caches: Caches
    address: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRank:
    engine: PrefillEngine
    port: AnsweringPort
    pools: dict[int, tuple[KVLayer, ...]]
    line: StageLine | None


class System:
    """Both sides of one manifest."""

    def __init__(
        self,
        manifest: Manifest,
        overrides: Overrides,
        *,
        prefill: tuple[int, int],
        decode: int,
        is_draft_split: tuple[bool, bool] = (True, True),
    ) -> None:
        """Build every rank.

        Args:
            prefill: stages and ranks of each.
            decode: ranks.
            is_draft_split: on either side.
        """
        self.manifest = manifest
        self.config: RuntimeConfig = resolve_config(manifest, overrides)
        self.num_stages, self.size = prefill
        self.is_draft_split = is_draft_split
        self.stages = split_stages(manifest, self.num_stages)
        self.layout = Layout(
            stage_layers=tuple(stage.num_layers for stage in self.stages),
            tensor_parallel=self.size,
            is_draft_split=is_draft_split[0],
        )
        self.decode_layout = Layout(
            stage_layers=(NUM_LAYERS,), tensor_parallel=decode, is_draft_split=is_draft_split[1]
        )
        self.transport = MemoryTransport()
        self.sender = EarlySender()
        decoder = manifest.target.decoder
        self.kv_heads = [decoder.num_kv_heads] * NUM_LAYERS
        draft = manifest.draft
        if self.config.proposer in DRAFT_PROPOSERS:
            assert draft is not None
            self.kv_heads += [draft.decoder.num_kv_heads] * draft.decoder.num_layers
        self.decode_exchange = ThreadExchange(decode, timeout_s=60)
        self.last_exchange = ThreadExchange(self.size, timeout_s=60)
        self.first_exchange = ThreadExchange(self.size, timeout_s=60)
        self.agreement = ThreadExchange(self.size, timeout_s=60).ranks()
        self.workers: dict[int, StageWorker] = {}
        self.threads: list[threading.Thread] = []

    def load(self, ranks: Ranks, *, stage=None, is_split: bool = True):  # type: ignore[no-untyped-def]
        return load_models(
            self.manifest,
            Path("/"),
            device=torch.device("cpu"),
            dtype=torch.float32,
            with_draft=self.config.proposer in DRAFT_PROPOSERS
            and (stage is None or stage.has_head),
            ranks=ranks,
            stage=stage,
            is_draft_split=is_split,
        )

    def decode_rank(self, ranks: Ranks) -> DecodeRank:
        models = self.load(ranks, is_split=self.is_draft_split[1])
        caches = make_caches(models, self.config, allocate=self.transport.allocate)
        port = AskingPort()
        engine = build_engine(models, self.config, caches=caches)
        address = self.transport.receive_into(caches.pool.layers).address
        return DecodeRank(
            engine=DecodeEngine(engine, port=port, name="d"),
            port=port,
            caches=caches,
            address=address,
        )

    def prefill_rank(self, ranks: Ranks) -> PrefillRank:
        last = None if self.num_stages == 1 else self.stages[-1]
        models = self.load(ranks, stage=last, is_split=self.is_draft_split[0])
        caches = make_caches(models, self.config)
        line, pools = self.stage_line(models.target, ranks), {ranks.rank: caches.pool.layers}
        engine = build_engine(models, self.config, caches=caches, line=line)
        stages = []
        for stage in self.stages[:-1] if line is not None else ():
            worker = self.workers[ranks.rank]
            while 0 not in worker._pools:  # it makes the pool when it hears of the engine
                threading.Event().wait(0.001)
            rank = side_of("prefill", self.layout).rank(stage.index, ranks.rank)
            pools[rank] = worker._pools[0].kv
            routes = self.routes(rank, pools[rank])
            stages.append(StagePool(first_layer=stage.first_layer, pool=pools[rank], routes=routes))
        port = AnsweringPort()
        parts = PrefillParts(
            proposer=caches.proposer,
            pool=caches.pool.layers,
            num_pool_target_layers=caches.num_target_layers,
            num_target_layers=NUM_LAYERS,
            vocab_size=self.config.target_vocab_size,
            stages=tuple(stages),
        )
        return PrefillRank(
            engine=PrefillEngine(
                engine,
                parts,
                port=port,
                routes=self.routes(ranks.rank, caches.pool.layers),
                sender=self.sender,
                first_proposal="one_hot",
                transfer_s=TIMEOUT_S,
                agreement=RankAgreement(self.agreement[ranks.rank]),
            ),
            port=port,
            pools=pools,
            line=line,
        )

    def routes(self, rank: int, pool: tuple[KVLayer, ...]) -> Routes:
        return Routes(
            self.transport,
            layout=self.layout,
            rank=rank,
            kv_heads=self.kv_heads,
            pool=pool,
            may_write=lambda peer: True,
        )

    def stage_line(self, target, ranks: Ranks) -> StageLine | None:  # type: ignore[no-untyped-def]
        if self.num_stages == 1:
            return None
        control, states = QueueChannel(timeout_s=60), QueueChannel(timeout_s=60)
        line = StageLine(target, controls=[control], upstream=states)

        def serve() -> None:
            models = self.load(self.first_exchange.ranks()[ranks.rank], stage=self.stages[0])
            worker = StageWorker(models.target, control=control, upstream=None, downstream=states)
            self.workers[ranks.rank] = worker
            worker.run()

        self.threads.append(threading.Thread(target=serve))
        self.threads[-1].start()
        while ranks.rank not in self.workers:
            threading.Event().wait(0.001)
        return line

    def serve(self, requests: Sequence[RequestInput]) -> Served:
        """Compute all prompts, then decode all of them."""
        decoding = in_threads(self.decode_exchange.ranks(), self.decode_rank, self.decode_exchange)
        for rank in decoding:
            for item in requests:
                rank.engine.add_request(item)
            rank.engine.step()
        asked = decoding[0].port.sent
        assert all(rank.port.sent == asked for rank in decoding)
        prefilling = in_threads(self.last_exchange.ranks(), self.prefill_rank, self.last_exchange)
        hello = Hello(
            protocol=1,
            role="decode",
            facts={},
            layout=self.decode_layout,
            transport=self.transport.name,
        )
        offer = Offer(addresses=[rank.address for rank in decoding])
        for rank in prefilling:
            rank.port.incoming = [
                Arrived(peer=DECODE, theirs=hello, offer=offer),
                *(Said(peer=DECODE, frame=frame) for frame in asked),
            ]

        def compute(ranks: Ranks) -> None:
            mine = prefilling[ranks.rank].engine
            mine.step()
            while mine.has_work:
                mine.step()
            stats = mine.stats()
            assert stats.num_free_kv_blocks == stats.num_kv_blocks
            mine.engine.check()

        try:
            in_threads(self.last_exchange.ranks(), compute, self.last_exchange)
        finally:
            for rank in prefilling:
                if rank.line is not None:
                    rank.line.stop()
            for thread in self.threads:
                thread.join(TIMEOUT_S)
            self.sender.close()
        return Served(system=self, decoding=decoding, prefilling=prefilling, asked=asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Every prompt is computed and its KV has moved."""

    system: System
    decoding: list[DecodeRank]
    prefilling: list[PrefillRank]
    asked: list[Frame]

    def answers(self) -> tuple[dict[str, tuple[int, ...]], int]:
        """Decode; return ids and how many drafts were accepted."""
        frames = self.merged()

        def decode(ranks: Ranks) -> tuple[dict[str, tuple[int, ...]], int]:
            mine = self.decoding[ranks.rank]
            mine.port.incoming = list(frames)
            ids: dict[str, list[int]] = {}
            accepted = 0
            while mine.engine.has_work:
                for delta in mine.engine.step():
                    assert delta.error is None, delta.error
                    ids.setdefault(delta.request_id, []).extend(delta.ids_target)
                    if delta.finish_reason is not None:
                        accepted += delta.usage.num_accepted_drafts
            mine.engine.engine.check()
            return {name: tuple(found) for name, found in ids.items()}, accepted

        exchange = self.system.decode_exchange
        first, *others = in_threads(exchange.ranks(), decode, exchange)
        assert all(other == first for other in others)
        return first

    def merged(self) -> list[Frame]:
        """Return the answers that all prefill ranks gave alike, but for the bytes each sent."""
        found = []
        for answers in zip(*(rank.port.sent for rank in self.prefilling), strict=True):
            first = answers[0]
            assert isinstance(first, Prefilled), first
            for other in answers[1:]:
                assert isinstance(other, Prefilled)
                assert other.committed_target == first.committed_target
                assert other.state == first.state
            found.append(first)
        return found

    def num_kv_bytes(self) -> int:
        return sum(
            frame.num_kv_bytes
            for rank in self.prefilling
            for frame in rank.port.sent
            if isinstance(frame, Prefilled)
        )


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
