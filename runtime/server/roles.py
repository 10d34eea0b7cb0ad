"""A prefill or decode server: engine, connections and carrier joined for one role."""

from __future__ import annotations

import logging
import platform
import uuid
from collections.abc import Callable

import torch

from runtime.config import Overrides
from runtime.disagg.carriers import make_transport
from runtime.disagg.early import EarlySender
from runtime.disagg.frames import Offer
from runtime.disagg.handshake import PROTOCOL_VERSION, Hello, Layout, shared_facts
from runtime.disagg.listen import DecodePeers, listen_at
from runtime.disagg.peers import PrefillPeers, parse_address
from runtime.disagg.routes import Routes
from runtime.disagg.transport import Receiver, Transport
from runtime.engine.caches import Caches
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.llm import LLM
from runtime.engine.prefill_role import PrefillEngine, PrefillParts
from runtime.kernels.gemm_table import gemm_table_digest
from runtime.server.role_metrics import DecodeCollector, PrefillCollector
from runtime.server.role_settings import RoleOptions
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

logger = logging.getLogger(__name__)


class PrefillRole:
    """Computes prompts for the decode servers that connect."""

    name = "prefill"

    def __init__(self, llm: LLM, options: RoleOptions, transport: Transport) -> None:
        """Listen; see `start`.

        Raises:
            DiagnosticError: SD835, SD865.
        """
        assert options.listen is not None, "the command line asks for it"
        caches = _caches(llm)
        self.peers = DecodePeers(
            listen_at(*parse_address(options.listen, "--listen")),
            hello=hello_of(llm, options),
            limits=options.limits,
            on_state=_log_state("decode"),
        )
        self._sender = EarlySender(llm.config.device)
        self.engine = PrefillEngine(
            llm.local_engine,
            PrefillParts(
                proposer=caches.proposer,
                pool=caches.pool.layers,
                num_pool_target_layers=caches.num_target_layers,
                num_target_layers=caches.num_target_layers,
                vocab_size=llm.config.target_vocab_size,
            ),
            port=self.peers,
            routes=Routes(
                transport,
                layout=_layout(caches),
                rank=0,
                kv_heads=[layer.k.shape[1] for layer in caches.pool.layers],
                pool=caches.pool.layers,
                may_write=self.peers.may_write,
            ),
            sender=self._sender,
            first_proposal=options.first_proposal,
            transfer_s=options.transfer_timeout_s,
        )

    def start(self, wake: Callable[[], None]) -> None:
        """Accept decode servers; see `Role.start`."""
        self.peers.start(wake)

    def close(self) -> None:
        """End the writes, then the lines: a line that ended means that nothing is written."""
        self._sender.close()
        self.peers.close()

    def described(self) -> str:
        """Return where decode servers find this one."""
        return f"listening on {self.peers.address}"

    def states(self) -> dict[str, str]:
        """Return the decode servers that are connected."""
        return self.peers.states()

    def problem(self) -> str | None:
        """Return None: without decode servers there is no work, and no problem."""
        return None

    def collector(self) -> PrefillCollector:
        """Return what makes the role's metrics."""
        return PrefillCollector(self.peers, self.engine.engine.handover)


class DecodeRole:
    """Answers clients from prompts that prefill servers compute."""

    name = "decode"

    def __init__(self, llm: LLM, options: RoleOptions, transport: Transport) -> None:
        """Offer the pool; see `start`.

        Raises:
            DiagnosticError: SD863, SD865.
        """
        for peer in options.peers:
            parse_address(peer, "--peer")
        self._receiver: Receiver = transport.receive_into(_caches(llm).pool.layers)
        self.peers = PrefillPeers(
            options.peers,
            hello=hello_of(llm, options),
            offer=Offer(addresses=[self._receiver.address]),
            limits=options.limits,
            on_state=_log_state("prefill"),
        )
        self.engine = DecodeEngine(llm.local_engine, port=self.peers, name=uuid.uuid4().hex)

    def start(self, wake: Callable[[], None]) -> None:
        """Dial the prefill servers; see `Role.start`."""
        self.peers.start(wake)

    def close(self) -> None:
        """End the lines, then take the pool back."""
        self.peers.close()
        self._receiver.close()

    def described(self) -> str:
        """Return which prefill servers this one asks."""
        return f"prefill servers {', '.join(self.peers.states())}"

    def states(self) -> dict[str, str]:
        """Return the state of each prefill server."""
        return self.peers.states()

    def problem(self) -> str | None:
        """Return why no prompt can be computed now."""
        states = self.states()
        if "ready" in states.values():
            return None
        return "no prefill server is ready: " + "; ".join(f"{k}: {v}" for k, v in states.items())

    def collector(self) -> DecodeCollector:
        """Return what makes the role's metrics."""
        return DecodeCollector(self.peers, self.engine.engine.handover)


def make_role(llm: LLM, options: RoleOptions, transport: Transport) -> PrefillRole | DecodeRole:
    """Join an engine whose pool `transport` allocated to the connections of a role."""
    return (PrefillRole if options.role == "prefill" else DecodeRole)(llm, options, transport)


def transport_of(options: RoleOptions, overrides: Overrides) -> Transport:
    """Start what carries KV.

    Raises:
        DiagnosticError: SD863; SD869, the server would be spread over several ranks.
    """
    num_ranks = (overrides.pipeline_parallel or 1) * (overrides.tensor_parallel or 1)
    if num_ranks > 1:
        raise DiagnosticError(
            diagnose(
                "SD869",
                where="--role",
                message=f"a {options.role} server runs in one process",
                expected="one stage of one rank",
                found=f"{num_ranks} ranks",
            )
        )
    return make_transport(options.transport, host=options.transport_host)


def hello_of(llm: LLM, options: RoleOptions) -> Hello:
    """Return what a server says of itself."""
    config, caches = llm.config, _caches(llm)
    is_cuda = config.device.type == "cuda"
    kernels = {
        "architecture": _gpu(config.device) if is_cuda else _cpu(),
        "torch": str(torch.__version__),
    }
    if is_cuda:
        kernels["gemm_table"] = gemm_table_digest()
    return Hello(
        protocol=PROTOCOL_VERSION,
        role=options.role,
        facts=shared_facts(
            llm.manifest,
            dtype=str(config.dtype).removeprefix("torch."),
            kv_block_size=config.kv_block_size,
            kv_heads=tuple(layer.k.shape[1] for layer in caches.pool.layers),
            proposer=config.proposer,
            num_speculative_tokens=config.num_speculative_tokens,
            verification=config.verification,
            first_proposal=options.first_proposal,
            slot_state=tuple(map(str, llm.local_engine.slot_state)),
            kernels=kernels,
        )
        | {"peer_silence_s": f"{options.limits.silence_s:g}"},  # fences count on the other's
        layout=_layout(caches),
        transport=options.transport,
    )


def _caches(llm: LLM) -> Caches:
    assert llm.caches is not None, "an LLM from a manifest has them"
    return llm.caches


def _layout(caches: Caches) -> Layout:
    return Layout(stage_layers=(caches.num_target_layers,), tensor_parallel=1)


def _log_state(kind: str) -> Callable[[str, Diagnostic | None], None]:
    def log(peer: str, problem: Diagnostic | None) -> None:
        if problem is None:
            logger.info("%s server %s is connected", kind, peer)
            return
        text = "\n  ".join((problem.oneline(), *problem.notes))
        logger.warning("%s server %s: %s", kind, peer, text)

    return log


def _gpu(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _cpu() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
