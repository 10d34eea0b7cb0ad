"""A grammar that cannot follow its request to other processes is refused at the door."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runtime.engine.decode_role import DecodeEngine
from runtime.engine.lockstep import LockstepLeader
from runtime.engine.request import RequestInput
from specctl.contract.diagnostics import DiagnosticError
from tests.tiny_grammar import Grammar, parity

WISH = RequestInput(request_id="r", prompt_ids_target=(5,), masks=Grammar(parity))


class Untouched:
    """Stands for everything behind the door."""

    slot_state = ()  # read when a decode server is built

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the request came to `{name}`")


engines = pytest.mark.parametrize(
    "engine",
    [
        LockstepLeader(Untouched(), Untouched(), 0, threading.Lock()),  # type: ignore[arg-type]
        DecodeEngine(Untouched(), port=Untouched(), name="d", block_bytes=()),  # type: ignore[arg-type]
    ],
    ids=["ranks", "decode server"],
)


@engines
def test_a_grammar_is_refused_where_other_processes_choose(
    engine: LockstepLeader | DecodeEngine,
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        engine.add_request(WISH)
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.where) == ("SD842", "request=r")


@engines
def test_requests_without_a_grammar_pass(engine: LockstepLeader | DecodeEngine) -> None:
    with pytest.raises(AssertionError, match="the request came to"):
        engine.add_request(RequestInput(request_id="r", prompt_ids_target=(5,)))
