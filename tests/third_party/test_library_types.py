"""What Speculators 0.9.0 writes, for each type it registers, inspects clean; so does what we write
from it, and the library computes the same with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.ops.convert import convert
from specctl.ops.load import load
from specctl.ops.validate import validate
from tests.third_party.library import Library
from tests.third_party.library_configs import TYPES, config_of_type, ids_of


@pytest.fixture
def target(checkpoints: Path) -> Path:
    return checkpoints / "hf-llama-clean"


@pytest.mark.parametrize("name", TYPES)
def test_files_of_the_library_are_clean_and_survive_a_conversion(
    library: Library, target: Path, tmp_path: Path, name: str
) -> None:
    saved, ours = tmp_path / "saved", tmp_path / "ours"
    library.build(saved, config_of_type(name, target), ids_of(name))
    report = validate([str(saved)], target=str(target))
    assert [(d.code, d.message) for r in report.results for d in r.diagnostics
            if d.severity != "info"] == []  # fmt: skip
    draft = load(str(saved)).draft
    assert draft is not None
    assert not draft.unmapped
    assert not draft.unknown_fields

    written = convert(str(saved), to="speculators", out=str(ours), target=str(target))
    assert [d.message for d in written.diagnostics if d.severity == "error"] == []
    before = library.load(saved)
    assert set(before.missing) <= {"embed_tokens.weight", "lm_head.weight"}
    after = library.load(ours, may_miss=before.missing)  # what its own files take from the target
    after.assert_strict()
    assert before.digests == after.digests
    assert library.trace(saved) == library.trace(ours)
