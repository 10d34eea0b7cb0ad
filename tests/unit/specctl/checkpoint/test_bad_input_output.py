"""Outputs that cannot be written: a full disk, a read-only one, a limit on file sizes.

A disk here is a tmpfs in a mount namespace of its own; where the system allows none, those tests
are skipped with that reason and the limit on file sizes (RLIMIT_FSIZE, EFBIG) still runs.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[4]
FIXTURES = ROOT / "fixtures" / "checkpoints"
TARGET, DRAFT = FIXTURES / "hf-llama-clean", FIXTURES / "speculators-eagle3-clean"
OLD = "what was there before\n"

# Runs inside the namespace: mounts, leaves `free` bytes, runs the command, tells what is left.
ON_A_DISK = """
import json, os, subprocess, sys
from pathlib import Path
folder, free, mode, *command = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
disk = Path(folder)
(disk / "old").write_text("what was there before\\n")
with open(disk / "filler", "wb") as out:
    space = os.statvfs(folder)
    out.write(bytes(max(0, space.f_bavail * space.f_bsize - int(free))))
if mode == "ro":
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
done = subprocess.run(command, capture_output=True, text=True)
left = sorted(str(path.relative_to(disk)) for path in disk.rglob("*"))
print(json.dumps({"status": done.returncode, "talk": done.stderr, "answer": done.stdout,
                  "left": left, "old": (disk / "old").read_text()}))
"""


class Outcome(NamedTuple):
    """What a command on a small disk came to."""

    status: int
    talk: str
    answer: str
    left: list[str]
    old: str


@cache
def no_namespace() -> str | None:
    """Return why there is no mount namespace, None when there is one."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "no unshare or mount program"
    done = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no mount namespace: {done.stderr.strip()}"


def on_a_disk(folder: Path, free: int, mode: str, command: Sequence[str]) -> Outcome:
    reason = no_namespace()
    if reason is not None:
        pytest.skip(reason)
    script = ["unshare", "-rm", sys.executable, "-c", ON_A_DISK, str(folder), str(free), mode]
    done = subprocess.run(
        [*script, sys.executable, "-m", "specctl", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = Outcome(**json.loads(done.stdout))
    return outcome._replace(talk=unfolded(outcome.talk))


def unfolded(talk: str) -> str:
    """Return the text without the line feeds of a narrow terminal."""
    return " ".join(talk.split())


def commands(folder: Path, name: str) -> dict[str, list[str]]:
    """Return every kind of output a command writes, as `name` in `folder`."""
    out = str(folder / name)
    return {
        "manifest": ["manifest", str(TARGET), str(DRAFT), "-o", out],
        "page": ["inspect", str(DRAFT), "--html", out],
        "normalize": ["normalize", str(DRAFT), "-o", out],
        "convert": ["convert", str(DRAFT), "--to", "specforge", "--target", str(TARGET), "-o", out],
    }


KINDS = ("manifest", "page", "convert", "normalize")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("free", [0, 4096])
def test_a_full_disk(kind: str, free: int, tmp_path: Path) -> None:
    outcome = on_a_disk(tmp_path, free, "rw", commands(tmp_path, "new")[kind])
    assert outcome.status in (1, 2)
    assert "cannot be written: No space left" in outcome.talk or "are free" in outcome.talk
    assert "internal fault" not in outcome.talk
    assert outcome.left == ["filler", "old"]


@pytest.mark.parametrize("kind", ["manifest", "page"])
def test_a_full_disk_keeps_the_old_file(kind: str, tmp_path: Path) -> None:
    outcome = on_a_disk(tmp_path, 0, "rw", commands(tmp_path, "old")[kind])
    assert outcome.status == 2
    assert outcome.old == OLD
    assert outcome.left == ["filler", "old"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_disk(kind: str, tmp_path: Path) -> None:
    outcome = on_a_disk(tmp_path, 1 << 19, "ro", commands(tmp_path, "new")[kind])
    assert outcome.status in (1, 2)
    assert "cannot be written: Read-only file system" in outcome.talk
    assert outcome.left == ["filler", "old"]


def test_room_for_everything_is_used(tmp_path: Path) -> None:
    outcome = on_a_disk(tmp_path, 1 << 19, "rw", commands(tmp_path, "new")["manifest"])
    assert (outcome.status, outcome.left) == (0, ["filler", "new", "old"]), outcome.talk


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_on_file_sizes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "old").write_text(OLD)
    done = subprocess.run(
        [sys.executable, "-B", "-m", "specctl", *commands(tmp_path, "new")[kind]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert done.returncode in (1, 2)
    assert "cannot be written: File too large" in unfolded(done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_is_not_there(kind: str, tmp_path: Path) -> None:
    command = commands(tmp_path / "file", "new")[kind]
    (tmp_path / "file").write_text(OLD)
    done = subprocess.run(
        [sys.executable, "-m", "specctl", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert "internal fault" not in unfolded(done.stderr)
    assert "cannot be written" in unfolded(done.stderr) or "SD6" in unfolded(done.stderr)
    assert (tmp_path / "file").read_text() == OLD
