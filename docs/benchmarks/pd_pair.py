"""Both roles of one manifest in one process, joined by queues; or one of them, as a process.

What `pipeline.py` measures hand-offs with: marks on the device's stream where the last kernel of a
prefill ends and where the first decode round starts.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from runtime.config import Overrides
from runtime.disagg.carriers import make_transport
from runtime.disagg.early import EarlySender
from runtime.disagg.frames import Frame, Offer, keep_tensor
from runtime.disagg.handshake import PROTOCOL_VERSION, Hello, Layout
from runtime.disagg.listen import Arrived, PeerEvent, Said
from runtime.disagg.memory import MemoryTransport
from runtime.disagg.outbox import pool_block_bytes
from runtime.disagg.routes import Routes
from runtime.engine.caches import Caches
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.llm import LLM
from runtime.engine.prefill_jobs import PrefillParts
from runtime.engine.prefill_role import PrefillEngine
from runtime.graphs.prefill import PrefillShape
from runtime.graphs.state import RoundShape
from runtime.loading.weight_samples import weights_digest
from runtime.server.role_settings import RoleOptions
from runtime.server.roles import PrefillRole, role_plan
from runtime.spec.types import Observation, Proposal, RequestView


class Mark:
    """A place in a device's stream; on a CPU, whose work ends with its call, a time."""

    def __init__(self, device: torch.device) -> None:
        """Mark the current stream."""
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        self.host_s = time.perf_counter()

    def us_until(self, later: Mark) -> float:
        """Return the microseconds between two marks that the device has reached."""
        if self._event is None or later._event is None:
            return (later.host_s - self.host_s) * 1e6
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) * 1e3

    def at_s(self, base: Mark) -> float:
        """Return when the device got here on the host's clock; `base` marked an idle device."""
        return base.host_s + base.us_until(self) / 1e6


@dataclass(kw_only=True, slots=True)
class Marks:
    """The newest marks of one engine."""

    device: torch.device
    base: Mark | None = None
    prefilled: Mark | None = None
    decoding: Mark | None = None

    def reset(self) -> None:
        """Begin anew on an idle device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.base, self.prefilled, self.decoding = Mark(self.device), None, None

    def gap_us(self) -> float:
        """Return the microseconds from the end of the prefill to the start of decoding."""
        return _reached(self.prefilled).us_until(_reached(self.decoding))

    def prefilled_at_s(self) -> float:
        """Return when the prefill ended, on the host's clock."""
        return _reached(self.prefilled).at_s(_reached(self.base))

    def decoding_at_s(self) -> float:
        """Return when decoding started, on the host's clock."""
        return _reached(self.decoding).at_s(_reached(self.base))

    def watch(self, llm: LLM) -> None:
        """Mark what an engine launches: the last thing of a prefill, the first of a decode."""
        proposer = caches_of(llm).proposer
        observe, propose = proposer.observe, proposer.propose

        def observed(observation: Observation) -> None:
            observe(observation)
            self.end_prefill()

        def proposed(views: Sequence[RequestView]) -> Proposal:
            if any(view.num_drafts for view in views):
                self.start()
            return propose(views)

        # An engine has no hook for this, and no other use for one.
        proposer.observe, proposer.propose = observed, proposed  # type: ignore[method-assign]
        pipeline = llm.own_engine._pipeline
        if pipeline is not None:
            runner = pipeline._runner
            launch = runner.launch

            def launched(shape: RoundShape, buffer: int) -> None:
                self.start()
                launch(shape, buffer)

            launch_prefill = runner.launch_prefill

            def launched_prefill(shape: PrefillShape) -> None:
                launch_prefill(shape)
                self.end_prefill()

            runner.launch = launched  # type: ignore[method-assign]
            runner.launch_prefill = launched_prefill  # type: ignore[method-assign]

    def end_prefill(self) -> None:
        """Mark the end of a prefill, eager or captured, before decoding starts."""
        if self.decoding is None:
            self.prefilled = Mark(self.device)

    def start(self) -> None:
        """Mark the start of decoding, once."""
        if self.decoding is None:
            self.decoding = Mark(self.device)


def caches_of(llm: LLM) -> Caches:
    """Return the caches of an engine that runs in this process."""
    if llm.caches is None:
        raise SystemExit("the engine's caches are in other processes")
    return llm.caches


def _reached(mark: Mark | None) -> Mark:
    if mark is None:
        raise SystemExit("a request ended without a prefill or without a decode round")
    return mark


@dataclass(kw_only=True, slots=True)
class _Queues:
    to_prefill: deque[PeerEvent] = field(default_factory=deque)
    to_decode: deque[Frame] = field(default_factory=deque)


