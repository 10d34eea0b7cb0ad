"""Measure what token maps cost and save with the real MTP draft of SmolLM2-135M.

Each line of the tables is an engine start of its own (a process: a "boot"), so that a map is never
compared inside one process only. Parts, which go on from the boots already in `--output`:

- `heads`: the target alone answers GSM8K and HumanEval questions; `build-token-map` counts these
  answers and cuts 16,384 ids. Then 80 MT-Bench prompts with the full head, that map and the draft's
  own: texts must be the target's; the loss of accepted drafts beside what each map leaves out.
- `restarts`: off, off, on, off, on at concurrency 1: acceptance and step time for each class.
- `dynamic`: either map alone, with the request's own ids, and with a projection of the head.

No prompt of the classes or of MT-Bench is one whose answer was counted.

    python docs/benchmarks/reduced_maps.py --target DIR --draft DIR --data DIR --output DIR

On a CPU (float32), at sizes that prove the script and measure nothing:

    python docs/benchmarks/reduced_maps.py --target DIR --draft DIR --data DIR --output DIR \
        --device cpu --limit 2 --tokens 8 --count-tokens 32 --long-tokens 150 --passes 1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reduced_classes import class_prompts, counting_prompts, mt_bench
from reduced_tables import tables

from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from specctl.contract.codec import dump_manifest
from specctl.ops.emit_manifest import emit_manifest

GAMMA = 3
SIZE = 16_384
DYNAMIC = {"rows": {"dynamic_rows": 64}, "rank": {"dynamic_rows": 64, "dynamic_rank": 256}}
RESTARTS = {
    "off-1": "full",
    "off-2": "full",
    "on-1": "map-16384",
    "off-3": "full",
    "on-2": "map-16384",
}


def boot(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, answer every set of prompts, and return texts, counts and times.

    The first pass over a set warms up and gives the texts; `passes` timed ones must repeat them.
    """
    start = time.perf_counter()
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in job["settings"].items()
    }
    llm = LLM.from_manifest(job["manifest"], Overrides(**settings), needs_tokenizer=False)
    found: dict[str, Any] = {"start_s": time.perf_counter() - start, "sets": {}}
    for name, part in job["sets"].items():
        requests = [
            RequestInput(
                request_id=str(number), prompt_ids_target=tuple(ids), max_tokens=part["max_tokens"]
            )
            for number, ids in enumerate(part["prompts"])
        ]
        first = answered(llm, requests)
        timed = [answered(llm, requests) for _ in range(job["passes"])]
        if any(one["ids"] != first["ids"] for one in timed):
            raise SystemExit(f"{name}: two passes of one engine gave other tokens")
        found["sets"][name] = first | {"decode_s": [one["decode_s"] for one in timed]}
    stats = llm.engine.stats()
    found["device_rounds"] = stats.num_device_rounds
    found["graphs"], found["capture_s"] = stats.graphs.num_graphs, stats.graphs.capture_s
    return found


def answered(llm: LLM, requests: Sequence[RequestInput]) -> dict[str, Any]:
    """Return one pass; `decode_s` sums, over requests, first to last delta: a meaning one by one.

    The last token of a round is the target's own: the ones before it are accepted drafts.
    """
    marks: dict[str, list[float]] = {one.request_id: [] for one in requests}
    accepted: list[int] = []

    def take(delta: Any) -> None:
        marks[delta.request_id].append(time.perf_counter())
        accepted.extend(delta.ids_target[:-1])

    batches = [requests] if llm.config.max_num_requests > 1 else [[one] for one in requests]
    done = [answer for batch in batches for answer in llm.generate(batch, on_delta=take)]
    return {
        "ids": [list(answer.ids_target) for answer in done],
        "rounds": [answer.usage.num_rounds for answer in done],
        "accepted": [answer.usage.num_accepted_drafts for answer in done],
        "accepted_ids": accepted,
        "decode_s": sum(times[-1] - times[0] for times in marks.values()),
    }


