"""Measure how fast `--deep` reads weights, and how much memory it takes, for each dtype.

Usage: python docs/benchmarks/deep_speed.py [--runs N] [--megabytes M] [--write]

One matrix of 4096 columns and random finite elements in a temporary folder, page cache warm. Every
figure comes from a new process; the arms alternate. The first arm only reads the same bytes through
the same store, which is the floor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from startup import HERE, ROOT, environment_line, month, processor, processor_slug

COLUMNS = 4096
ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
READ_ONLY = "read only"
LIMITS = (
    "*Limits.* One machine, {runs} processes of each row in alternation, {megabytes} MB of one "
    "matrix, page cache warm: a disk that is slower than the figure is the limit. Rates are per "
    "second of processor time, since other work may share the CPUs; wall time is beside them. "
    "Weights with NaN are counted by a slower path. The peak is that of the process, interpreter "
    "and imports included."
)


def make(folder: Path, dtype: str, megabytes: int) -> Path:
    """Write a checkpoint with one matrix of finite elements."""
    size = ELEMENT_BYTES[dtype]
    rows = megabytes * 10**6 // (COLUMNS * size)
    block = bytearray(random.Random(dtype).randbytes(COLUMNS * size * 64))
    top = block[size - 1 :: size]
    block[size - 1 :: size] = bytes((byte & 0x80) | 0x30 | (byte & 0x07) for byte in top)
    header = {"w": {"dtype": dtype, "shape": [rows, COLUMNS]}}
    header["w"]["data_offsets"] = [0, rows * COLUMNS * size]
    text = json.dumps(header).encode()
    place = folder / dtype
    place.mkdir()
    (place / "config.json").write_text("{}")
    with (place / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = rows * COLUMNS * size
        while left:
            left -= file.write(block[:left])
    return place


def read_once(path: str, is_scanned: bool) -> None:
    """Print bytes, wall and processor seconds and the peak of this process."""
    from specctl.checkpoint import open_checkpoint
    from specctl.checks.numerics import Reading, check_numbers

    checkpoint = open_checkpoint(path)
    (entry,) = checkpoint.tensors.values()
    reading = Reading(
        checkpoint=checkpoint, roles={}, num_real_rows={}, mask_token_id=None, has_mask_file=False
    )
    wall, used = time.perf_counter(), time.process_time()
    if is_scanned:
        list(check_numbers(reading))
    else:
        for _ in checkpoint.iter_range(entry.file, entry.begin, entry.end, 4 << 20):
            pass
    wall, used = time.perf_counter() - wall, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([entry.nbytes, wall, used, peak]))


def run(path: Path, is_scanned: bool) -> list[float]:
    """Return what `read_once` prints in a new process."""
    code = f"import deep_speed; deep_speed.read_once({str(path)!r}, {is_scanned})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=300
    )
    figures: list[float] = json.loads(done.stdout)
    return figures


def row(label: str, figures: list[list[float]]) -> str:
    """Return a table row: rates in GB/s of processor and wall time, peak in MB."""
    rates = [size / used / 1e9 for size, _, used, _ in figures]
    walls = [size / wall / 1e9 for size, wall, _, _ in figures]
    peak = max(peak for *_, peak in figures) / 1e6
    cells = (statistics.median(rates), min(rates), max(rates), statistics.median(walls))
    return f"| {label} | " + " | ".join(f"{cell:.2f}" for cell in cells) + f" | {peak:.0f} |"


def main() -> None:
    """Measure, print the page, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--write", action="store_true", help="put the page beside this script")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    figures: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        places = {dtype: make(Path(name), dtype, options.megabytes) for dtype in ELEMENT_BYTES}
        for _ in range(options.runs):
            figures.setdefault(READ_ONLY, []).append(run(places["BF16"], False))
            for dtype, place in places.items():
                figures.setdefault(dtype, []).append(run(place, True))
    command = f"deep_speed.py --runs {options.runs} --megabytes {options.megabytes} --write"
    lines = [
        f"# Reading weights with --deep, {processor()}, {month()}",
        "",
        "Gigabytes (10^9 bytes) a second on one CPU.",
        "",
        "```sh",
        f"python docs/benchmarks/{command}",
        "```",
        "",
        "| dtype | median, CPU time | min | max | median, wall time | peak MB |",
        "|---|---:|---:|---:|---:|---:|",
        *(row(label, values) for label, values in figures.items()),
        "",
        environment_line((before, os.getloadavg()[0])),
        "",
        LIMITS.format(runs=options.runs, megabytes=options.megabytes),
        "",
    ]
    print("\n".join(lines))
    if options.write:
        page = HERE / f"deep_{processor_slug()}_{month()}.md"
        page.write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main()
