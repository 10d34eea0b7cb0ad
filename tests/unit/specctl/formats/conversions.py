"""Convert fixtures in tests: run, read back, explain a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from specctl import formats
from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.draft import DraftCheckpoint
from specctl.ops.convert import convert
from specctl.ops.convert_report import ConvertReport
from specctl.ops.given import Given
from tests.unit.specctl.formats.edits import CHECKPOINTS

EXPECTED = yaml.safe_load((CHECKPOINTS.parent / "expected.yaml").read_text("utf-8"))
GIVEN = Given(num_speculative_tokens=4, target_name="example/tiny-llama")


def target_of(name: str) -> str | None:
    listed = EXPECTED.get(f"checkpoints/{name}", {}).get("target")
    return None if listed is None else str(CHECKPOINTS.parent / listed)


def run(source: str, to: str, out: Path, **options: Any) -> ConvertReport:
    if "/" not in source:
        options.setdefault("target", target_of(source))
        source = str(CHECKPOINTS / source)
    return convert(source, to=to, out=str(out), **{"given": GIVEN, **options})


def read(place: Path | str, target: str | None) -> tuple[Checkpoint, DraftCheckpoint]:
    checkpoint = open_checkpoint(place)
    draft = formats.read_draft(checkpoint)
    if target is not None:
        draft = formats.complete_draft(draft, formats.read_target(open_checkpoint(target)))
    return checkpoint, draft


def bytes_by_role(checkpoint: Checkpoint, draft: DraftCheckpoint) -> dict[str, bytes]:
    return {role: checkpoint.read_bytes(ref.key) for role, ref in draft.tensors.items()}


def config_of(place: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((place / "config.json").read_text("utf-8"))
    return loaded


def refusals(report: ConvertReport) -> list[str]:
    assert report.state == "refused"
    return [f"{d.code} {d.message}" for d in report.diagnostics if d.severity == "error"]
