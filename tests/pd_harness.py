"""A prefill and a decode engine in one thread, joined by queues; frames travel as bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from runtime.config import DRAFT_PROPOSERS, Overrides, RuntimeConfig, resolve_config
from runtime.disagg.early import EarlySender
from runtime.disagg.frames import Frame, Offer, Prefill, keep_tensor, pack_tensor
from runtime.disagg.handshake import FirstProposal, Hello, Layout
from runtime.disagg.listen import Arrived, PeerEvent, Said
from runtime.disagg.memory import MemoryTransport
from runtime.disagg.outbox import pool_block_bytes
from runtime.disagg.routes import Routes
from runtime.disagg.transport import Transport
from runtime.engine.build import build_engine
from runtime.engine.caches import Caches, make_caches
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.engine import Engine
from runtime.engine.prefill_jobs import PrefillParts
from runtime.engine.prefill_role import PrefillEngine
from runtime.engine.request import RequestDelta, RequestInput
from runtime.graphs.marks import Ready, mark
from runtime.spec.oracle import OracleScript
from runtime.spec.types import Proposer
from tests.engine_harness import KV_BLOCK_SIZE, Answer, World, join_deltas, reference_ids
from tests.fake_graph import FakeGraph

DECODE = "decode"
TIMEOUT_S = 60.0


def through_the_wire(frame: Frame) -> Frame:
    """Return the frame as the other side reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame)


class Wire:
    """Both ports; `to_decode` and `to_prefill` may be held up or changed by a test."""

    def __init__(self) -> None:
        self.to_prefill: deque[PeerEvent] = deque()
        self.to_decode: deque[Frame] = deque()
        self.asked: list[Prefill] = []
        self.answered: list[Frame] = []
        self.is_writable = True
        self.is_local = False  # frames travel as they are
        self.change: Callable[[Frame], Frame] = lambda frame: frame
        self.others: dict[str, Wire] = {}  # further decode servers by name


class DecodeEnd:
    """The decode engine's port."""

    def __init__(self, wire: Wire, peer: str = DECODE) -> None:
        self._wire = wire
        self._peer = peer

    @property
    def has_news(self) -> bool:
        return bool(self._wire.to_decode)

    def send(self, frame: Frame) -> None:
        frame = through_the_wire(frame)
        if isinstance(frame, Prefill):
            self._wire.asked.append(frame)
        self._wire.to_prefill.append(Said(peer=self._peer, frame=frame))

    def poll(self) -> tuple[Frame, ...]:
        frames = tuple(self._wire.to_decode)
        self._wire.to_decode.clear()
        return frames

    def wait(self, timeout_s: float) -> bool:
        return self.has_news


class PrefillEnd:
    """The prefill engine's port."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @property
    def has_news(self) -> bool:
        return bool(self._wire.to_prefill)

    def send(self, peer: str, frame: Frame) -> None:
        wire = self._wire if peer == DECODE else self._wire.others[peer]
        frame = wire.change(frame if wire.is_local else through_the_wire(frame))
        wire.answered.append(frame)
        wire.to_decode.append(frame)

    def poll(self) -> tuple[PeerEvent, ...]:
        events = tuple(self._wire.to_prefill)
        self._wire.to_prefill.clear()
        return events

    def may_write(self, peer: str) -> bool:
        return self._wire.others.get(peer, self._wire).is_writable

    def wait(self, timeout_s: float) -> bool:
        return self.has_news


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Both roles with their parts in reach."""

    prefill: PrefillEngine
    decode: DecodeEngine
    wire: Wire
    caches: dict[str, Caches]
    config: RuntimeConfig
    sender: EarlySender
    graphs: list[FakeGraph]

    def close(self) -> None:
        self.sender.close()

    def is_idle(self) -> bool:
        return not (self.prefill.has_work or self.decode.has_work)

    def check(self) -> None:
        self.prefill.engine.check()
        self.decode.engine.check()

    def assert_nothing_is_held(self) -> None:
        for engine in (self.prefill.engine, self.decode.engine):
            stats = engine.stats()
            assert stats.num_free_kv_blocks == stats.num_kv_blocks
            assert not engine.handover.is_holding
            engine.check()

    def run(
        self, requests: Sequence[RequestInput], *, arrivals: Mapping[int, int] | None = None
    ) -> dict[str, Answer]:
        """Run requests to their ends."""
        waiting = sorted(range(len(requests)), key=lambda i: (arrivals or {}).get(i, 0))
        deltas: dict[str, list[RequestDelta]] = {item.request_id: [] for item in requests}
        step = 0
        while waiting or not self.is_idle():
            while waiting and (arrivals or {}).get(waiting[0], 0) <= step:
                self.decode.add_request(requests[waiting.pop(0)])
            self.prefill.step()
            for delta in self.decode.step():
                deltas[delta.request_id].append(delta)
            self.check()
            step += 1
            assert step < 20_000, "the pair makes no progress"
        return {name: join_deltas(parts) for name, parts in deltas.items()}


def config_of(world: World, **overrides: Any) -> RuntimeConfig:
    """Return small settings."""
    given = Overrides(
        device=str(world.models.target.device),
        kv_block_size=KV_BLOCK_SIZE,
        max_num_requests=4,
        max_model_len=128,
        graphs="off",
    )
    return resolve_config(world.manifest, replace(given, **overrides))


