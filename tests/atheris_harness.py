"""Coverage-guided fuzzing of the same entry as tests/property/test_fuzz.py.

Usage: python -m tests.atheris_harness -runs=200000 (needs atheris; CPython 3.10 to 3.13 on Linux)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["specctl"]):
    from tests.fuzz_entry import judge
    from tests.fuzz_strategies import CHECKPOINTS, CONFIG, INDEX, WEIGHTS, fixture, with_length

TARGET = CHECKPOINTS / "hf-llama-clean"
BASES = ("hf-llama-clean", "speculators-eagle3-clean", "deepseek-mtp-clean")


def one_input(data: bytes) -> None:
    """Put the input in one place of a sound checkpoint and hold the promises."""
    provider = atheris.FuzzedDataProvider(data)
    files = dict(fixture(BASES[provider.ConsumeIntInRange(0, len(BASES) - 1)]))
    place = provider.ConsumeIntInRange(0, 4)
    text = provider.ConsumeBytes(provider.remaining_bytes())
    if place == 0:
        files[WEIGHTS] = with_length(text)
    elif place == 1:
        files[WEIGHTS] = text
    elif place == 2:
        files[INDEX] = text
    else:
        files[CONFIG] = text
    judge(files, TARGET if place == 4 else None)


def write_seeds(folder: Path) -> None:
    """Write sound texts of each place; the provider takes its numbers from the end of an input."""
    index = json.dumps({"weight_map": {"norm.weight": WEIGHTS}}).encode()
    for number, base in enumerate(BASES):
        files = fixture(base)
        header = files[WEIGHTS][8 : 8 + int.from_bytes(files[WEIGHTS][:8], "little")]
        texts = (header, files[WEIGHTS], index, files[CONFIG], files[CONFIG])
        for place, text in enumerate(texts):
            (folder / f"{number}-{place}").write_bytes(text + bytes([place, number]))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write_seeds(Path(name))
        atheris.Setup([*sys.argv, name], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
