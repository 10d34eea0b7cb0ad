"""Measure counting token ids that lie in files, in one process and one thread, by processor time.

    python docs/benchmarks/token_id_counting.py CORPUS --tokenizer DIR --work DIR

Texts of the corpus are encoded once (an equal share of each directory), the ids repeated until
there are `--million` of them, and written in each form that `build-token-map` reads. A pass is
`count_ids` over one file, split and range checks included, page cache warm; counts of every form
must be those of all ids. Last comes the command itself, with all that it writes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from startup import environment_line

from specctl.tokenmap.counting import load_tokenizer
from specctl.tokenmap.sources import SourceFile, find_files
from specctl.tokenmap.token_ids import IdType, count_ids

GOAL = 300.0
HELD_OUT = (1 << 64) // 10
FORMS: dict[str, tuple[str, IdType | None]] = {
    "ids-u16.bin": ("<u2", "u16"),
    "ids-u32.bin": ("<u4", "u32"),
    "ids-i64.bin": ("<i8", "i64"),
    "ids-u32.npy": ("<u4", None),
}


def encoded(corpus: str, tokenizer: Path, num_bytes: int) -> np.ndarray:
    """Return the ids of the first texts of each directory, at most `num_bytes` in all."""
    loaded = load_tokenizer(tokenizer)
    files: dict[str, list[SourceFile]] = {}
    for file in find_files([corpus]):
        files.setdefault(file.domain, []).append(file)
    ids: list[int] = []
    for group in files.values():
        left = num_bytes // len(files)
        for file in group:
            text = Path(file.path).read_text(encoding="utf-8", errors="replace")
            left -= len(text.encode())
            if left < 0:
                break
            ids.extend(loaded.handle.encode(text, add_special_tokens=False).ids)
    return np.array(ids, dtype=np.int64)


def main() -> None:
    """Make the files, count each of them, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--work", type=Path, required=True, help="where the files of ids go")
    parser.add_argument("--million", type=int, default=200, help="ids of each file")
    parser.add_argument("--text-mb", type=int, default=40, help="text that is encoded")
    parser.add_argument("--passes", type=int, default=5)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    path = given.tokenizer / "tokenizer.json"
    size = load_tokenizer(path).size
    some = encoded(given.corpus, path, given.text_mb * 1_000_000)
    ids = np.resize(some, given.million * 1_000_000)
    print(
        f"{len(some):,} ids of text, {len(np.unique(some)):,} different, repeated to {len(ids):,}"
    )
    given.work.mkdir(parents=True, exist_ok=True)
    forms = {name: form for name, form in FORMS.items() if np.iinfo(form[0]).max >= size - 1}
    for name, (dtype, _) in forms.items():
        values = ids.astype(dtype)
        if name.endswith(".npy"):
            np.save(given.work / name, values)
        else:
            values.tofile(given.work / name)
    expected = np.bincount(ids, minlength=size)
    print("\n| file | Mtok/s of one core, median (range) | goal | counts |\n|---|---:|---:|---|")
    for name, (_, id_type) in forms.items():
        (file,) = find_files([str(given.work / name)])
        speeds, is_equal = [], True
        for _ in range(given.passes + 1):  # the first one warms the page cache
            start = time.process_time()
            found = count_ids([file], size=size, id_type=id_type, held_below=HELD_OUT)
            speeds.append(len(ids) / 1e6 / (time.process_time() - start))
            total = sum(counts for counts, _, _ in found.values())
            is_equal &= bool(np.array_equal(total, expected))
        del speeds[0]
        told = f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"
        print(f"| {name} | {told} | {GOAL:.0f} | {'equal' if is_equal else 'OTHER'} |")
    name, (_, id_type) = next(iter(forms.items()))
    command = ["build-token-map", str(given.work / name), "--id-type", str(id_type)]
    command += ["--tokenizer", str(given.tokenizer), "--size", "16k", "--json"]
    command += ["-o", str(given.work / "map")]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "specctl", *command], stdout=subprocess.PIPE, check=False
    )
    seconds = time.perf_counter() - start
    built = json.loads(done.stdout)["maps"][0]["size"]
    print(f"\n`build-token-map {name}`, whole: {seconds:.1f} s for a map of {built:,} ids")
    print(f"{environment_line((load, os.getloadavg()[0]))} numpy {np.__version__}.")


if __name__ == "__main__":
    main()
