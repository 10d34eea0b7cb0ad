"""One entry for all fuzzing: files in a directory, the whole path of `inspect`, and its promises.

The promises: no exception; every finding has a code, a place and one line; what JSON or the
safetensors library refuses has an error; at most 64 MiB beyond what was there, at most one second
of processor time. The time is held where SPECCTL_CHECK_CPU is set (the nightly script, on an idle
machine): a shared core makes any limit a matter of luck, and what never ends meets pytest-timeout.
Hypothesis, atheris and the tests of bad input all come through here.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from specctl.contract.codes import CODES
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.inspect import inspect
from specctl.ops.report import InspectReport

Files = Mapping[str, bytes]

MAX_GROWTH_BYTES = 64 << 20
MAX_CPU_S = 1.0
IS_CPU_CHECKED = bool(os.environ.get("SPECCTL_CHECK_CPU"))
_MEMORY = Path("/dev/shm")
_FOLDER = _MEMORY if _MEMORY.is_dir() else None


class Cost(NamedTuple):
    """What one inspection took."""

    cpu_s: float
    growth_bytes: int


@contextmanager
def directory(files: Files) -> Iterator[Path]:
    """Put `files` into a new directory, in memory where there is such a file system."""
    root = Path(tempfile.mkdtemp(prefix="specctl-fuzz-", dir=_FOLDER))
    try:
        for name, data in files.items():
            (root / name).write_bytes(data)
        yield root
    finally:
        shutil.rmtree(root)


def resident_bytes(field: str) -> int:
    """Return `VmRSS` or `VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measured(source: Path, target: Path | None) -> tuple[InspectReport, Cost]:
    """Return the report and its cost.

    Processor time grows when other work shares the core, so that a slow run is repeated: the
    shortest of three is what the input costs.
    """
    report, cost = measured_once(source, target)
    for _ in range(2):
        if IS_CPU_CHECKED and cost.cpu_s > MAX_CPU_S:
            _, again = measured_once(source, target)
            cost = cost._replace(cpu_s=min(cost.cpu_s, again.cpu_s))
    return report, cost


def measured_once(source: Path, target: Path | None) -> tuple[InspectReport, Cost]:
    """Return the report and the cost of making it once."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    before, start = resident_bytes("VmRSS"), time.process_time()
    report = inspect(str(source), None if target is None else str(target))
    text = msgspec.json.encode(report)
    cpu_s = time.process_time() - start
    growth = resident_bytes("VmHWM") - before
    json.loads(text)
    return report, Cost(cpu_s=cpu_s, growth_bytes=growth)


def check_cpu(cost: Cost, limit_s: float) -> None:
    """Hold a limit of processor time where that is asked for."""
    assert not IS_CPU_CHECKED or cost.cpu_s <= limit_s, cost


def judge(files: Files, target: Path | None = None, *, draft: Path | None = None) -> InspectReport:
    """Inspect `files` and hold the promises; returns the report.

    Args:
        files: of the directory under test.
        target: a sound target to compare with.
        draft: a sound draft; `files` are its target then.
    """
    with directory(files) as root:
        source, other = (root, target) if draft is None else (draft, root)
        report, cost = measured(source, other)
        _check_findings(report)
        assert cost.growth_bytes <= MAX_GROWTH_BYTES, cost
        check_cpu(cost, MAX_CPU_S)
        codes = {item.code for item in report.diagnostics if item.severity == "error"}
        if draft is None:
            for problem in problems(files, root):
                assert codes, f"{problem}, and nothing is an error"
        if not codes and other is not None:
            with suppress(DiagnosticError):  # a code is a right answer, anything else is not
                emit_manifest(str(other), str(source))
    return report


def _check_findings(report: InspectReport) -> None:
    for item in report.diagnostics:
        assert item.code in CODES
        assert item.where
        for text in (item.where, item.message, item.expected, item.found):
            assert text is None or (text.isprintable() and len(text) <= 4000), item


def problems(files: Files, root: Path) -> Iterator[str]:
    """Yield what others refuse: files that are no JSON, weight files that the library rejects."""
    for name in ("config.json", "model.safetensors.index.json"):
        if name in files and not _is_json_object(files[name]):
            yield f"{name} is not a JSON object"
    if "model.safetensors" in files and "model.safetensors.index.json" not in files:
        try:
            with safe_open(root / "model.safetensors", "np"):
                pass
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            yield f"model.safetensors: {error}"


def _is_json_object(raw: bytes) -> bool:
    def refuse(word: str) -> float:
        if word == "NaN":
            raise ValueError(word)
        return 0.0  # Python writes infinities, and a warning (SD134) is enough for one

    try:
        value: Any = json.loads(raw.decode("utf-8-sig"), parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)
