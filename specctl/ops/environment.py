"""What this machine has: Python, the declared packages, memory, disk. Imports none of them.

Invariants: versions come from installed metadata, so asking for torch does not load torch; the list
of packages is the distribution's own metadata, never a second list.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from specctl import __version__

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?P<extras>\[[^\]]*\])?(?P<spec>[^;]*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]")
_PLATFORM = re.compile(r"platform_system\s*==\s*['\"](?P<system>[^'\"]+)['\"]")
_CLAUSE = re.compile(r"(>=|<=|==|<|>)\s*([0-9]+(?:\.[0-9]+)*)")
_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)*")

State = Literal["present", "missing", "wrong-version", "not-for-this-system"]


class PackageState(msgspec.Struct, frozen=True, kw_only=True):
    """One declared package and whether it is usable.

    Args:
        extra: the extra that asks for it, None for the core.
        required: version range as declared, empty for any.
        installed: version found, None when absent.
        fix: pip command that makes it usable, None when it is.
    """

    name: str
    extra: str | None
    required: str
    installed: str | None
    state: State
    fix: str | None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine; sizes in bytes, None where the system does not say."""

    specctl: str
    python: str
    system: str
    architecture: str
    cpus: int
    memory_available_bytes: int | None
    disk_free_bytes: int


def describe_machine(directory: Path) -> Machine:
    """Return the machine's facts; disk space is that of `directory`."""
    return Machine(
        specctl=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpus=_usable_cpus(),
        memory_available_bytes=_memory_available_bytes(Path("/proc/meminfo")),
        disk_free_bytes=shutil.disk_usage(directory).free,
    )


def declared_packages() -> tuple[PackageState, ...]:
    """Return the state of every package that specctl declares, core first, extras in order.

    Empty when specctl runs from a source tree that was never installed.
    """
    try:
        requirements = metadata.requires("specctl") or []
    except metadata.PackageNotFoundError:
        return ()
    return tuple(package_state(text) for text in requirements)


def package_state(requirement: str) -> PackageState:
    """Return the state of one requirement, such as `torch>=2.11,<2.14; extra == 'runtime'`."""
    match = _REQUIREMENT.match(requirement)
    name = match["name"] if match else requirement
    spec = match["spec"].strip() if match else ""
    extra = _EXTRA.search(requirement)
    system = _PLATFORM.search(requirement)
    installed = _installed_version(name)
    if system is not None and system["system"] != platform.system():
        state: State = "not-for-this-system"
    elif installed is None:
        state = "missing"
    else:
        state = "present" if satisfies(installed, spec) else "wrong-version"
    extras = (match["extras"] or "") if match else ""
    needs_fix = state in ("missing", "wrong-version")
    return PackageState(
        name=name,
        extra=extra["extra"] if extra else None,
        required=spec,
        installed=installed,
        state=state,
        fix=f"pip install '{name}{extras}{spec}'" if needs_fix else None,
    )


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, spec: str) -> bool:
    """Tell whether a version lies in a range such as `>=2.11,<2.14`; only numbers are compared."""
    found = _NUMBERS.match(version)
    if found is None:
        return False
    have = _as_numbers(found.group())
    for operator, text in _CLAUSE.findall(spec):
        want = _as_numbers(text)
        width = max(len(have), len(want))
        left, right = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "<": left < right,
            ">": left > right,
        }
        if not holds[operator]:
            return False
    return True


def _as_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_available_bytes(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None
