"""Runs `interpreted.py` with TRITON_INTERPRET=1, which must be set before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 580  # half a minute on an idle machine
GROUPS = (
    (
        "interpreted",
        "interpreted_blocks",
        "interpreted_filters",
        "interpreted_ngram",
        "interpreted_reduced",
        "interpreted_round",
        "interpreted_sample",
    ),
    (
        "interpreted_host",
        "interpreted_draw",
        "interpreted_fused",
        "interpreted_normed",
        "interpreted_attention",
    ),
)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("files", GROUPS, ids=lambda files: files[-1])
def test_kernels_under_the_interpreter(files: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    plugins = ("-p", "no:cacheprovider", "-p", "tests.kernels.patch_once")
    command = [sys.executable, "-m", "pytest", *plugins]
    finished = subprocess.run(
        [*command, *(f"tests/kernels/{name}.py" for name in files)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
    assert "[100%]" in finished.stdout