def engine_of(
    world: World,
    config: RuntimeConfig,
    *,
    script: OracleScript | None = None,
    graphs: list[FakeGraph] | None = None,
    wrap: Callable[[Proposer], Proposer] | None = None,
    transport: Transport | None = None,
) -> tuple[Engine, Caches]:
    """Return an engine over the world's models; `wrap` may replace its proposer."""
    draft = world.models.draft if config.proposer in DRAFT_PROPOSERS else None
    models = replace(world.models, draft=draft)
    caches = make_caches(
        models, config, script=script, allocate=None if transport is None else transport.allocate
    )
    if wrap is not None:
        caches = replace(caches, proposer=wrap(caches.proposer))

    def make_fake(round_: Any, config: RuntimeConfig) -> FakeGraph:
        assert graphs is not None
        graphs.append(FakeGraph(round_, config))
        return graphs[-1]

    engine = build_engine(
        models,
        config,
        tokenizer=world.tokenizer,
        script=script,
        make_runner=None if graphs is None else make_fake,
        caches=caches,
    )
    return engine, caches


def make_pair(
    world: World,
    *,
    transport: Transport | None = None,
    first_proposal: FirstProposal = "one_hot",
    script: OracleScript | None = None,
    prefill_overrides: Mapping[str, Any] | None = None,
    decode_overrides: Mapping[str, Any] | None = None,
    with_graphs: bool = False,
    mark_end: Callable[[torch.device], Ready] = mark,
    wrap: Callable[[Proposer], Proposer] | None = None,
    is_local: bool = False,
    **overrides: Any,
) -> Pair:
    """Return both roles over one pair of models, each with a pool of its own.

    Args:
        with_graphs: rounds of the decode side run on the "device".
        mark_end: of the prefill side.
        wrap: replaces the prefill side's proposer.
        is_local: state travels as tensors.
    """
    transport = transport or MemoryTransport()
    wire = Wire()
    wire.is_local = is_local
    graphs: list[FakeGraph] = []
    config = config_of(
        world,
        **(overrides | {"graphs": "auto" if with_graphs else "off"} | dict(decode_overrides or {})),
    )
    there = config_of(world, **(overrides | dict(prefill_overrides or {})))
    prefill, sent_from = engine_of(world, there, script=script, wrap=wrap)
    decode, received = engine_of(
        world,
        config,
        script=script,
        graphs=graphs if with_graphs else None,
        transport=transport,
    )
    layout = Layout(stage_layers=(sent_from.num_target_layers,), tensor_parallel=1)
    end = PrefillEnd(wire)
    sender = EarlySender(world.models.target.device)
    heads = [layer.k.shape[1] for layer in sent_from.pool.layers]
    engine = PrefillEngine(
        prefill,
        PrefillParts(
            proposer=sent_from.proposer,
            pool=sent_from.pool.layers,
            num_pool_target_layers=sent_from.num_target_layers,
            num_target_layers=sent_from.num_target_layers,
            target_vocab_size=world.models.target.facts.vocab_size,
        ),
        port=end,
        routes=Routes(
            transport,
            layout=layout,
            rank=0,
            kv_heads=heads,
            pool=sent_from.pool.layers,
            may_write=end.may_write,
        ),
        sender=sender,
        first_proposal=first_proposal,
        transfer_s=TIMEOUT_S,
        mark_end=mark_end,
        pack=keep_tensor if is_local else pack_tensor,
    )
    receiver = transport.receive_into(received.pool.layers)
    hello = Hello(protocol=1, role="decode", facts={}, layout=layout, transport=transport.name)
    offer = Offer(addresses=[receiver.address])
    wire.to_prefill.append(Arrived(peer=DECODE, theirs=hello, offer=offer))
    return Pair(
        prefill=engine,
        decode=DecodeEngine(
            decode,
            port=DecodeEnd(wire),
            name="d0",
            block_bytes=pool_block_bytes(received.pool.layers),
        ),
        wire=wire,
        caches={"prefill": sent_from, "decode": received},
        config=config,
        sender=sender,
        graphs=graphs,
    )


def request_for(name: str, prompt: Sequence[int], **fields: Any) -> RequestInput:
    given: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True} | fields
    return RequestInput(request_id=name, prompt_ids_target=tuple(prompt), **given)


def assert_right(world: World, pair: Pair, requests: Sequence[RequestInput]) -> None:
    """Run requests and compare their ids with those of the target alone."""
    answers = pair.run(requests)
    for item in requests:
        assert answers[item.request_id].ids_target == reference_ids(world, item), item.request_id


def pump(pair: Pair, *, steps: int = 1) -> list[RequestDelta]:
    deltas: list[RequestDelta] = []
    for _ in range(steps):
        pair.prefill.step()
        deltas += pair.decode.step()
        pair.check()
    return deltas


def finish(pair: Pair) -> list[RequestDelta]:
    deltas: list[RequestDelta] = []
    for _ in range(20_000):
        if pair.is_idle():
            return deltas
        deltas += pump(pair)
    raise AssertionError("the pair makes no progress")


def second_decode(
    world: World, pair: Pair, transport: Transport, name: str = "d1"
) -> tuple[DecodeEngine, Wire]:
    """Return another decode server of a pair's prefill server."""
    engine, caches = engine_of(world, pair.config, transport=transport)
    wire = Wire()
    wire.to_prefill = pair.wire.to_prefill
    pair.wire.others[name] = wire
    layout = Layout(stage_layers=(caches.num_target_layers,), tensor_parallel=1)
    hello = Hello(protocol=1, role="decode", facts={}, layout=layout, transport=transport.name)
    offer = Offer(addresses=[transport.receive_into(caches.pool.layers).address])
    wire.to_prefill.append(Arrived(peer=name, theirs=hello, offer=offer))
    block_bytes = pool_block_bytes(caches.pool.layers)
    end = DecodeEnd(wire, name)
    return DecodeEngine(engine, port=end, name=name, block_bytes=block_bytes), wire
