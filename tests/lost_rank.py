"""A process over two ranks or stages, one of which is killed or stopped amid requests.

    python -m tests.lost_rank MANIFEST DEVICE tp|pp SIGKILL|SIGSTOP RANK_TIMEOUT_S

It prints what ended it and how states or sums travelled, and ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runtime.engine.llm import LLM
from runtime.engine.request import RequestDelta, RequestInput
from specctl.contract.diagnostics import DiagnosticError
from tests.parallel_cases import REQUESTS, small

LAYOUTS = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}


def code_of(llm: LLM, requests: Sequence[RequestInput], child: int, number: int) -> str:
    """Return the code that requests end with once `child` has got a signal at the third delta."""
    num_seen = 0

    def on_delta(_: RequestDelta) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 3:
            os.kill(child, number)

    try:
        llm.generate(requests, on_delta=on_delta)
    except DiagnosticError as error:
        return error.diagnostics[0].code
    return "none"


def main(manifest: Path, device: str, layout: str, name: str, rank_timeout_s: float) -> None:
    """Lose a rank, ask again, and end."""
    overrides = replace(small(device), rank_timeout_s=rank_timeout_s, **{LAYOUTS[layout]: 2})
    llm = LLM.from_manifest(manifest, overrides, needs_tokenizer=False)
    try:
        peers = llm.staged.peers
        assert peers is not None
        (child,) = peers._started.children
        llm.generate(REQUESTS)  # everything is connected and compiled
        codes = [code_of(llm, REQUESTS, child.pid, signal.Signals[name])]
        codes.append("none" if llm.problem is None else llm.problem.code)
        llm.engine.check()
    finally:
        llm.close()
    is_over = child.poll() is not None
    print(*codes, llm.transport, f"child-is-over={is_over}", flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5], float(sys.argv[5]))
