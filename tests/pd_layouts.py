"""Prefill and decode sides of any layout in one process: every rank is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from runtime.config import DRAFT_PROPOSERS, Overrides, RuntimeConfig, resolve_config
from runtime.disagg.agreement import RankAgreement
from runtime.disagg.early import EarlySender
from runtime.disagg.frames import Frame, Offer, Prefilled
from runtime.disagg.handshake import Hello, Layout
from runtime.disagg.listen import Arrived, Said
from runtime.disagg.memory import MemoryTransport
from runtime.disagg.outbox import Route, pool_block_bytes
from runtime.disagg.remote import OpenWay, StageOutlet, StageSender
from runtime.disagg.routes import Routes, side_of
from runtime.engine.build import build_engine
from runtime.engine.caches import Caches, make_caches
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.prefill_jobs import PrefillParts
from runtime.engine.prefill_role import PrefillEngine
from runtime.engine.request import RequestInput
from runtime.engine.stages import StageLine, StageWorker
from runtime.graphs.marks import mark
from runtime.kv import KVLayer
from runtime.loading import load_models
from runtime.parallel.ranks import Ranks, ThreadExchange
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import split_stages
from tests.pd_harness import DECODE, TIMEOUT_S
from tests.pd_ports import AnsweringPort, AskingPort, Notes
from tests.queue_channel import QueueChannel
from tests.slow_pool import SlowPool

T = TypeVar("T")
NUM_LAYERS = 4


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


class SettledChannel(QueueChannel):
    """Control of a stage with slow kernels: what a forward reads of the one before is there."""

    def __init__(self, slow: SlowPool) -> None:
        super().__init__()
        self._slow = slow

    def receive(self) -> tuple[torch.Tensor, ...]:
        found = super().receive()
        self._slow.settle()
        return found


class StageEnd:
    """The KV side of a first stage that is a thread."""

    def __init__(self, system: System, rank: int) -> None:
        self._system = system
        self._rank = rank

    def allocate(self, *what: Any) -> torch.Tensor:
        return self._system.transport.allocate(*what)

    def open(self, layers: tuple[KVLayer, ...], kv_block_size: int) -> StageSender:
        def routes(order: OpenWay) -> Route:
            assert order.kv_heads == tuple(self._system.kv_heads)
            return self._system.routes(self._rank, layers)(order.arrived)

        if self._system.slow is not None:
            self._system.slow.watch(layers)
        return StageSender(
            pool=layers,
            layers=range(len(layers)),
            routes=routes,
            sender=self._system.sender,
            rank=self._rank,
            board=self._system.board,
            device=torch.device("cpu"),
            mark_end=mark if self._system.slow is None else self._system.slow.mark,
        )


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
        slow: SlowPool | None = None,
    ) -> None:
        """Build every rank.

        Args:
            prefill: stages and ranks of each.
            decode: ranks.
            is_draft_split: on either side.
            slow: makes the kernels of the first stage slow, which is one rank.
        """
        self.slow = slow
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
        if slow is not None:
            slow.sender = self.sender
        self.board = Notes()
        self.muted: set[int] = set()  # world ranks of the prefill side that may not write
        decoder = manifest.target.decoder
        self.kv_heads = [decoder.num_kv_heads] * NUM_LAYERS
        draft = manifest.draft
        if self.config.proposer in DRAFT_PROPOSERS:
            assert draft is not None
            self.kv_heads += [draft.decoder.num_kv_heads] * draft.decoder.num_layers
        self.decode_exchange = ThreadExchange(decode, timeout_s=180)
        self.last_exchange = ThreadExchange(self.size, timeout_s=180)
        self.first_exchange = ThreadExchange(self.size, timeout_s=180)
        self.agreement = ThreadExchange(self.size, timeout_s=180).ranks()
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
        block_bytes = [ranks.size * size for size in pool_block_bytes(caches.pool.layers)]
        return DecodeRank(
            engine=DecodeEngine(engine, port=port, name="d", block_bytes=block_bytes),
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
        outlet = None
        if line is not None:
            worker = self.workers[ranks.rank]
            while 0 not in worker._pools:  # it makes the pool when it hears of the engine
                threading.Event().wait(0.001)
            rank = self.rank_before(ranks)
            pools[rank] = worker._pools[0].kv
            outlet = StageOutlet(
                tell=line.order,
                take=self.board.take,
                stage_ranks=[rank],
                kv_block_size=self.config.kv_block_size,
                kv_heads=self.kv_heads,
            )
        port = AnsweringPort()
        parts = PrefillParts(
            proposer=caches.proposer,
            pool=caches.pool.layers,
            num_pool_target_layers=caches.num_target_layers,
            num_target_layers=NUM_LAYERS,
            target_vocab_size=self.config.target_vocab_size,
            stages=outlet,
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

    def rank_before(self, ranks: Ranks) -> int:
        """Return the world rank of the first stage in the column of a rank of the last one."""
        return side_of("prefill", self.layout).rank(0, ranks.rank)

    def routes(self, rank: int, pool: tuple[KVLayer, ...]) -> Routes:
        return Routes(
            self.transport,
            layout=self.layout,
            rank=rank,
            kv_heads=self.kv_heads,
            pool=pool,
            may_write=lambda peer: rank not in self.muted,
        )

    def stage_line(self, target, ranks: Ranks) -> StageLine | None:  # type: ignore[no-untyped-def]
        if self.num_stages == 1:
            return None
        control = QueueChannel(timeout_s=180) if self.slow is None else SettledChannel(self.slow)
        states = QueueChannel(timeout_s=180)
        line = StageLine(target, controls=[control], upstream=states)

        def serve() -> None:
            models = self.load(self.first_exchange.ranks()[ranks.rank], stage=self.stages[0])
            kv = StageEnd(self, self.rank_before(ranks))
            worker = StageWorker(
                models.target, control=control, upstream=None, downstream=states, kv=kv
            )
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
        """Return the answers that all prefill ranks gave alike."""
        found = []
        for answers in zip(*(rank.port.sent for rank in self.prefilling), strict=True):
            first = answers[0]
            assert isinstance(first, Prefilled), first
            for other in answers[1:]:
                assert isinstance(other, Prefilled)
                assert other.num_kv_bytes == first.num_kv_bytes
                assert other.committed_target == first.committed_target
                assert other.state == first.state
                assert other.draft_ids_target == first.draft_ids_target
            found.append(first)
        return found

    def num_kv_bytes(self) -> int:
        return sum(
            frame.num_kv_bytes
            for frame in self.prefilling[0].port.sent
            if isinstance(frame, Prefilled)
        )
