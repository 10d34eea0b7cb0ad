"""What one process of `test_tensor_parallel` runs; the same work as a thread of its twin."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from runtime.config import Overrides, resolve_config
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, Lockstep, follow
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.launch import launch_of
from runtime.parallel.layout import ParallelLayout
from runtime.parallel.ranks import Ranks, rank_sum
from specctl.contract.codec import load_manifest
from tests.parallel_cases import REQUESTS
from tests.rank_harness import SMALL, answer, builder

RUNS = {
    "alone": replace(SMALL, proposer="none"),
    "seeded": SMALL,
    "rejection": replace(SMALL, verification="rejection"),
}


def work(manifest_path: Path, ranks: Ranks, control: Ranks) -> dict[str, object]:
    """Return sums, states and ids of one rank, as what can be compared bit for bit."""
    generator = torch.Generator().manual_seed(ranks.rank)
    partial = torch.randn(7, 33, generator=generator) * torch.logspace(-6, 6, 33)
    found: dict[str, object] = {"sum": rank_sum(ranks, partial)}
    for name, overrides in RUNS.items():
        found[name] = one_run(manifest_path, ranks, control, overrides)
    return found


def one_run(
    manifest_path: Path, ranks: Ranks, control: Ranks, overrides: Overrides
) -> dict[str, object]:
    """Lead or follow one engine; return the ids that this rank committed and its keys."""
    kept: dict[str, list[int]] = {}
    manifest = load_manifest(manifest_path)
    build = builder(manifest, ranks)
    built: list[Engine] = []

    def build_kept(order: EngineOrder) -> Engine:
        built.append(build(order))
        keep_ids(built[-1], kept)
        return built[-1]

    if ranks.rank == 0:
        lockstep = Lockstep(control)
        order = EngineOrder(config=resolve_config(manifest, overrides))
        answer(lockstep.open(order, build_kept), REQUESTS)
        lockstep.close()
    else:
        follow(control, build_kept)
    return {"ids": kept, "rounds": built[0].stats().num_rounds}


def keep_ids(engine: Engine, kept: dict[str, list[int]]) -> None:
    """Note what the engine delivers on this rank, the first one or another."""
    step = engine.step

    def noted():  # type: ignore[no-untyped-def]
        deltas = step()
        for delta in deltas:
            kept.setdefault(delta.request_id, []).extend(delta.ids_target)
        return deltas

    engine.step = noted  # type: ignore[method-assign]


def main(manifest_path: Path, out: Path) -> None:
    """Meet the others, work, and write what was found."""
    torch.set_num_threads(1)
    launch = launch_of(os.environ)
    assert launch is not None, "a launcher says which rank this is"
    layout = ParallelLayout(tensor_parallel=launch.world_size)
    with ProcessGroups(layout, launch, device=torch.device("cpu"), peer_timeout_s=60) as groups:
        found = work(manifest_path, groups.ranks(), groups.control_ranks())
    torch.save(found, out / f"rank{launch.rank}.pt")


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]), Path(sys.argv[2]))
