"""A role's engine over several processes ends with the first that is lost, and says so once."""

from __future__ import annotations

import pytest

from runtime.engine.request import Admission, RequestDelta, RequestInput
from runtime.engine.stats import EngineStats
from runtime.engine.until_lost import RANK_FAULTS, UntilLost
from specctl.contract.diagnostics import DiagnosticError, diagnose

REQUEST = RequestInput(request_id="r", prompt_ids_target=(1,))


class Scripted:
    """An engine whose steps raise what they are told."""

    has_work = True

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.aborted: list[str] = []
        self.num_flushes = 0

    def add_request(self, request: RequestInput) -> Admission:
        return Admission(request_id=request.request_id, seed=1)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    def step(self) -> tuple[RequestDelta, ...]:
        if self.errors:
            raise self.errors.pop(0)
        return ()

    def stats(self) -> EngineStats:
        raise AssertionError("not asked here")

    def flush_cache(self) -> None:
        self.num_flushes += 1


def fault(code: str) -> DiagnosticError:
    return DiagnosticError(diagnose(code, where="here", message="it broke"))


@pytest.mark.parametrize("code", sorted(RANK_FAULTS))
def test_a_lost_rank_ends_the_engine_once(code: str) -> None:
    ended: list[str] = []
    inner = Scripted(fault(code))
    engine = UntilLost(inner, on_lost=lambda: ended.append("ended"))
    assert engine.add_request(REQUEST).seed == 1
    with pytest.raises(DiagnosticError, match=code):
        engine.step()
    assert ended == ["ended"]
    assert not engine.has_work
    with pytest.raises(DiagnosticError, match=code):
        engine.add_request(REQUEST)
    assert engine.abort("r")
    assert inner.aborted == ["r"]
    engine.flush_cache()
    assert inner.num_flushes == 0


def test_other_faults_are_the_callers() -> None:
    ended: list[str] = []
    inner = Scripted(fault("SD916"), AssertionError("ours"))
    engine = UntilLost(inner, on_lost=lambda: ended.append("ended"))
    with pytest.raises(DiagnosticError, match="SD916"):
        engine.step()
    with pytest.raises(AssertionError, match="ours"):
        engine.step()
    assert engine.step() == ()
    assert engine.has_work
    engine.flush_cache()
    assert inner.num_flushes == 1
    assert ended == []
