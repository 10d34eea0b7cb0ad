"""Measure `specctl convert --to speculators` beside `speculators convert` on one EAGLE-3 draft.

Usage: python docs/benchmarks/convert_against_speculators.py --speculators BIN [--runs N] [--write]

BIN is the folder of an environment's programs with speculators 0.9.0 (`BIN/speculators`,
`BIN/python`). The draft is the bundled one in SafeAILab's layout, the verifier the SmolLM2 target
of `fixtures/smollm2.py`. Whole processes, alternating, a new output directory each time. Both
outputs are then loaded by the speculators library and their shared tensors compared byte by byte.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from startup import (
    HERE,
    ROOT,
    Times,
    cpu_s,
    environment_line,
    month,
    processor,
    processor_slug,
)

from specctl.checkpoint import open_checkpoint

DRAFT = ROOT / "fixtures" / "drafts" / "smollm2-135m-eagle3"
SCRIPT = "docs/benchmarks/convert_against_speculators.py"
GOAL = 10
LOAD = """
import sys
from speculators import SpeculatorModel
model = SpeculatorModel.from_pretrained(sys.argv[1])
weight = model.embed_tokens.weight
print(type(model).__name__, int((weight != 0).any()))
"""
LIMITS = (
    "*Limits.* One machine, {runs} runs of each arm in alternation, page cache warm. Nearly all of "
    "the other tool's time is the start of Python with torch and transformers; a larger draft does "
    "not add to it. The outputs are not the same set of tensors: specctl stores the target's "
    "embedding beside the draft's tensors, and syncs what it wrote to the disk; both cost it time."
)


def arms(source: Path, target: Path, programs: Path) -> dict[str, list[str]]:
    """Return label -> command without the output directory."""
    ours = [sys.executable, "-m", "specctl", "convert", str(source), "--to", "speculators"]
    ours += ["--target", str(target), "--gamma", "3"]
    theirs = [str(programs / "speculators"), "convert", str(source), "--verifier", str(target)]
    return {
        "specctl convert": [*ours, "-o"],
        "specctl convert --no-digests": [*ours, "--no-digests", "-o"],
        "speculators convert": [*theirs, "--algorithm", "eagle3", "--output-path"],
    }


def run(command: list[str]) -> tuple[float, float]:
    """Return the wall and processor seconds of one process."""
    used, start = cpu_s(), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    return elapsed, cpu_s() - used


def measure(table: dict[str, list[str]], folder: Path, runs: int) -> Times:
    """Return label -> seconds; the last output of each arm is left in `folder`."""
    times: Times = {label: [] for label in table}
    for number in range(runs + 1):  # the first round warms bytecode and page cache
        for label, command in table.items():
            out = folder / label.replace(" ", "-")
            shutil.rmtree(out, ignore_errors=True)
            figures = run([*command, str(out)])
            if number:
                times[label].append(figures)
    return times


def shared_tensors(one: Path, other: Path) -> tuple[int, int]:
    """Return how many tensors both outputs hold and how many of them are equal byte by byte."""
    first, second = open_checkpoint(one), open_checkpoint(other)
    both = [key for key in first.tensors if key in second.tensors]
    equal = [key for key in both if first.read_bytes(key) == second.read_bytes(key)]
    return len(both), len(equal)


def accepted(programs: Path, out: Path) -> str:
    """Return what the speculators library makes of an output."""
    done = subprocess.run(
        [str(programs / "python"), "-c", LOAD, str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"refused: {done.stderr.strip().splitlines()[-1]}"
    name, has_embedding = done.stdout.split()[-2:]
    return f"loaded as {name}, embedding {'set' if has_embedding == '1' else 'all zero'}"


def page(times: Times, checks: list[str], runs: int, load: tuple[float, float]) -> str:
    """Return the Markdown page."""
    walls = {label: [wall for wall, _ in values] for label, values in times.items()}
    medians = {label: statistics.median(seconds) for label, seconds in walls.items()}
    base = medians["speculators convert"]
    rows = [
        f"| `{label}` | {medians[label]:.2f} | {min(seconds):.2f} | {max(seconds):.2f} "
        f"| {statistics.median(used for _, used in times[label]):.2f} "
        f"| {base / medians[label]:.1f} |"
        for label, seconds in walls.items()
    ]
    ratio = base / medians["specctl convert"]
    return "\n".join(
        [
            f"# Conversion beside speculators 0.9.0, {processor()}, {month()}",
            "",
            "Whole processes, seconds of wall time and of user and system time; the last column",
            "is how many times faster by the wall.",
            "",
            "```sh",
            f"python {SCRIPT} --speculators BIN --runs {runs} --write",
            "```",
            "",
            "| command | median | min | max | median CPU | times |",
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
            f"Goal: {GOAL} times as fast: {'met' if ratio >= GOAL else 'missed'} ({ratio:.1f}).",
            "",
            *(f"- {line}" for line in checks),
            "",
            environment_line(load),
            "",
            LIMITS.format(runs=runs),
            "",
        ]
    )


def target_directory() -> Path:
    """Return the SmolLM2 target, made when it is not there yet."""
    path = ROOT / "fixtures" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Path = module.target_dir()
    if not (found / "config.json").is_file():
        subprocess.run([sys.executable, str(path)], check=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculators", metavar="BIN", required=True, type=Path)
    parser.add_argument("--runs", type=int, default=5, help="timings of each arm")
    parser.add_argument("--write", action="store_true", help="write the page beside this script")
    arguments = parser.parse_args()
    programs, target = arguments.speculators, target_directory()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        to_eagle3 = ["convert", str(DRAFT), "--to", "eagle3", "--target", str(target)]
        run([sys.executable, "-m", "specctl", *to_eagle3, "-o", str(source)])
        times = measure(arms(source, target, programs), folder, arguments.runs)
        ours, theirs = folder / "specctl-convert", folder / "speculators-convert"
        both, equal = shared_tensors(ours, theirs)
        checks = [
            f"the speculators library and `specctl convert`'s output: {accepted(programs, ours)}",
            f"the library and its own output: {accepted(programs, theirs)}",
            f"tensors in both outputs: {both}, equal byte by byte: {equal}",
        ]
    text = page(times, checks, arguments.runs, (before, os.getloadavg()[0]))
    print(text)
    if arguments.write:
        (HERE / f"convert-speculators_{processor_slug()}_{month()}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