class Bench:
    """Starts boots and keeps what they return in `--output`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Make the folders; maps are found by the names that heads have."""
        self.arguments = arguments
        self.output: Path = arguments.output
        self.maps: dict[str, Path | None] = {
            "full": None,
            "map-16384": self.output / "map" / "token_map.json",
            "map-8192": arguments.draft / "token_map_8192.json",
        }
        self.failed: list[str] = []
        (self.output / "boots").mkdir(parents=True, exist_ok=True)

    def run(
        self, name: str, sets: dict[str, Any], *, head: str, passes: int = 0, **settings: Any
    ) -> dict[str, Any] | None:
        """Return a boot's result, that of an earlier call if there is one; None when it failed."""
        out = self.output / "boots" / f"{name}.json"
        if not out.is_file():
            job = {"manifest": str(self._manifest(head)), "sets": sets, "passes": passes}
            job["settings"] = {"device": self.arguments.device, **settings}
            path = out.with_suffix(".job")
            path.write_text(json.dumps(job), encoding="utf-8")
            start = time.perf_counter()
            command = [sys.executable, __file__, "--boot", str(path), "--output", str(out)]
            code = subprocess.run(command, check=False).returncode
            print(f"{name}: {time.perf_counter() - start:.1f} s, exit {code}", flush=True)
            path.unlink()
        if out.is_file():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
        self.failed.append(name)
        return None

    def _manifest(self, head: str) -> Path:
        path = self.output / f"{head}.yaml"
        token_map = self.maps[head]
        manifest = emit_manifest(
            str(self.arguments.target),
            str(self.arguments.draft),
            manifest_dir=self.output,
            num_speculative_tokens=GAMMA,
            token_map=None if token_map is None else str(token_map),
        )
        path.write_text(dump_manifest(manifest), encoding="utf-8")
        return path

    def heads(self) -> None:
        """Answer with the target alone, cut the map of its answers, then compare heads."""
        given = self.arguments
        prompts = mt_bench(given.data)[: given.limit]
        counted = counting_prompts(self.arguments.target, given.data, limit=given.limit)
        many = {"max_num_requests": given.concurrency, "batch_buckets": [given.concurrency]}
        many |= {"max_model_len": 1024, "num_kv_blocks": 64 * given.concurrency + 8}
        sets = {
            name: {"prompts": rows, "max_tokens": given.count_tokens}
            for name, rows in counted.items()
        }
        questions = {"mt_bench": {"prompts": prompts, "max_tokens": given.tokens}}
        alone = self.run("target", sets | questions, head="full", proposer="none", **many)
        if alone is None:
            return
        self._cut({name: alone["sets"][name]["ids"] for name in counted}, alone)
        for head in self.maps:
            self.run(f"heads-{head}", questions, head=head, **many)

    def _cut(self, answers: dict[str, list[list[int]]], alone: dict[str, Any]) -> None:
        """Count the answers with `build-token-map`; it reports coverage of the MT-Bench answers."""
        if (self.output / "map.json").is_file():
            return
        corpus = []
        for name, texts in answers.items():
            path = self.output / f"{name}.npy"
            np.save(path, np.array([token for ids in texts for token in ids], dtype=np.uint16))
            corpus.append(f"{name}={path}")
        outputs = self.output / "mt_bench_answers.jsonl"
        lines = [json.dumps({"ids": ids}) for ids in alone["sets"]["mt_bench"]["ids"]]
        outputs.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["build-token-map", *corpus, "--tokenizer", str(self.arguments.target)]
        command += ["--size", str(SIZE), "--held-out", "0", "--outputs", str(outputs)]
        command += ["--json", "-o", str(self.output / "map")]
        done = subprocess.run(
            [sys.executable, "-m", "specctl", *command], stdout=subprocess.PIPE, check=False
        )
        if not (self.output / "map" / "token_map.json").is_file():
            raise SystemExit(f"build-token-map wrote no map, exit {done.returncode}")
        (self.output / "map.json").write_bytes(done.stdout)

    def classes(self, arms: Sequence[tuple[str, str, dict[str, int]]]) -> None:
        """Boot each arm (name, head, dynamic rows) at concurrency 1 and answer every class."""
        given = self.arguments
        kept = [
            frozenset(json.loads(path.read_text(encoding="utf-8")))
            for path in self.maps.values()
            if path is not None
        ]
        prompts = class_prompts(
            self.arguments.target, given.data, limit=given.limit or given.prompts,
            long_tokens=given.long_tokens, kept=frozenset[int]().union(*kept),
        )  # fmt: skip
        sets = {
            name: {"prompts": rows, "max_tokens": given.tokens} for name, rows in prompts.items()
        }
        one = {"max_num_requests": 1, "max_model_len": 8192, "num_kv_blocks": 520}
        one |= {"enable_prefix_cache": False}
        self.run("classes-target", sets, head="full", passes=given.passes, proposer="none", **one)
        for name, head, dynamic in arms:
            self.run(f"classes-{name}", sets, head=head, passes=given.passes, **one, **dynamic)


def main() -> None:
    """Run the parts, or one boot in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--boot", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--draft", type=Path, help="folder of the MTP draft and its map")
    parser.add_argument("--data", type=Path, help="holds gsm8k, humaneval, mt_bench and prompts")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=["heads", "restarts", "dynamic"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--concurrency", type=int, default=16, help="of the part `heads`")
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--prompts", type=int, default=5, help="prompts of each class")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--count-tokens", type=int, default=256, help="of each counted answer")
    parser.add_argument("--long-tokens", type=int, default=7500, help="prompt of the long class")
    parser.add_argument("--passes", type=int, default=2, help="timed passes of each boot")
    given = parser.parse_args()
    if given.boot is not None:
        job = json.loads(given.boot.read_text(encoding="utf-8"))
        given.output.write_text(json.dumps(boot(job)), encoding="utf-8")
        return
    if given.target is None or given.draft is None or given.data is None:
        parser.error("--target, --draft and --data say where the inputs are")
    bench, parts = Bench(given), given.part or ["heads", "restarts", "dynamic"]
    if "heads" not in parts and not (given.output / "map" / "token_map.json").is_file():
        parser.error(f"{given.output} has no map: run the part `heads` into it first")
    if "heads" in parts:
        bench.heads()
    if "restarts" in parts:
        bench.classes([(name, head, {}) for name, head in RESTARTS.items()])
    if "dynamic" in parts:
        bench.classes(
            [
                (head + suffix, head, settings)
                for head in ("map-16384", "map-8192")
                for suffix, settings in (("", {}), *((f"-{n}", d) for n, d in DYNAMIC.items()))
                if suffix or head == "map-8192"  # the other one is the arm `on`
            ]
        )
    tables(given.output, bench.maps, device=given.device, command=" ".join(sys.argv))
    if bench.failed:
        raise SystemExit(f"boots that failed: {', '.join(bench.failed)}")


if __name__ == "__main__":
    main()
