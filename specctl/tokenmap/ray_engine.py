"""Run the tasks of a count on Ray Data, on a cluster or on this machine.

Invariant: the same parts as local workers write, so the same counts. The directory of parts must be
on storage that every node and the caller see. *Source:* Ray's `ray.data` documentation.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.tokenmap.readers import missing_package
from specctl.tokenmap.sources import Task
from specctl.tokenmap.worker import Job, run_task

if TYPE_CHECKING:
    from specctl.tokenmap.count_corpus import CountOptions

_CONNECT_S = 10.0


def run_on_ray(job: Job, tasks: Sequence[Task], options: CountOptions) -> Iterator[int]:
    """Yield the numbers of tasks as Ray finishes them.

    Raises:
        DiagnosticError: SD435 without Ray, SD442 without the cluster.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_package("ray", "--engine ray", "ray") from error
    if not tasks:
        return
    is_ours = not ray.is_initialized()
    if is_ours:
        if options.ray_address is not None:
            check_cluster(options.ray_address)
        try:
            ray.init(
                address=options.ray_address,
                num_cpus=options.workers if options.ray_address is None else None,
                include_dashboard=False if options.ray_address is None else None,
                log_to_driver=False,
                runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
            )
        except (ValueError, RuntimeError, ConnectionError) as error:  # what Ray's start raises
            raise _unreachable(options.ray_address or "local", str(error)) from error
    try:
        by_number = {task.number: task for task in tasks}
        rows = ray.data.from_items([{"task": number} for number in sorted(by_number)])
        spread = rows.repartition(len(by_number))

        def count(row: dict[str, Any]) -> dict[str, Any]:
            return {"task": run_task(job, by_number[int(row["task"])])}

        for done in spread.map(count, num_cpus=1).iter_rows():
            yield int(done["task"])
    finally:
        if is_ours:
            ray.shutdown()


def check_cluster(address: str) -> None:
    """Refuse an address where nothing listens; what has no port is left to Ray.

    Raises:
        DiagnosticError: SD442.
    """
    host, mark, port = address.removeprefix("ray://").rpartition(":")
    if not mark or not port.isascii() or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, found: str) -> DiagnosticError:
    return DiagnosticError(
        diagnose(
            "SD442",
            where=f"--ray-address {address}",
            message=f"no Ray cluster can be used at `{address}`",
            expected="HOST:PORT of a running cluster",
            found=found.partition("\n")[0][:200],
        )
    )
