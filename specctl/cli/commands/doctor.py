"""`specctl doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.cli import output
from specctl.cli.shared_options import Json
from specctl.ops.environment import (
    Machine,
    PackageState,
    declared_packages,
    describe_machine,
)

_GIB = 1 << 30


def doctor(json: Json = False) -> None:
    """Say what this machine can run and how to add what is missing. Never fails."""
    machine = describe_machine(Path.cwd())
    packages = declared_packages()
    device = device_facts()
    if json:
        output.answer_json({"machine": machine, "packages": packages, "device": device})
        return
    output.answer("\n".join([*_machine_lines(machine), "", *_package_lines(packages)]))
    output.answer("\n".join(["", *_device_lines(device)]))


def device_facts() -> dict[str, Any]:
    """Return what the runtime sees, or why it sees nothing."""
    try:
        from runtime.main import doctor_facts

        return {"available": True, **doctor_facts()}
    except ImportError as error:
        reason = f"Python package `{error.name}` is missing"
        return {"available": False, "reason": reason}
    except (RuntimeError, OSError) as error:  # a driver that does not fit the library
        return {"available": False, "reason": str(error).splitlines()[0]}


def _machine_lines(machine: Machine) -> list[str]:
    memory = machine.memory_available_bytes
    return [
        "machine",
        f"  specctl  {machine.specctl}, Python {machine.python}",
        f"  system   {machine.system}, {machine.architecture}, {machine.cpus} usable CPUs",
        f"  memory   {'unknown' if memory is None else f'{memory / _GIB:.1f} GiB'} available",
        f"  disk     {machine.disk_free_bytes / _GIB:.1f} GiB free here",
    ]


def _package_lines(packages: tuple[PackageState, ...]) -> list[str]:
    if not packages:
        return ["packages", "  specctl is not installed; `pip install .` in its repository"]
    lines: list[str] = []
    for extra in dict.fromkeys(package.extra for package in packages):
        group = [p for p in packages if p.extra == extra]
        broken = [p for p in group if p.fix is not None]
        title = "core" if extra is None else f"extra `{extra}`"
        lines.append(f"{title}: {'complete' if not broken else f'{len(broken)} to install'}")
        lines += [_package_line(p) for p in group]
        if broken:
            specs = " ".join(p.fix.removeprefix("pip install ") for p in broken if p.fix)
            lines.append(f"  help: pip install {specs}")
    return lines


def _package_line(package: PackageState) -> str:
    found = package.installed or "-"
    need = f"needs {package.required}" if package.required else ""
    return f"  {package.name:<32} {found:<14} {package.state:<19} {need}".rstrip()


def _device_lines(device: dict[str, Any]) -> list[str]:
    if not device["available"]:
        return [f"runtime: cannot run here, {device['reason']}"]
    facts = {key: value for key, value in device.items() if key != "available"}
    return ["runtime", *(f"  {key:<24} {value}" for key, value in facts.items())]
