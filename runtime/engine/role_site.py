"""What each process of a prefill or decode server needs beside its models, made in one place.

World rank 0 speaks with the other side. Every other process publishes a card: where its pool is, or
where it listens for decode servers, and the facts that all must share.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from runtime.config import RuntimeConfig, dtype_name
from runtime.disagg.agreement import RankAgreement
from runtime.disagg.carriers import make_transport
from runtime.disagg.early import EarlySender
from runtime.disagg.handshake import PROTOCOL_VERSION, Hello, Layout, rank_facts, shared_facts
from runtime.disagg.limits import Limits
from runtime.disagg.listen import Arrived, DecodePeers, listen_at
from runtime.disagg.outbox import Route, pool_block_bytes
from runtime.disagg.ports import DecodePort
from runtime.disagg.remote import StageOutlet, no_line
from runtime.disagg.role_plan import RankCard, RolePlan, card_key, compare_cards
from runtime.disagg.routes import Routes
from runtime.disagg.transport import Transport
from runtime.engine.caches import Caches
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.engine import Engine
from runtime.engine.prefill_jobs import PrefillParts
from runtime.engine.prefill_role import PrefillEngine
from runtime.engine.role_rank import RoleRank, ToldDecodePort, ToldPrefillPort
from runtime.engine.stages import StageLine
from runtime.kernels.gemm_table import gemm_table_digest
from runtime.kv import Allocate, zeroed
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.launch import Launch
from runtime.parallel.ranks import Ranks
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSite:
    """A rank of the last stage of a role server.

    Args:
        plan: of the server.
        manifest: that is served.
        config: settings, with this rank's device.
        layout: how this side holds KV.
        transport: carries KV, from this process or into it.
        engine: of this rank.
        caches: of the engine.
        control: the ranks of this stage, for what they agree on; of one: nothing is.
        groups: all processes; None: there is one.
        line: the stages before this one; None: there are none in other processes.
    """

    plan: RolePlan
    manifest: Manifest
    config: RuntimeConfig
    layout: Layout
    transport: Transport
    engine: Engine
    caches: Caches
    control: Ranks
    groups: ProcessGroups | None
    line: StageLine | None

    @property
    def rank(self) -> int:
        """World rank."""
        return 0 if self.groups is None else self.groups.launch.rank

    @property
    def serves(self) -> str:
        """What two servers that answer alike have in common, as text."""
        return f"{self.manifest.fingerprint} {self.plan.weights}"

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """KV heads of each target layer, then of each draft layer, over all ranks."""
        layers, count = self.caches.pool.layers, self.caches.num_target_layers
        target = [layer.k.shape[1] * self.layout.tensor_parallel for layer in layers[:count]]
        split = self.layout.tensor_parallel if self.layout.is_draft_split else 1
        draft = [layer.k.shape[1] * split for layer in layers[count:]]
        num_before = sum(self.layout.stage_layers) - count
        return (*[self.manifest.target.decoder.num_kv_heads] * num_before, *target, *draft)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each layer on all ranks: what is whole on each counts for each."""
        found = pool_block_bytes(self.caches.pool.layers)
        num_before = sum(self.layout.stage_layers) - self.caches.num_target_layers
        return tuple(
            self.layout.tensor_parallel * size for size in (*found[:1] * num_before, *found)
        )

    def facts(self) -> dict[str, str]:
        """Return what both sides must have alike."""
        config = self.config
        return shared_facts(
            self.manifest,
            weights=self.plan.weights,
            dtype=dtype_name(config.dtype),
            kv_block_size=config.kv_block_size,
            kv_heads=self.kv_heads,
            proposer=config.proposer,
            num_speculative_tokens=config.num_speculative_tokens,
            verification=config.verification,
            first_proposal=self.plan.first_proposal,
            slot_state=tuple(map(str, self.engine.slot_state)),
            kernels=kernel_facts(config.device),
        ) | silence_fact(self.plan.limits)

    def cards(self) -> tuple[RankCard, ...]:
        """Return the cards of the other ranks, by rank; asked on rank 0.

        Raises:
            DiagnosticError: SD871, ranks of this server differ; what a rank has met; SD855.
        """
        if self.groups is None:
            return ()
        ranks = range(1, self.groups.layout.world_size)
        cards = [read_card(self.groups, rank) for rank in ranks]
        compare_cards(self.facts(), cards)
        return tuple(cards)

    def hello(self, *, ranks: tuple[str, ...] = ()) -> Hello:
        """Return what rank 0 says to the other side; `ranks` is where the others listen."""
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=self.plan.role,
            facts=self.facts(),
            layout=self.layout,
            transport=self.plan.transport,
            server=self.plan.server,
            ranks=ranks,
        )

    def prefill_engine(
        self, port: DecodePort, peers: DecodePeers, sender: EarlySender
    ) -> PrefillEngine:
        """Return this rank's engine of a prefill server.

        Args:
            port: to the decode servers, or what is told of them.
            peers: the lines of this rank itself, which say whether it may write.
            sender: whose thread writes.
        """
        caches, config = self.caches, self.config
        return PrefillEngine(
            self.engine,
            PrefillParts(
                proposer=caches.proposer,
                pool=caches.pool.layers,
                num_pool_target_layers=caches.num_target_layers,
                num_target_layers=sum(self.layout.stage_layers),
                target_vocab_size=config.target_vocab_size,
                stages=self._stages(),
            ),
            port=port,
            routes=greeted(
                peers,
                Routes(
                    self.transport,
                    layout=self.layout,
                    rank=self.rank,
                    kv_heads=self.kv_heads,
                    pool=caches.pool.layers,
                    may_write=peers.may_write,
                ),
            ),
            sender=sender,
            first_proposal=self.plan.first_proposal,
            transfer_s=self.plan.transfer_timeout_s,
            agreement=RankAgreement(self.control) if self.control.size > 1 else None,
        )

    def _stages(self) -> StageOutlet | None:
        if self.line is None or self.groups is None:
            return None
        line, groups, layout = self.line, self.groups, self.groups.layout

        def take(key: str) -> str | None:
            line.check()
            return groups.take(key)

        return StageOutlet(
            tell=line.order,
            take=take,
            stage_ranks=[
                layout.rank(stage, groups.place.tp_rank)
                for stage in range(layout.pipeline_parallel - 1)
            ],
            kv_block_size=self.config.kv_block_size,
            kv_heads=self.kv_heads,
        )


