"""What a prefill server sends from, and the prompts that it computes with their KV on its way."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.disagg.agreement import Ended
from runtime.disagg.frames import Failed, Prefill, Prefilled, Released
from runtime.disagg.outbox import Transfer
from runtime.disagg.remote import StageOutlet, StageTransfer
from runtime.kv import KVLayer
from runtime.spec.types import Proposer


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillParts:
    """What a prefill engine sends from.

    Args:
        proposer: the engine's own.
        pool: this rank's layers, the target's then the draft's.
        num_pool_target_layers: the first ones of the pool: those of this stage.
        num_target_layers: of the whole target: the draft's are numbered after them.
        target_vocab_size: rows of the target's head.
        stages: those before this one, in other processes; None without any.
    """

    proposer: Proposer
    pool: tuple[KVLayer, ...]
    num_pool_target_layers: int
    num_target_layers: int
    target_vocab_size: int
    stages: StageOutlet | None = None


@dataclass(kw_only=True, slots=True)
class PrefillJob:
    """A prompt that a decode server asked for.

    Args:
        own: the transfer of this rank.
        before: that of the stages before this one; None without any.
        answer: what is told once nothing is read or written any more; None: it is being computed.
        has_ended: whether nothing more is sent.
    """

    peer: str
    asked: Prefill
    own: Transfer
    before: StageTransfer | None = None
    answer: Prefilled | Failed | Released | None = None
    has_ended: bool = False

    @property
    def is_ordered(self) -> bool:
        """Whether its transfer is over when it ends: known beforehand, and alike on all ranks."""
        return self.before is None and self.own.is_ordered

    @property
    def is_over(self) -> bool:
        """Whether it has an answer and nothing more is read or written for it.

        Raises:
            DiagnosticError: SD853 to SD856, a stage is lost.
        """
        if self.answer is None or not self.own.is_over:
            return False
        return self.before is None or self.before.is_over

    @property
    def ended(self) -> Ended:
        """What became of its KV."""
        if self.before is None:
            return Ended(problem=self.own.problem, num_kv_bytes=self.own.num_kv_bytes)
        return Ended(
            problem=self.own.problem or self.before.problem,
            num_kv_bytes=self.own.num_kv_bytes + self.before.num_kv_bytes,
        )

    def end(self, timeout_s: float, *, is_whole: bool) -> None:
        """Send nothing more, unless that was said already; see `StageTransfer.end`."""
        if self.has_ended:
            return
        self.has_ended = True
        self.own.end(timeout_s)
        if self.before is not None:
            self.before.end(timeout_s, is_whole=is_whole)

    def wait(self, timeout_s: float) -> None:
        """Give what is not over a little time."""
        if self.own.wait(timeout_s) and self.before is not None:
            self.before.wait(timeout_s)
