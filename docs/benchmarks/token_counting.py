"""Measure counting the tokens of a corpus against `encode_batch` counting, in pairs.

Usage: python docs/benchmarks/token_counting.py CORPUS --tokenizer NAME=DIR [--runs N] [--write]

Every figure comes from a new process; the arms alternate. `units` is `count_corpus` on two
processes: reading, splitting by content, digest, scan, encoding, sums. `batch` reads the same
documents and counts the ids of `Tokenizer.encode_batch_fast` on two threads, as other tools do.
Both report a digest of the counts of all ids, which must be equal. Texts that occur twice in the
corpus should be removed beforehand: the page states the ratio of distinct to all units.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from startup import HERE, environment_line, month, processor, processor_slug

ARMS = ("units", "batch")
GOAL = 10.0
SAMPLE_S = 0.1
LIMITS = (
    "*Limits.* One machine, {runs} pairs, page cache warm. A load average near or above the number "
    "of CPUs means that other work took part of them: wall times are then upper bounds and the "
    "ratio of processor times is the better figure. Peak memory is the largest sum of proportional "
    "set sizes of an arm's processes in samples {sample_ms:.0f} ms apart, which may miss what is "
    "shorter. The bound is the parent's largest size plus twice the larger worker's: it counts "
    "shared pages twice and adds sizes of different times."
)


def used() -> float:
    """Return processor seconds of this process and its finished children."""
    parts = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def digest_of(counts: array[int]) -> str:
    """Return a short digest of the counts of all ids."""
    return hashlib.sha256(counts.tobytes()).hexdigest()[:16]


def count_units(corpus: str, tokenizer: Path) -> dict[str, Any]:
    """Count with `count_corpus`."""
    from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions, count_corpus
    from specctl.tokenmap.counting import load_tokenizer
    from specctl.tokenmap.counts import SIDES, summed

    loaded = load_tokenizer(tokenizer)
    result = count_corpus(CorpusSpec(sources=(corpus,)), loaded, CountOptions(workers=2))
    tables = [result.artefact.table(side) for side in SIDES]
    facts = result.artefact.facts
    return {
        "digest": digest_of(summed([r for t in tables for r in t.domains], loaded.size)),
        "num_bytes": sum(table.num_text_bytes for table in tables),
        "num_documents": sum(table.num_documents for table in tables),
        "num_tokens": sum(table.num_tokens for table in tables),
        "units": [facts.num_units, facts.num_unit_occurrences],
        "method": facts.method,
    }


def count_batch(corpus: str, tokenizer: Path) -> dict[str, Any]:
    """Count the ids of every document, encoded whole in batches."""
    from specctl.tokenmap.counting import load_tokenizer
    from specctl.tokenmap.readers import Piece, Reading, read_pieces
    from specctl.tokenmap.sources import Task, find_files

    loaded = load_tokenizer(tokenizer)
    frequencies: collections.Counter[int] = collections.Counter()
    texts: list[str] = []
    size = num_bytes = num_documents = 0

    def flush() -> None:
        for encoding in loaded.handle.encode_batch_fast(texts, add_special_tokens=False):
            frequencies.update(encoding.ids)
        texts.clear()

    files = find_files([corpus])
    for piece in (
        piece
        for file in files
        for piece in read_pieces(file, Task(number=0, files=(file,)), Reading(can_cut=False))
        if isinstance(piece, Piece)
    ):
        texts.append(piece.data.decode("utf-8"))
        size += len(piece.data)
        num_bytes += len(piece.data)
        num_documents += 1
        if size > 2 << 20:
            flush()
            size = 0
    flush()
    counts = array("Q", (frequencies[target_id] for target_id in range(loaded.size)))
    return {
        "digest": digest_of(counts),
        "num_bytes": num_bytes,
        "num_documents": num_documents,
        "num_tokens": sum(counts),
    }


def run_arm(arm: str, corpus: str, tokenizer: Path) -> None:
    """Print the figures of one process."""
    begin, start = used(), time.perf_counter()
    found = (count_units if arm == "units" else count_batch)(corpus, tokenizer)
    wall, cpu = time.perf_counter() - start, used() - begin
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    bound = (own + 2 * child) / 1024
    print(json.dumps({**found, "wall": wall, "cpu": cpu, "bound_mib": bound}))


def tree_kib(process: int) -> int:
    """Return the proportional set sizes of a process and its descendants; 0 for what has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text("ascii").splitlines()
        children = Path(f"/proc/{process}/task/{process}/children").read_text("ascii").split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return own + sum(tree_kib(int(child)) for child in children)