def greeted(peers: DecodePeers, routes: Callable[[Arrived], Route]) -> Callable[[Arrived], Route]:
    """Return what opens ways to decode servers that have greeted this rank.

    A decode server greets every rank before it offers its pools, so the wait is short.
    """

    def open_way(arrived: Arrived) -> Route:
        if not peers.wait_for(arrived.peer):
            raise DiagnosticError(no_line())
        return routes(arrived)

    return open_way


def rank_listener(
    plan: RolePlan, layout: Layout, facts: dict[str, str], groups: ProcessGroups
) -> tuple[DecodePeers, str]:
    """Return the lines of a prefill rank other than the first, and where it listens.

    Raises:
        DiagnosticError: SD835.
    """
    host = own_host(plan.listen_host, groups.launch)
    is_with_first = groups.launch.rank < groups.launch.local_world_size
    peers = DecodePeers(
        listen_at(host, 0),
        hello=Hello(
            protocol=PROTOCOL_VERSION,
            role=plan.role,
            facts=rank_facts(facts),
            layout=layout,
            transport=plan.transport,
            server=plan.server,
            rank=groups.launch.rank,
        ),
        limits=plan.limits,
        on_state=lambda _peer, _problem: None,  # the first rank says it
        on_left=lambda _peer: None,
    )

    def drop() -> None:
        """Forget what came: the first rank tells it."""
        peers.poll()

    peers.start(drop)
    port = peers.address.rpartition(":")[2]
    return peers, f":{port}" if is_with_first else f"{host}:{port}"


