"""Measure how long the command line takes to start: median wall time of whole processes.

Usage: python docs/benchmarks/startup.py [--runs N] [--draft DIR] [--write]

Commands alternate, so that a slow moment of the machine meets all of them. `--write` puts the page
beside this script. Bytecode is warm: one run of each command comes before the first timing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DRAFT = "fixtures/drafts/smollm2-135m-eagle3"
LIMIT_S = 0.2
LIMITS = (
    "*Limits.* One machine, {runs} runs of each command in alternation, page cache warm. A load "
    "average near or above the number of CPUs means that other work took part of them; medians "
    "are then upper bounds. The first start after an installation compiles bytecode and is slower. "
    "The sources are local; nothing is downloaded."
)
PACKAGES = ("typer", "msgspec", "PyYAML", "rich")


def commands(draft: str) -> dict[str, list[str]]:
    """Return label -> arguments; the bare interpreter is the floor that no command can go below."""
    run = [sys.executable, "-m", "specctl"]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "specctl --version": [*run, "--version"],
        "specctl --help": [*run, "--help"],
        "specctl explain SD302": [*run, "explain", "SD302"],
        f"specctl inspect {draft}": [*run, "inspect", draft],
        f"specctl inspect {draft} --json": [*run, "inspect", draft, "--json"],
        f"specctl validate {draft}": [*run, "validate", draft],
    }


def cpu_s() -> float:
    """Return processor time of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_once(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return wall and processor seconds of one process."""
    used, start = cpu_s(), time.perf_counter()
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=60
    )
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr.decode()}")
    return elapsed, cpu_s() - used


Times = dict[str, list[tuple[float, float]]]


def measure(draft: str, runs: int) -> Times:
    """Return label -> (wall, processor) seconds, one round over all commands after another."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    table = commands(draft)
    for arguments in table.values():
        run_once(arguments, environment)
    times: Times = {label: [] for label in table}
    for _ in range(runs):
        for label, arguments in table.items():
            times[label].append(run_once(arguments, environment))
    return times


def processor() -> str:
    """Return the processor's name, or the architecture where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text("ascii", errors="replace")
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def month() -> str:
    return time.strftime("%Y%m")


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def row(label: str, values: list[tuple[float, float]]) -> str:
    walls, cpus = [wall * 1e3 for wall, _ in values], [cpu * 1e3 for _, cpu in values]
    cells = (statistics.median(walls), min(walls), max(walls), statistics.median(cpus))
    return f"| `{label}` | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |"


def environment_line(load: tuple[float, float]) -> str:
    """Return machine, versions and the load average before and after."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"Environment: {processor()}, {usable_cpus()} usable CPUs, Python "
        f"{platform.python_version()}, {packages}; load average {load[0]:.1f} before and "
        f"{load[1]:.1f} after."
    )


def policy_line() -> list[str]:
    """Return what to say of a run that other work cannot push aside."""
    if not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != os.SCHED_FIFO:
        return []
    return [
        "Run under `chrt -f 1`: other work does not take the CPU from a process of this run, but",
        "shares caches and memory with it.",
        "",
    ]


def page(times: Times, runs: int, load: tuple[float, float]) -> str:
    """Return the Markdown page; milliseconds."""
    limited = [label for label in times if label.startswith("specctl")]
    over = [name for name in limited if statistics.median(w for w, _ in times[name]) >= LIMIT_S]
    verdict = "all below" if not over else "over: " + ", ".join(f"`{label}`" for label in over)
    return "\n".join(
        [
            f"# Start of the command line, {processor()}, {month()}",
            "",
            "Whole processes, milliseconds of wall time and (last) of user and system time.",
            "",
            "```sh",
            f"python docs/benchmarks/startup.py --runs {runs} --write",
            "```",
            "",
            "| command | median | min | max | median CPU |",
            "|---|---:|---:|---:|---:|",
            *(row(label, values) for label, values in times.items()),
            "",
            f"Goal: median below {LIMIT_S * 1e3:.0f} ms for every specctl command: {verdict}.",
            "",
            environment_line(load),
            "",
            *policy_line(),
            LIMITS.format(runs=runs),
            "",
        ]
    )


def processor_slug() -> str:
    """Return the processor's name for a file name."""
    words = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", processor())
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def file_name() -> str:
    return f"startup_{processor_slug()}_{month()}.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="timings of each command")
    parser.add_argument("--draft", default=DRAFT, help="draft to inspect, relative to the root")
    parser.add_argument("--write", action="store_true", help="write the page beside this script")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    times = measure(arguments.draft, arguments.runs)
    text = page(times, arguments.runs, (before, os.getloadavg()[0]))
    print(text)
    if arguments.write:
        (HERE / file_name()).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
