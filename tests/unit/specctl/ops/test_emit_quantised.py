"""A manifest needs plain weights: quantised ones are right for other engines and refused here."""

from __future__ import annotations

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from tests.unit.specctl.formats.edits import CHECKPOINTS


@pytest.mark.parametrize(
    ("target", "draft", "word"),
    [
        ("hf-llama-fp8", None, "21 weights"),
        ("hf-llama-tiny", "speculators-eagle3-fp8", "7 weights"),
    ],
)
def test_quantised_weights_are_refused_with_their_number(
    target: str, draft: str | None, word: str
) -> None:
    with pytest.raises(DiagnosticError) as raised:
        emit_manifest(
            str(CHECKPOINTS / target), None if draft is None else str(CHECKPOINTS / draft)
        )
    (found,) = [d for d in raised.value.diagnostics if d.code == "SD716"]
    assert word in found.message
    assert found.found == "F8_E4M3"
    assert "SD206" not in {d.code for d in raised.value.diagnostics}
