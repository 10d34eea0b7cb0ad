"""What the machine has: versions, ranges, and the command that fixes a gap."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from specctl.cli import app
from specctl.cli.commands.doctor import device_facts
from specctl.ops.environment import declared_packages, describe_machine, package_state, satisfies


@pytest.mark.parametrize(
    ("version", "spec", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("13", ">=13", True),
        ("13.0", "<=13,>13", False),
        ("1.0", "==1", True),
        ("anything", ">=1", False),
        ("1.0", "", True),
    ],
)
def test_version_ranges(version: str, spec: str, fits: bool) -> None:
    assert satisfies(version, spec) is fits


def test_states_and_fixes() -> None:
    missing = package_state("no-such-package-here[data]>=2 ; extra == 'ray'")
    assert (missing.state, missing.extra) == ("missing", "ray")
    assert missing.fix == "pip install 'no-such-package-here[data]>=2'"
    old = package_state("pytest>=9999")
    assert (old.state, old.fix) == ("wrong-version", "pip install 'pytest>=9999'")
    assert package_state("pytest>=1; extra == 'test'").fix is None
    other = package_state("x>=1; platform_system == 'Nowhere' and extra == 'runtime'")
    assert (other.state, other.fix) == ("not-for-this-system", None)


def test_declared_packages_come_from_the_distribution() -> None:
    packages = declared_packages()
    assert {"typer", "msgspec"} <= {p.name for p in packages if p.extra is None}
    assert "torch" in {p.name for p in packages if p.extra == "runtime"}


def test_machine_facts(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine.cpus >= 1
    assert machine.disk_free_bytes > 0
    assert machine.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")


def test_doctor_never_fails_without_the_runtime(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "runtime.main", None)
    assert app.run(["doctor"]) == 0
    assert "runtime: cannot run here" in capsys.readouterr().out
    assert app.run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["machine", "packages", "device"]
    assert report["device"]["available"] is False


def test_a_broken_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    module = ModuleType("runtime.main")

    def doctor_facts() -> dict[str, object]:
        raise RuntimeError("driver too old\nmore")

    vars(module)["doctor_facts"] = doctor_facts
    monkeypatch.setitem(sys.modules, "runtime.main", module)
    assert device_facts() == {"available": False, "reason": "driver too old"}
