"""Measure reading the headers of a hub's repository beside `huggingface_hub`, on a local hub.

Usage: python docs/benchmarks/hub_headers.py [--runs N] [--write]

The hub is `tests/mock_hub.py` in a process of its own: it lists a repository, answers byte ranges
and redirects weight files to another host, as the real one does, and can wait before each answer.
Arms alternate in one client process; each run has an empty client cache.

* specctl: `open_checkpoint("hf:...")`, which also reads config.json, lists the repository and pins
  its commit, and checks every header, the index and the ranges.
* huggingface_hub: `HfApi.get_safetensors_metadata`, which reads the index and the headers; once
  more with `hf_hub_download` of config.json before it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from checkpoint_shapes import SHAPES
from startup import HERE, ROOT, environment_line, month, processor, processor_slug

sys.path.insert(0, str(ROOT))

DRAFT = ROOT / "fixtures" / "drafts" / "smollm2-135m-eagle3"
REPOSITORIES = ("org/draft", "org/qwen3-32b", "org/deepseek-v3")
DELAYS_MS = (0, 20)
ARMS = ("specctl", "huggingface_hub", "huggingface_hub, with config")
PLACES = tuple((name, delay) for name in REPOSITORIES for delay in DELAYS_MS)
REPOSITORIES_TEXT = (
    "`org/draft` is one file, `org/qwen3-32b` 16 shards of 65 GB together, `org/deepseek-v3` 163 "
    "shards of 688 GB."
)
ONE_FILE_TEXT = (
    "`huggingface_hub` reads neither config.json nor the list of files. For shards that makes no "
    "difference, since it asks which of two layouts there is; for one file specctl makes one "
    "request more than it, and one less than when config.json is fetched as well (third arm)."
)
LIMITS = (
    "*Limits.* One machine, {runs} runs of each arm in alternation; the server is a Python process "
    "on the same CPUs, so that its own work is in both arms' times. The delay stands for the time "
    "that a hub takes for each answer; the bandwidth is that of the loopback device, without "
    "encryption. Requests to the storage host that a redirect leads to are counted as well; "
    "one that the client makes for itself once in a process (`/api/agent-harnesses`) is not."
)


class Figure(NamedTuple):
    """One run: seconds, requests and bytes of answers."""

    wall_s: float
    num_requests: int
    num_bytes: int


def repository_files(directory: Path) -> dict[str, object]:
    """Return name -> content; of a weight file only the header is kept."""
    from tests.mock_hub import Sparse

    files: dict[str, object] = {}
    for path in directory.iterdir():
        if path.suffix != ".safetensors":
            files[path.name] = path.read_bytes()
            continue
        with path.open("rb") as stream:
            length = stream.read(8)
            head = length + stream.read(int.from_bytes(length, "little"))
        files[path.name] = Sparse(head, path.stat().st_size)
    return files


def serve(connection: Connection, places: dict[str, Path]) -> None:
    """Run the hub until told to stop; answer with what was asked of it since the last reset."""
    from tests.mock_hub import Repo, serving

    repos = {name: Repo(files=repository_files(path)) for name, path in places.items()}  # type: ignore[arg-type]
    with serving(repos) as hub:
        connection.send(hub.endpoint)
        while (message := connection.recv()) != "stop":
            if isinstance(message, float):
                hub.delay_s = message
                hub.seen.clear()
            seen = [s for s in hub.seen if "agent-harnesses" not in s.path]
            connection.send((len(seen), sum(s.num_bytes for s in seen)))


def arms() -> dict[str, Callable[[str], dict[str, list[int]]]]:
    """Return arm -> function of a repository that gives tensor names and shapes."""
    from huggingface_hub import HfApi, hf_hub_download

    from specctl.checkpoint import open_checkpoint

    def ours(name: str) -> dict[str, list[int]]:
        found = open_checkpoint(f"hf:{name}")
        errors = [d.oneline() for d in found.diagnostics if d.severity == "error"]
        if errors:
            raise RuntimeError(errors[0])
        return {key: list(entry.shape) for key, entry in found.tensors.items()}

    def theirs(name: str) -> dict[str, list[int]]:
        found = HfApi(endpoint=os.environ["HF_ENDPOINT"]).get_safetensors_metadata(name)
        return {
            key: list(info.shape)
            for file in found.files_metadata.values()
            for key, info in file.tensors.items()
        }

    def theirs_with_config(name: str) -> dict[str, list[int]]:
        hf_hub_download(name, "config.json", endpoint=os.environ["HF_ENDPOINT"])
        return theirs(name)

    return dict(zip(ARMS, (ours, theirs, theirs_with_config), strict=True))


Results = dict[tuple[str, int, str], list[Figure]]


def measure(connection: Connection, runs: int) -> Results:
    """Return (repository, delay in ms, arm) -> figures."""
    import huggingface_hub.constants as constants

    functions = arms()
    results: Results = {}
    for name in REPOSITORIES:
        for delay_ms in DELAYS_MS:
            for number in range(runs + 1):
                answers = []
                turn = number % len(ARMS)  # each arm is first, second and last equally often
                for arm in (*ARMS[turn:], *ARMS[:turn]):
                    function = functions[arm]
                    connection.send(delay_ms / 1e3)
                    connection.recv()
                    with tempfile.TemporaryDirectory() as cache:
                        constants.HF_HUB_CACHE = cache
                        start = time.perf_counter()
                        answers.append(function(name))
                        wall_s = time.perf_counter() - start
                    connection.send("counts")
                    if number:  # the first round warms connections and imports
                        figure = Figure(wall_s, *connection.recv())
                        results.setdefault((name, delay_ms, arm), []).append(figure)
                    else:
                        connection.recv()
                if any(answer != answers[0] for answer in answers):
                    raise RuntimeError(f"{name}: the arms read different tensors")
    return results


def row(key: tuple[str, int, str], figures: list[Figure]) -> str:
    walls = [figure.wall_s * 1e3 for figure in figures]
    requests = sorted({figure.num_requests for figure in figures})
    megabytes = statistics.median(figure.num_bytes for figure in figures) / 1e6
    counts = "-".join(map(str, requests if len(requests) < 3 else (requests[0], requests[-1])))
    return (
        f"| {key[0]} | {key[1]} | {key[2]} | {counts} | {megabytes:.2f} | "
        f"{statistics.median(walls):.0f} | {min(walls):.0f} | {max(walls):.0f} |"
    )


def comparison(results: Results) -> str:
    """Say where the first arm takes longer, and where it makes more requests, than the second."""

    def figures(place: tuple[str, int], arm: str) -> list[Figure]:
        return results[(place[0], place[1], arm)]

    def median(place: tuple[str, int], arm: str) -> float:
        return statistics.median(figure.wall_s for figure in figures(place, arm)) * 1e3

    def requests(place: tuple[str, int], arm: str) -> int:
        return max(figure.num_requests for figure in figures(place, arm))

    slower = [
        f"{place[0]} with {place[1]} ms ({median(place, ARMS[0]):.0f} against "
        f"{median(place, ARMS[1]):.0f} ms)"
        for place in PLACES
        if median(place, ARMS[0]) > median(place, ARMS[1])
    ]
    more = [p[0] for p in PLACES if requests(p, ARMS[0]) > requests(p, ARMS[1])]
    return (
        f"Goal: no more requests than `{ARMS[1]}`, and no slower. More requests: "
        f"{', '.join(sorted(set(more))) or 'nowhere'}. Slower: {', '.join(slower) or 'nowhere'}."
    )


def page(results: Results, runs: int, load: tuple[float, float]) -> str:
    """Return the Markdown page."""
    import huggingface_hub

    return "\n".join(
        [
            f"# Headers of a hub's repository, {processor()}, {month()}",
            "",
            "Requests and milliseconds until every tensor's name, dtype, shape and place is known.",
            REPOSITORIES_TEXT,
            "",
            "```sh",
            f"python docs/benchmarks/hub_headers.py --runs {runs} --write",
            "```",
            "",
            "| repository | delay, ms | arm | requests | MB | median, ms | min | max |",
            "|---|---:|---|---:|---:|---:|---:|---:|",
            *(row(key, results[key]) for key in ((*p, arm) for p in PLACES for arm in ARMS)),
            "",
            ONE_FILE_TEXT,
            "",
            comparison(results),
            "",
            environment_line(load).rstrip(".")
            + f"; huggingface_hub {huggingface_hub.__version__}.",
            "",
            LIMITS.format(runs=runs),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="timings of each arm")
    parser.add_argument("--write", action="store_true", help="write the page beside this script")
    arguments = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        places = {"org/draft": DRAFT}
        for name in REPOSITORIES[1:]:
            places[name] = Path(directory) / name.rpartition("/")[2]
            SHAPES[places[name].name](places[name])
        context = multiprocessing.get_context("spawn")
        connection, other = context.Pipe()
        process = context.Process(target=serve, args=(other, places))
        process.start()
        os.environ["HF_ENDPOINT"] = connection.recv()
        try:
            results = measure(connection, arguments.runs)
        finally:
            connection.send("stop")
            process.join()
    text = page(results, arguments.runs, (before, os.getloadavg()[0]))
    print(text)
    if arguments.write:
        (HERE / f"hub-headers_{processor_slug()}_{month()}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
