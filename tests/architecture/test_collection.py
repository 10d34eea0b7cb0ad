"""What CI and the nightly script start is all there is: no folder of tests is left out."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from tests.long_first import long_first

ROOT = Path(__file__).parents[2]
NIGHTLY = (ROOT / ".ci" / "nightly").read_text("utf-8")


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """Pytest's own list of folders that it does not enter has `dist` and `build` in it."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {
        parent.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for parent in file.relative_to(ROOT).parents
        if parent.name
    }
    assert "dist" in folders
    passed_over = [name for name in folders for glob in patterns if fnmatch.fnmatch(name, glob)]
    assert not passed_over


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:tests|docs|fixtures)/[\w./]+", NIGHTLY)))
)
def test_the_nightly_script_names_files_that_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("module", re.findall(r"-m ((?:tests|runtime)\.[\w.]+)", NIGHTLY))
def test_the_nightly_script_names_modules_that_exist(module: str) -> None:
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()


def test_processes_stay_together_and_other_files_do_not() -> None:
    pytest.importorskip("xdist", reason="pytest-xdist (extra test) is not installed")
    from tests.workers import unit_of

    names = ("dist/test_kills.py", "e2e/test_smollm2.py", "unit/test_a.py", "unit/test_b.py")
    units = [unit_of(f"tests/{name}::test_it[a::b]") for name in names]
    assert units == ["processes", "processes", "tests/unit/test_a.py", "tests/unit/test_b.py"]


@pytest.mark.parametrize("num_workers", [1, 3, 8, 40])
def test_every_share_begins_with_its_long_tests(num_workers: int) -> None:
    tests = [f"own{i}" for i in range(4)] + [f"fixed{i}" for i in range(22)] + ["long", "longer"]
    found = long_first(tests, lambda name: not name.startswith("fixed"), num_workers)
    assert sorted(found) == sorted(tests)
    first, left, num_long = 0, len(tests), set()
    for number in range(num_workers):
        size = left // (num_workers - number)
        share = [not name.startswith("fixed") for name in found[first : first + size]]
        assert share == sorted(share, reverse=True)
        num_long.add(sum(share))
        first, left = first + size, left - size
    if num_workers <= len(tests):
        assert max(num_long) - min(num_long) <= 1