def own_host(given: str, launch: Launch) -> str:
    """Return the address of this process's machine.

    Args:
        given: that of rank 0's machine.
        launch: which process this is.
    """
    if launch.rank < launch.local_world_size:  # on the same machine
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((given, 9))  # sends nothing: asks which address leads there
        return str(probe.getsockname()[0])


def rank_transport(plan: RolePlan, launch: Launch) -> Transport:
    """Start what carries KV on another rank than the first.

    Raises:
        DiagnosticError: SD863.
    """
    return make_transport(plan.transport, host=own_host(plan.transport_host, launch))


def pool_allocator(plan: RolePlan | None, transport: Transport | None) -> Allocate:
    """Return what makes a rank's pool: a transport where others write into it."""
    is_offered = plan is not None and plan.role == "decode"
    return transport.allocate if is_offered and transport is not None else zeroed


def publish_card(groups: ProcessGroups, card: RankCard) -> None:
    """Let rank 0 read this rank's card."""
    groups.publish(card_key(groups.launch.rank), msgspec.json.encode(card).decode())


def read_card(groups: ProcessGroups, rank: int) -> RankCard:
    """Wait for a rank's card.

    Raises:
        DiagnosticError: SD855.
    """
    return msgspec.json.decode(groups.read(card_key(rank)), type=RankCard)


def stage_facts(
    manifest: Manifest,
    plan: RolePlan,
    *,
    dtype: torch.dtype,
    kv_block_size: int,
    device: torch.device,
) -> dict[str, str]:
    """Return the facts of a rank without a draft; see `rank_facts`."""
    facts = {
        "target": manifest.target.config_digest,
        "dtype": dtype_name(dtype),
        "kv_block_size": str(kv_block_size),
        "fingerprint": manifest.fingerprint,
    }
    facts |= {f"kernels.{name}": value for name, value in kernel_facts(device).items()}
    return facts | silence_fact(plan.limits)


def silence_fact(limits: Limits) -> dict[str, str]:
    """Return the limit that both sides must have alike: fences count on the other's."""
    return {"peer_silence_s": f"{limits.silence_s:g}"}


def kernel_facts(device: torch.device) -> dict[str, str]:
    """Return what makes bits on a device."""
    facts = {"torch": str(torch.__version__), "gemm_table": gemm_table_digest()}
    if device.type != "cuda":
        machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        return facts | {"architecture": machine}
    major, minor = torch.cuda.get_device_capability(device)
    return facts | {"architecture": f"sm_{major}{minor}"}


def follow_role(site: RoleSite) -> RoleRank:
    """Return what another rank of the last stage does in its server's role, and tell rank 0.

    Raises:
        DiagnosticError: SD835, SD863.
    """
    assert site.groups is not None, "there is another rank"
    layers = site.caches.pool.layers
    if site.plan.role == "decode":
        receiver = site.transport.receive_into(layers)
        publish_card(site.groups, RankCard(facts=site.facts(), address=receiver.address))
        asking = ToldPrefillPort()
        decode = DecodeEngine(
            site.engine, port=asking, name=site.plan.server, block_bytes=site.block_bytes
        )
        return RoleRank(decode, asking, close=receiver.close)
    peers, listen = rank_listener(site.plan, site.layout, site.facts(), site.groups)
    sender = EarlySender(site.config.device)
    answering = ToldDecodePort()
    prefill = site.prefill_engine(answering, peers, sender)
    publish_card(site.groups, RankCard(facts=site.facts(), listen=listen))

    def close() -> None:
        """End the writes, then the lines: a line that ended means that nothing is written."""
        sender.close()
        peers.close()

    return RoleRank(prefill, answering, close=close)
