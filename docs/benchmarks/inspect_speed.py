"""Measure `inspect` on checkpoints with the shapes of real ones, in process and as a command.

Usage: python docs/benchmarks/inspect_speed.py [--runs N] [--write]

The checkpoints are made in a temporary folder (`checkpoint_shapes`): real names, shapes, headers,
index and config, holes instead of data. Every figure comes from a new process; the arms alternate.
In process: from opening to the finished report, imports and one tiny checkpoint before; `report` is
what the text shows, `report --json` has a row for every tensor. Command: the whole process, output
to a pipe. The peak is that of the process, interpreter included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from checkpoint_shapes import SHAPES
from startup import HERE, ROOT, environment_line, month, policy_line, processor, processor_slug

TINY = ROOT / "fixtures" / "checkpoints" / "hf-llama-clean"
LIMITS_MS = {
    ("qwen3-32b", "report"): 50,
    ("qwen3-30b-a3b", "report"): 50,
    ("deepseek-v3", "report"): 1000,
    ("qwen3-32b", "inspect"): 300,
    ("qwen3-30b-a3b", "inspect"): 300,
    ("deepseek-v3", "inspect"): 1300,
}
LIMIT_MB = {("deepseek-v3", "report"): 300, ("deepseek-v3", "report --json"): 300}
ARMS = ("report", "report --json", "inspect", "inspect --json", "validate")
LIMITS = (
    "*Limits.* One machine, {runs} processes of each row in alternation, page cache warm, bytecode "
    "warm; a cold disk adds one seek for each shard. Names, shapes, dtypes and configs are as "
    "published; the spread over shards is an equal split by bytes, and the data "
    "are holes, which inspection does not read. The tokenizer rows have a tokenizer.json with as "
    "many words and merges as the real one, of other words. The load average says how much of the "
    "CPUs others used; near or above their number, wall times are upper bounds, and so is "
    "processor time, by less: neighbours then take caches and not time."
)


class Figure(NamedTuple):
    """One process: milliseconds, of all and of a processor, and peak resident MB (10^6 bytes)."""

    wall_ms: float
    cpu_ms: float
    peak_mb: float


def report_once(path: str, *, is_listed: bool) -> None:
    """Print the figure of one report in this process."""
    from specctl.ops.inspect import inspect_with_map

    inspect_with_map(str(TINY), is_listed=is_listed)
    start, used = time.perf_counter(), time.process_time()
    report = inspect_with_map(path, is_listed=is_listed).report
    wall_ms, cpu_ms = (time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3
    if not report.tensors.num_tensors:
        raise RuntimeError(f"{path}: nothing was read")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"wall_ms": wall_ms, "cpu_ms": cpu_ms, "peak_mb": peak_mb}))


def run_arm(arm: str, path: Path) -> Figure:
    """Return the figure of one new process."""
    if arm.startswith("report"):
        command = [sys.executable, __file__, "--report", str(path)]
        command += ["--listed"] if arm.endswith("--json") else []
    else:
        command = [sys.executable, "-m", "specctl", *arm.split(), str(path)]
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        text = child.stdout.read() if child.stdout is not None else b""
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall_ms = (time.perf_counter() - start) * 1e3
        errors.seek(0)
        complaint = errors.read()
    if child.returncode not in (0, 1):
        raise RuntimeError(f"{command}: {complaint.decode()}")
    if arm.startswith("report"):
        return Figure(**json.loads(text))
    cpu_ms = (used.ru_utime + used.ru_stime) * 1e3
    return Figure(wall_ms=wall_ms, cpu_ms=cpu_ms, peak_mb=used.ru_maxrss * 1024 / 1e6)


Rows = Mapping[tuple[str, str], list[Figure]]


def path_of(folder: Path, label: str) -> Path:
    return folder / label.replace(", ", "-")


def measure(folder: Path, runs: int) -> Rows:
    """Return (shape, arm) -> figures, one round over all rows after another."""
    paths = {label: path_of(folder, label) for label in SHAPES}
    # In a process of its own: a child's peak counts the pages of the parent that started it.
    subprocess.run([sys.executable, __file__, "--build", str(folder)], check=True)
    keys = [(label, arm) for label in SHAPES for arm in ARMS]
    for label, arm in keys:
        run_arm(arm, paths[label])
    rows: dict[tuple[str, str], list[Figure]] = {key: [] for key in keys}
    for _ in range(runs):
        for label, arm in keys:
            rows[label, arm].append(run_arm(arm, paths[label]))
    return rows


def line(key: tuple[str, str], figures: list[Figure]) -> str:
    walls = [figure.wall_ms for figure in figures]
    cells = [f"{statistics.median(walls):.0f}", f"{min(walls):.0f}", f"{max(walls):.0f}"]
    cells += [f"{statistics.median(figure.cpu_ms for figure in figures):.0f}"]
    cells += [str(LIMITS_MS.get(key, "")), f"{max(figure.peak_mb for figure in figures):.0f}"]
    return f"| {key[0]} | `{key[1]}` | " + " | ".join(cells) + f" | {LIMIT_MB.get(key, '')} |"


def over(rows: Rows) -> list[str]:
    """Return the rows above their limit, as text."""
    found = [
        f"{key[0]} `{key[1]}`"
        for key, limit in LIMITS_MS.items()
        if statistics.median(figure.wall_ms for figure in rows[key]) > limit
    ]
    return found + [
        f"{key[0]} `{key[1]}` peak"
        for key, limit in LIMIT_MB.items()
        if max(figure.peak_mb for figure in rows[key]) > limit
    ]


def page(rows: Rows, runs: int, load: tuple[float, float]) -> str:
    """Return the Markdown page."""
    above = over(rows)
    return "\n".join(
        [
            f"# Inspection of large checkpoints, {processor()}, {month()}",
            "",
            "Milliseconds of wall time, median processor time (CPU); peak resident memory of the",
            "process in MB. `report` is in process, from opening to what the text shows; it has a",
            "row for every tensor in `report --json`. The others are whole processes.",
            "",
            "| shape | tensors | files | bytes |",
            "|---|---:|---:|---:|",
            "| qwen3-32b | 707 | 16 | 65.5 GB |",
            "| qwen3-30b-a3b | 18,867 | 16 | 61.1 GB |",
            "| deepseek-v3 | 91,991 | 163 | 688.6 GB |",
            "",
            "```sh",
            f"python docs/benchmarks/inspect_speed.py --runs {runs} --write",
            "```",
            "",
            "| shape | what | median | min | max | CPU | goal | peak MB | goal |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
            *(line(key, figures) for key, figures in rows.items()),
            "",
            f"Goals: {'all met' if not above else 'missed: ' + ', '.join(above)}.",
            "",
            environment_line(load),
            "",
            *policy_line(),
            LIMITS.format(runs=runs),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="processes of each row")
    parser.add_argument("--write", action="store_true", help="write the page beside this script")
    parser.add_argument("--build", metavar="DIR", help="make the checkpoints in a folder")
    parser.add_argument("--report", metavar="DIR", help="measure one report in this process")
    parser.add_argument("--listed", action="store_true", help="with a row for every tensor")
    arguments = parser.parse_args()
    if arguments.report:
        report_once(arguments.report, is_listed=arguments.listed)
        return
    if arguments.build:
        for label, build in SHAPES.items():
            build(path_of(Path(arguments.build), label))
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), arguments.runs)
    text = page(rows, arguments.runs, (before, os.getloadavg()[0]))
    print(text)
    if arguments.write:
        (HERE / f"inspect_{processor_slug()}_{month()}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