class _DecodeEnd:
    def __init__(self, queues: _Queues) -> None:
        self._queues = queues

    @property
    def has_news(self) -> bool:
        return bool(self._queues.to_decode)

    def send(self, frame: Frame) -> None:
        self._queues.to_prefill.append(Said(peer="decode", frame=frame))

    def poll(self) -> tuple[Frame, ...]:
        frames = tuple(self._queues.to_decode)
        self._queues.to_decode.clear()
        return frames

    def wait(self, timeout_s: float) -> bool:
        return self.has_news


class _PrefillEnd:
    def __init__(self, queues: _Queues) -> None:
        self._queues = queues

    @property
    def has_news(self) -> bool:
        return bool(self._queues.to_prefill)

    def send(self, peer: str, frame: Frame) -> None:
        self._queues.to_decode.append(frame)

    def poll(self) -> tuple[PeerEvent, ...]:
        events = tuple(self._queues.to_prefill)
        self._queues.to_prefill.clear()
        return events

    def may_write(self, peer: str) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return self.has_news


def join(prefill: LLM, decode: LLM) -> tuple[PrefillEngine, DecodeEngine]:
    """Return both roles over two LLMs of one process; KV is copied from pool to pool."""
    transport, queues = MemoryTransport(), _Queues()
    end, caches = _PrefillEnd(queues), caches_of(prefill)
    decode_layers = caches_of(decode).pool.layers
    layout = Layout(stage_layers=(caches.num_target_layers,), tensor_parallel=1)
    sender = PrefillEngine(
        prefill.own_engine,
        PrefillParts(
            proposer=caches.proposer,
            pool=caches.pool.layers,
            num_pool_target_layers=caches.num_target_layers,
            num_target_layers=caches.num_target_layers,
            target_vocab_size=prefill.config.target_vocab_size,
        ),
        port=end,
        routes=Routes(
            transport,
            layout=layout,
            rank=0,
            kv_heads=[layer.k.shape[1] for layer in caches.pool.layers],
            pool=caches.pool.layers,
            may_write=end.may_write,
        ),
        sender=EarlySender(prefill.config.device),
        first_proposal="one_hot",
        transfer_s=30.0,
        pack=keep_tensor,
    )
    receiver = transport.receive_into(decode_layers)
    hello = Hello(
        protocol=PROTOCOL_VERSION, role="decode", facts={}, layout=layout, transport=transport.name
    )
    offer = Offer(addresses=[receiver.address])
    queues.to_prefill.append(Arrived(peer="decode", theirs=hello, offer=offer))
    return sender, DecodeEngine(
        decode.own_engine,
        port=_DecodeEnd(queues),
        name="decode",
        block_bytes=pool_block_bytes(decode_layers),
    )


OVER = "over"
"""What a prefill process prints once it knows that decode servers will leave."""


def serve_prefill(path: Path, overrides: Overrides) -> None:
    """Serve prefills until standard input ends and decode servers have left.

    Print the address, then when each prefill ended, then `OVER`.
    """
    transport = make_transport("shared", host="127.0.0.1")
    llm = LLM.from_manifest(path, overrides, needs_tokenizer=False)
    options = RoleOptions(role="prefill", listen="127.0.0.1:0")
    plan = role_plan(options, weights=weights_digest(llm.manifest, path.parent))
    role = PrefillRole(llm, plan, options, transport)
    marks = Marks(device=llm.config.device)
    marks.watch(llm)
    news, is_over = threading.Event(), threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        is_over.set()
        news.set()

    def is_news(record: logging.LogRecord) -> bool:
        return not (is_over.is_set() and "SD861" in record.getMessage())

    logging.getLogger(PrefillRole.__module__).addFilter(is_news)
    threading.Thread(target=wait_for_end, daemon=True).start()
    role.start(news.set)
    print(role.peers.address, flush=True)
    while not is_over.is_set():
        marks.reset()
        news.wait()
        news.clear()
        while role.engine.has_work and not is_over.is_set():
            role.engine.step()
        if marks.prefilled is not None:
            print(marks.prefilled_at_s(), flush=True)
    print(OVER, flush=True)
    see_off(role, limit_s=30.0)
    role.close()
    llm.close()


def see_off(role: PrefillRole, *, limit_s: float) -> None:
    """Wait until decode servers have left, and let go of their pools: these end with them."""
    limit = time.monotonic() + limit_s
    while role.states() or role.engine.has_work:
        if time.monotonic() > limit:
            raise SystemExit(f"decode servers have not left: {role.states()}")
        if role.engine.has_work:
            role.engine.step()
        else:
            role.peers.wait(0.01)
    role.peers.wait(0.1)  # a line is gone a moment before the engine can know
    role.engine.step()