def measured(arm: str, corpus: str, tokenizer: Path) -> dict[str, Any]:
    """Return the figures of one new process."""
    command = [sys.executable, __file__, corpus, "--arm", arm, "--tokenizer", f"x={tokenizer}"]
    environment = {**os.environ, "RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"}
    peak = 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, tree_kib(process.pid))
            time.sleep(SAMPLE_S)
        told, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{arm}: exit {process.returncode}")
    found: dict[str, Any] = json.loads(told.splitlines()[-1]) | {"peak_mib": peak / 1024}
    print(f"{arm}: {found}", file=sys.stderr, flush=True)
    return found


def section(name: str, pairs: list[dict[str, dict[str, Any]]]) -> list[str]:
    """Return the rows of one tokenizer."""
    first = pairs[0]
    is_equal = all(len({pair[arm]["digest"] for arm in ARMS}) == 1 for pair in pairs)
    units = first["units"]
    size = (
        f"{units['num_bytes'] / 1e6:.0f} MB in {units['num_documents']:,} texts, "
        f"{units['num_tokens']:,} tokens; {units['units'][0]:,} distinct of "
        f"{units['units'][1]:,} units. Counts equal in every pair: "
        f"{'yes' if is_equal else 'NO'} (digest `{units['digest']}`)."
    )
    lines = [f"## {name}", "", size, ""]
    lines += [
        "| pair | arm | wall s | CPU s | MB/s | MB/s of one CPU | peak MiB | bound MiB |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for number, pair in enumerate(pairs, start=1):
        for arm in ARMS:
            row = pair[arm]
            mb = row["num_bytes"] / 1e6
            lines.append(
                f"| {number} | `{arm}` | {row['wall']:.1f} | {row['cpu']:.1f} | "
                f"{mb / row['wall']:.1f} | {mb / row['cpu']:.1f} | {row['peak_mib']:.0f} | "
                f"{row['bound_mib']:.0f} |"
            )
    ratios = {
        key: statistics.median(pair["batch"][key] / pair["units"][key] for pair in pairs)
        for key in ("wall", "cpu")
    }
    ratio = (
        f"Paired ratio `batch` / `units`, median: wall {ratios['wall']:.1f}, CPU "
        f"{ratios['cpu']:.1f} (goal {GOAL:.0f})."
    )
    lines += ["", ratio, ""]
    return lines


def main() -> None:
    """Run the pairs and print or write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus")
    parser.add_argument("--tokenizer", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    paths = {name: Path(p) for name, _, p in (t.partition("=") for t in given.tokenizer)}
    if given.arm:
        run_arm(given.arm, given.corpus, next(iter(paths.values())))
        return
    command = f"python docs/benchmarks/token_counting.py CORPUS --runs {given.runs} --write"
    lines = [
        f"# Counting tokens by distinct units, {processor()}, {month()}",
        "",
        "Each row is a new process on two CPUs; both arms of a pair run one after the other.",
        "",
        "```sh",
        command + "".join(f" --tokenizer {name}=DIR" for name in paths),
        "```",
        "",
    ]
    load = os.getloadavg()[0]
    for name, path in paths.items():
        file = path / "tokenizer.json" if path.is_dir() else path
        pairs = [
            {arm: measured(arm, given.corpus, file) for arm in ARMS} for _ in range(given.runs)
        ]
        lines += section(name, pairs)
    limits = LIMITS.format(runs=given.runs, sample_ms=1e3 * SAMPLE_S)
    lines += [environment_line((load, os.getloadavg()[0])), "", limits]
    text = "\n".join(lines) + "\n"
    if given.write:
        path = HERE / f"token-counting_{processor_slug()}_{month()}.md"
        path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
