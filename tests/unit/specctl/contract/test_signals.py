"""Handlers are set for a while and put back, whatever ends the while."""

from __future__ import annotations

import signal
import threading

import pytest

from specctl.contract.signals import INTERRUPTS, handled


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in INTERRUPTS]


def test_signals_are_handled_in_the_body_and_as_before_after_it() -> None:
    before, heard = handlers(), []
    with handled(INTERRUPTS, lambda number, _: heard.append(number)):
        for number in INTERRUPTS:
            signal.raise_signal(number)
        with handled([signal.SIGTERM], signal.SIG_IGN):
            signal.raise_signal(signal.SIGTERM)
    assert heard == list(INTERRUPTS)
    assert handlers() == before


def test_an_exception_in_the_body_puts_handlers_back() -> None:
    before = handlers()

    def body() -> None:
        assert handlers() == [signal.SIG_DFL, signal.SIG_DFL]
        raise LookupError

    with pytest.raises(LookupError), handled(INTERRUPTS, signal.SIG_DFL):
        body()
    assert handlers() == before


def test_another_thread_changes_nothing() -> None:
    before, seen = handlers(), []

    def body() -> None:
        with handled(INTERRUPTS, signal.SIG_IGN):
            seen.append(handlers())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
