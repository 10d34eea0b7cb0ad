"""`specctl manifest --verification` states the mode; the fingerprint follows."""

from __future__ import annotations

from pathlib import Path

from specctl.cli import app
from specctl.contract.codec import load_manifest
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.verification_mode import with_verification

TARGET = Path(__file__).parents[4] / "fixtures" / "checkpoints" / "hf-llama-clean"


def test_the_mode_is_given_and_the_fingerprint_covers_it(tmp_path: Path) -> None:
    seeded = emit_manifest(str(TARGET), None, manifest_dir=tmp_path)
    drawn = with_verification(seeded, "rejection")
    assert seeded.sampling.verification == "seeded"
    assert drawn.sampling.verification == "rejection"
    assert drawn.origins["sampling"].kind == "given"
    assert drawn.fingerprint != seeded.fingerprint
    assert with_verification(seeded, "seeded").fingerprint == seeded.fingerprint


def test_a_written_manifest_with_the_mode_loads(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    assert app.run(["manifest", str(TARGET), "-o", str(path), "--verification", "rejection"]) == 0
    assert load_manifest(path).sampling.verification == "rejection"
