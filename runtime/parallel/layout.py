"""Which stage and which tensor-parallel rank a process is.

World ranks count from the last stage: ranks 0 to tp - 1 draft, verify, commit and, on rank 0,
answer requests, so that the address of a launcher's rank 0 is the address of the server. Rank t of
a stage exchanges states with rank t of its neighbours only; sums run over the ranks of one stage.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """A grid of `pipeline_parallel` stages times `tensor_parallel` ranks.

    Args:
        pipeline_parallel: stages, 1 or more.
        tensor_parallel: ranks of each stage, 1 or more.
    """

    pipeline_parallel: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Refuse a grid without a process."""
        assert self.pipeline_parallel > 0, self
        assert self.tensor_parallel > 0, self

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.pipeline_parallel * self.tensor_parallel

    def place(self, rank: int) -> Place:
        """Return where world rank `rank` is."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        distance, tp_rank = divmod(rank, self.tensor_parallel)
        return Place(layout=self, stage=self.pipeline_parallel - 1 - distance, tp_rank=tp_rank)

    def rank(self, stage: int, tp_rank: int) -> int:
        """Return the world rank of a place."""
        return (self.pipeline_parallel - 1 - stage) * self.tensor_parallel + tp_rank

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the world ranks of a stage in the order of their sums."""
        return tuple(self.rank(stage, tp_rank) for tp_rank in range(self.tensor_parallel))


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One process of a layout.

    Args:
        stage: 0 embeds the input.
        tp_rank: which shard of the stage.
    """

    layout: ParallelLayout
    stage: int
    tp_rank: int

    @property
    def rank(self) -> int:
        """World rank."""
        return self.layout.rank(self.stage, self.tp_rank)

    @property
    def is_first(self) -> bool:
        """Whether it embeds the input."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it drafts, verifies and commits."""
        return self.stage == self.layout.pipeline_parallel - 1

    @property
    def previous_rank(self) -> int | None:
        """World rank that hands states to this one; None on the first stage."""
        return None if self.is_first else self.layout.rank(self.stage - 1, self.tp_rank)

    @property
    def next_rank(self) -> int | None:
        """World rank that takes states from this one; None on the last stage."""
        return None if self.is_last else self.layout.rank(self.stage + 1, self.tp_rank)
