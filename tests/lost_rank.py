"""A process over two ranks or stages, one of which is killed or stopped amid a forward.

    python -m tests.lost_rank MANIFEST DEVICE tp|pp SIGKILL|SIGSTOP RANK_TIMEOUT_S

It prints what ended it and how states or sums travelled, and ends by itself. The signal comes when
this rank has begun a step with the other one and waits for it next: over NCCL, on the device.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.engine.llm import LLM
from runtime.parallel.hand_off import NcclHandOff
from specctl.contract.diagnostics import DiagnosticError
from tests.parallel_cases import REQUESTS, small

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel": 2},
    "pp": {"pipeline_parallel": 2, "stages_in_process": False},
}
AT_CALL = 3


def before_call(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Act before one of the next calls of a method."""
    original, num_calls = getattr(owner, name), 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == AT_CALL:
            act()
        return original(*arguments, **named)

    setattr(owner, name, called)


def lose(llm: LLM, layout: str, child: int, number: int) -> str:
    """Return the code that requests end with once `child` has got a signal amid a step."""

    def act() -> None:
        os.kill(child, number)
        time.sleep(0.2)  # it has it before this rank goes on

    peers = llm.staged.peers
    assert peers is not None
    if layout == "tp":  # both have agreed on the step; the first sum comes
        before_call(llm.own_engine, "step", act)
    elif "nccl" in peers.groups.transport:  # the header is there; the states come
        before_call(NcclHandOff, "take", act)
    else:
        before_call(peers.lines[0], "receive", act)
    try:
        llm.generate(REQUESTS)
    except DiagnosticError as error:
        return error.diagnostics[0].code
    return "none"


def main(manifest: Path, device: str, layout: str, name: str, rank_timeout_s: float) -> None:
    """Lose a rank, ask what there is, and end."""
    overrides = replace(small(device), rank_timeout_s=rank_timeout_s, **LAYOUTS[layout])
    llm = LLM.from_manifest(manifest, overrides, needs_tokenizer=False)
    try:
        assert llm.staged.peers is not None
        (child,) = llm.staged.peers._started.children
        llm.generate(REQUESTS)  # everything is connected and compiled
        codes = [lose(llm, layout, child.pid, signal.Signals[name])]
        codes.append("none" if llm.problem is None else llm.problem.code)
        llm.engine.check()
    finally:
        llm.close()
    is_over = child.poll() is not None
    print(*codes, llm.transport, f"child-is-over={is_over}", flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5], float(sys.argv[5]))
