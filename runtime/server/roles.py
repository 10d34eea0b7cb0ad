"""A prefill or decode server: engine, connections and carrier joined for one role."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import replace

from runtime.config import Overrides
from runtime.disagg.carriers import make_transport
from runtime.disagg.dialer import parse_address
from runtime.disagg.early import EarlySender
from runtime.disagg.frames import Offer
from runtime.disagg.handshake import Layout
from runtime.disagg.listen import DecodePeers, listen_at
from runtime.disagg.peers import PrefillPeers
from runtime.disagg.role_plan import RolePlan
from runtime.disagg.transport import Receiver, Transport
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.llm import LLM
from runtime.engine.lockstep import LockstepLeader
from runtime.engine.peers import plan_of
from runtime.engine.prefill_role import PrefillEngine
from runtime.engine.role_rank import RoleRank, ToldDecodePort, ToldPrefillPort
from runtime.engine.role_site import RoleSite
from runtime.engine.until_lost import UntilLost
from runtime.server.role_metrics import DecodeCollector, PrefillCollector
from runtime.server.role_settings import RoleOptions
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest

logger = logging.getLogger(__name__)


class PrefillRole:
    """Computes prompts for the decode servers that connect."""

    name = "prefill"

    def __init__(
        self, llm: LLM, plan: RolePlan, options: RoleOptions, transport: Transport
    ) -> None:
        """Listen; see `start`.

        Raises:
            DiagnosticError: SD835, SD865; SD871 and what other ranks of this server have met.
        """
        assert options.listen is not None, "the command line asks for it"
        site = _site(llm, plan, transport)
        self.serves = site.serves
        self.peers = DecodePeers(
            listen_at(*parse_address(options.listen, "--listen")),
            hello=site.hello(ranks=tuple(card.listen for card in site.cards())),
            limits=options.limits,
            on_state=_log_state("decode"),
            on_left=lambda peer: logger.info("decode server %s has ended", peer),
        )
        self._sender = EarlySender(llm.config.device)
        port = ToldDecodePort(self.peers) if site.control.size > 1 else self.peers
        engine = site.prefill_engine(port, self.peers, self._sender)
        self.engine = _over_ranks(llm, engine, port, on_lost=self._end)
        self._handover = site.engine.handover

    def start(self, wake: Callable[[], None]) -> None:
        """Accept decode servers; see `Role.start`."""
        self.peers.start(wake)

    def close(self) -> None:
        """End the writes, then the lines: a line that ended means that nothing is written."""
        self._sender.close()
        self.peers.close()

    def _end(self) -> None:
        """End as `close` without a word to the decode servers: they have lost this one."""
        self._sender.close()
        self.peers.stop()

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
        return PrefillCollector(self.peers, self._handover)


class DecodeRole:
    """Answers clients from prompts that prefill servers compute."""

    name = "decode"

    def __init__(
        self, llm: LLM, plan: RolePlan, options: RoleOptions, transport: Transport
    ) -> None:
        """Offer the pools of all ranks; see `start`.

        Raises:
            DiagnosticError: SD863; SD871 and what other ranks of this server have met.
        """
        site = _site(llm, plan, transport)
        self.serves = site.serves
        self._receiver: Receiver = transport.receive_into(site.caches.pool.layers)
        addresses = [self._receiver.address, *(card.address for card in site.cards())]
        self.peers = PrefillPeers(
            options.peers,
            hello=site.hello(),
            offer=Offer(addresses=addresses),
            limits=replace(options.limits, linger_s=transport.linger_s),
            on_state=_log_state("prefill"),
        )
        port = ToldPrefillPort(self.peers) if site.control.size > 1 else self.peers
        engine = DecodeEngine(
            site.engine, port=port, name=plan.server, block_bytes=site.block_bytes
        )
        self.engine = _over_ranks(llm, engine, port, on_lost=self.peers.stop)
        self._handover = site.engine.handover

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
        return DecodeCollector(self.peers, self._handover)


def make_role(
    llm: LLM, plan: RolePlan, options: RoleOptions, transport: Transport
) -> PrefillRole | DecodeRole:
    """Join an engine whose pool `transport` allocated to the connections of a role."""
    kind = PrefillRole if options.role == "prefill" else DecodeRole
    return kind(llm, plan, options, transport)


def role_plan(options: RoleOptions, *, weights: str) -> RolePlan:
    """Return what every process of a server is told; the server has a new name.

    Args:
        options: of the role.
        weights: see `weights_digest`.

    Raises:
        DiagnosticError: SD865.
    """
    for peer in options.peers:  # before a pool is made
        parse_address(peer, "--peer")
    host = "" if options.listen is None else parse_address(options.listen, "--listen")[0]
    return RolePlan(
        role=options.role,
        server=uuid.uuid4().hex,
        weights=weights,
        listen_host=host,
        transport=options.transport,
        transport_host=options.transport_host,
        first_proposal=options.first_proposal,
        transfer_timeout_s=options.transfer_timeout_s,
        limits=options.limits,
    )


def transport_of(options: RoleOptions, manifest: Manifest, overrides: Overrides) -> Transport:
    """Start what carries KV.

    Raises:
        DiagnosticError: SD863; SD869, the ranks of this server would hold parts of heads.
    """
    num_ranks = overrides.tensor_parallel or 1
    num_heads = manifest.target.decoder.num_kv_heads
    if num_heads % num_ranks:
        raise DiagnosticError(
            diagnose(
                "SD869",
                where="--tp",
                message=f"{num_ranks} ranks of a {options.role} server do not divide the "
                f"{num_heads} KV heads of the target",
                expected=f"a divisor of {num_heads}",
                found=num_ranks,
            )
        )
    return make_transport(options.transport, host=options.transport_host)


def _over_ranks(
    llm: LLM,
    engine: PrefillEngine | DecodeEngine,
    port: DecodePeers | PrefillPeers | ToldDecodePort | ToldPrefillPort,
    *,
    on_lost: Callable[[], None],
) -> PrefillEngine | DecodeEngine | UntilLost:
    """Return what drives an engine of a role on all of its ranks, and ends with one of them."""
    if isinstance(llm.engine, LockstepLeader):
        assert isinstance(port, ToldDecodePort | ToldPrefillPort), "several ranks are told"
        role = RoleRank(engine, port, close=lambda: None)
        return UntilLost(llm.engine.in_role(role), on_lost=on_lost)
    return engine if llm.staged.groups is None else UntilLost(engine, on_lost=on_lost)


def _site(llm: LLM, plan: RolePlan, transport: Transport) -> RoleSite:
    assert llm.caches is not None, "an LLM from a manifest has them"
    config, staged = llm.config, llm.staged
    if staged.groups is None:  # stages in one process are one pool
        layout = Layout(stage_layers=(llm.caches.num_target_layers,), tensor_parallel=1)
    else:
        layout = plan_of(llm.manifest, config, weights=plan.weights, has_tokenizer=False).layout(
            llm.manifest
        )
    return RoleSite(
        plan=plan,
        manifest=llm.manifest,
        config=config,
        layout=layout,
        transport=transport,
        engine=llm.own_engine,
        caches=llm.caches,
        control=staged.control,
        groups=staged.groups,
        line=staged.line,
    )


def _log_state(kind: str) -> Callable[[str, Diagnostic | None], None]:
    def log(peer: str, problem: Diagnostic | None) -> None:
        if problem is None:
            logger.info("%s server %s is connected", kind, peer)
            return
        text = "\n  ".join((problem.oneline(), *problem.notes))
        logger.warning("%s server %s: %s", kind, peer, text)

    return log
