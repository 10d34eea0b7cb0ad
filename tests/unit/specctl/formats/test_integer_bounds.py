"""Numbers beyond what any engine holds: a code at the field, and never a manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl.contract.codec import dump_manifest, load_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.inspect import inspect

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
HUGE = (10**12, (1 << 31), (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, 10**400)
CLEAN = sorted(
    path.name for path in CHECKPOINTS.glob("*-clean") if (path / "config.json").is_file()
)


def integers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every integer in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from integers(item, (*path, key))
        elif type(item) is int:
            yield (*path, key)


def copy_with(source: Path, out: Path, path: tuple[Any, ...], value: int) -> None:
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    holder = config
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    (out / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CLEAN)
def test_every_integer_of_every_format(name: str, tmp_path: Path) -> None:
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    before = len(inspect(str(CHECKPOINTS / name)).diagnostics)
    for number, path in enumerate(integers(config)):
        out = tmp_path / str(number)
        copy_with(CHECKPOINTS / name, out, path, HUGE[number % len(HUGE)])
        report = inspect(str(out))
        json.loads(json.dumps([item.message for item in report.diagnostics]))
        assert len(report.diagnostics) >= before


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", ["max_position_embeddings", "bos_token_id", "eos_token_id"])
def test_a_manifest_reads_back_or_is_refused(key: str, value: int, tmp_path: Path) -> None:
    target, draft = CHECKPOINTS / "hf-llama-clean", CHECKPOINTS / "speculators-eagle3-clean"
    copy_with(target, tmp_path / "target", (key,), value)
    codes: set[str] = set()
    try:
        manifest = emit_manifest(str(tmp_path / "target"), str(draft))
        (tmp_path / "m.yaml").write_text(dump_manifest(manifest))
    except DiagnosticError as error:
        codes = {item.code for item in error.diagnostics}
    if codes:
        assert codes & {"SD207", "SD406"}
    else:
        assert load_manifest(tmp_path / "m.yaml") == manifest
