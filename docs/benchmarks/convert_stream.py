"""Measure `specctl convert` of a large draft beside `cp --reflink=never`, both flushed to disk.

Usage: python docs/benchmarks/convert_stream.py [--gigabytes N] [--runs N] [--folder DIR] [--write]

The draft is a Speculators EAGLE-3 checkpoint of random bytes whose embedding and head make it as
large as asked; it is written as SpecForge's dialect, so that names and config change and every
tensor byte is copied. `cp` copies the weight file and `sync` flushes it. Whole processes, in
alternation; every output is removed before the next one starts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from startup import HERE, ROOT, environment_line, month, processor, processor_slug

SCRIPT = "docs/benchmarks/convert_stream.py"
GOAL = 0.8
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 8192, 8192, 64, 8, 128
SOURCE_FIXTURE = ROOT / "fixtures" / "checkpoints" / "speculators-eagle3-clean"
CHUNK = 16 << 20
LIMITS = (
    "*Limits.* One machine and one disk, {runs} runs of each arm in alternation, source in the "
    "page cache as far as memory allows, other work on the machine. Both copy the same bytes: the "
    "weight file of one is the other's but for the header. A hub source or a token map, which "
    "gathers rows, is not measured here."
)


def tensors(vocabulary: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return key -> dtype and shape of a draft over a vocabulary."""
    layer = "layers.0."
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, HIDDEN),
        "lm_head.weight": (vocabulary, HIDDEN),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        layer + "hidden_norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (queries, 2 * HIDDEN),
        layer + "self_attn.k_proj.weight": (keys, 2 * HIDDEN),
        layer + "self_attn.v_proj.weight": (keys, 2 * HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, queries),
        layer + "mlp.gate_proj.weight": (INNER, HIDDEN),
        layer + "mlp.up_proj.weight": (INNER, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    return {key: ("BF16", shape) for key, shape in shapes.items()}


def make_draft(folder: Path, num_bytes: int) -> Path:
    """Write the draft; its weights are random bytes, which no file system can shorten."""
    source = folder / "source"
    source.mkdir()
    fixed = sum(_size(shape) for _, shape in tensors(0).values())
    vocabulary = max((num_bytes - fixed) // (4 * HIDDEN), 1000)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    cursor = 0
    for key, (dtype, shape) in tensors(vocabulary).items():
        end = cursor + _size(shape)
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [cursor, end]}
        cursor = end
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with (source / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for begin in range(0, cursor, CHUNK):
            stream.write(os.urandom(min(CHUNK, cursor - begin)))
        stream.flush()
        os.fsync(stream.fileno())
    config = json.loads((SOURCE_FIXTURE / "config.json").read_text())
    config["draft_vocab_size"] = vocabulary
    config["transformer_layer_config"] |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocabulary,
    }
    (source / "config.json").write_text(json.dumps(config))
    return source


def _size(shape: tuple[int, ...]) -> int:
    count = 2
    for size in shape:
        count *= size
    return count


def arms(source: Path, out: Path) -> dict[str, list[list[str]]]:
    """Return label -> the commands of one run."""
    convert = [sys.executable, "-m", "specctl", "convert", str(source), "--to", "specforge"]
    convert += ["--max-shard-size", "1TB", "-o", str(out)]
    weights = str(source / "model.safetensors")
    return {
        "cp --reflink=never; sync": [
            ["cp", "--reflink=never", weights, str(out)],
            ["sync", str(out)],
        ],
        "specctl convert --no-digests": [[*convert, "--no-digests"]],
        "specctl convert": [convert],
    }


def run(commands: list[list[str]], out: Path) -> float:
    """Return the seconds of some commands, having removed the output of the run before."""
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    os.sync()
    start = time.perf_counter()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    return time.perf_counter() - start


def page(times: dict[str, list[float]], size: int, runs: int, load: tuple[float, float]) -> str:
    """Return the Markdown page."""
    medians = {label: statistics.median(seconds) for label, seconds in times.items()}
    base = medians["cp --reflink=never; sync"]
    rows = [
        f"| `{label}` | {medians[label]:.2f} | {min(seconds):.2f} | {max(seconds):.2f} "
        f"| {size / medians[label] / 1e6:.0f} | {base / medians[label]:.2f} |"
        for label, seconds in times.items()
    ]
    share = base / medians["specctl convert --no-digests"]
    verdict = "met" if share >= GOAL else "missed"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return "\n".join(
        [
            f"# Conversion beside cp, {processor()}, {month()}",
            "",
            f"One file of {size / 1e9:.2f} GB, seconds of wall time; the last column is the speed",
            "as a share of `cp`'s.",
            "",
            "```sh",
            f"python {SCRIPT} --gigabytes {size / 1e9:.0f} --runs {runs} --write",
            "```",
            "",
            "| command | median | min | max | MB/s | of cp |",
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
            f"Goal without digests: {GOAL:.0%} of cp: {verdict} ({share:.0%}).",
            f"Largest resident memory of any of these processes: {peak:.0f} MiB.",
            "",
            environment_line(load),
            "",
            LIMITS.format(runs=runs),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--runs", type=int, default=5, help="timings of each arm")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the page beside this script")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source, out = make_draft(folder, int(arguments.gigabytes * 1e9)), folder / "out"
        size = (source / "model.safetensors").stat().st_size
        table = arms(source, out)
        times: dict[str, list[float]] = {label: [] for label in table}
        for number in range(arguments.runs + 1):  # the first round warms bytecode and page cache
            for label, commands in table.items():
                seconds = run(commands, out)
                if number:
                    times[label].append(seconds)
    text = page(times, size, arguments.runs, (before, os.getloadavg()[0]))
    print(text)
    if arguments.write:
        (HERE / f"convert-stream_{processor_slug()}_{month()}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
