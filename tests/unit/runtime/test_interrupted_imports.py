"""Ctrl-C while packages are imported, some of which catch everything that is raised meanwhile."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from runtime.main import import_interruptibly

SWALLOWS = """
import signal

try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass
"""


def test_ctrl_c_that_an_import_swallows_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swallows_interrupts.py").write_text(SWALLOWS)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        import_interruptibly("swallows_interrupts")
    assert "swallows_interrupts" in sys.modules
    assert signal.getsignal(signal.SIGINT) is before
    import_interruptibly("swallows_interrupts")  # nobody pressed anything
