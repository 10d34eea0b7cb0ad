"""A stage before the last of a prefill or decode server: its pool is written into, or sent from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.disagg.early import EarlySender
from runtime.disagg.handshake import Layout
from runtime.disagg.listen import DecodePeers
from runtime.disagg.outbox import Route
from runtime.disagg.remote import OpenWay, StageSender
from runtime.disagg.role_plan import RankCard, RolePlan
from runtime.disagg.routes import Routes
from runtime.disagg.transport import Receiver, Transport
from runtime.engine.role_site import (
    greeted,
    pool_allocator,
    publish_card,
    rank_listener,
    rank_transport,
    stage_facts,
)
from runtime.engine.stages import StagePoolOrders
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.parallel.groups import ProcessGroups
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleStage:
    """The KV side of such a stage; see `StageKV`.

    Args:
        plan: of the server.
        manifest: that is served.
        layout: of this side.
        model: the stage.
        groups: all processes.
        transport: carries KV.
        opened: what is to be closed at the end.
    """

    plan: RolePlan
    manifest: Manifest
    layout: Layout
    model: TargetModel
    groups: ProcessGroups
    transport: Transport
    opened: list[_SentPool | _OfferedPool]

    @classmethod
    def start(
        cls,
        plan: RolePlan,
        *,
        manifest: Manifest,
        layout: Layout,
        model: TargetModel,
        groups: ProcessGroups,
    ) -> RoleStage:
        """Start the carrier of this process.

        Raises:
            DiagnosticError: SD863.
        """
        return cls(
            plan=plan,
            manifest=manifest,
            layout=layout,
            model=model,
            groups=groups,
            transport=rank_transport(plan, groups.launch),
            opened=[],
        )

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros; on a decode server such that others can write into them."""
        return pool_allocator(self.plan, self.transport)(shape, dtype, device)

    def open(self, layers: tuple[KVLayer, ...], kv_block_size: int) -> StagePoolOrders:
        """Offer a pool, or listen for decode servers, and tell rank 0.

        Raises:
            DiagnosticError: SD835, SD863; rank 0 reads them too.
        """
        facts = stage_facts(
            self.manifest,
            self.plan,
            dtype=self.model.dtype,
            kv_block_size=kv_block_size,
            device=self.model.device,
        )
        try:
            if self.plan.role == "decode":
                offered = _OfferedPool(receiver=self.transport.receive_into(layers))
                self.opened.append(offered)
                publish_card(self.groups, RankCard(facts=facts, address=offered.receiver.address))
                return offered
            peers, listen = rank_listener(self.plan, self.layout, facts, self.groups)
        except DiagnosticError as error:
            publish_card(self.groups, RankCard(problems=error.diagnostics))
            raise
        sent = _SentPool(orders=self._sender(layers, peers), peers=peers)
        self.opened.append(sent)
        publish_card(self.groups, RankCard(facts=facts, listen=listen))
        return sent

    def close(self) -> None:
        """End the writes, then the lines; take pools back."""
        for item in self.opened:
            item.close()

    def _sender(self, layers: tuple[KVLayer, ...], peers: DecodePeers) -> StageSender:
        rank = self.groups.launch.rank

        def open_way(order: OpenWay) -> Route:
            routes = Routes(
                self.transport,
                layout=self.layout,
                rank=rank,
                kv_heads=order.kv_heads,
                pool=layers,
                may_write=peers.may_write,
            )
            return greeted(peers, routes)(order.arrived)

        first = self.model.first_layer
        return StageSender(
            pool=layers,
            layers=range(first, first + self.model.num_layers),
            routes=open_way,
            sender=EarlySender(self.model.device),
            rank=rank,
            board=self.groups,
            device=self.model.device,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfferedPool:
    """A pool that prefill servers write into; nothing is ordered."""

    receiver: Receiver

    def obey(self, order: bytes) -> None:
        """Take no orders."""
        raise AssertionError(f"{len(order)} bytes of orders to a decode server's stage")

    def layer_done(self, layer: int) -> None:
        """Send nothing."""

    def close(self) -> None:
        """Take the pool back."""
        self.receiver.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _SentPool:
    """A pool that is sent from."""

    orders: StageSender
    peers: DecodePeers

    def obey(self, order: bytes) -> None:
        """Send as the last stage says."""
        self.orders.obey(order)

    def layer_done(self, layer: int) -> None:
        """Send what the forward has made final of a layer."""
        self.orders.layer_done(layer)

    def close(self) -> None:
        """End the writes, then the lines: a line that ended means that nothing is written."""
        self.orders.close()
        self.peers.close()
