"""The output directory: whole or not at all, never a source, refusals of the system."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from convert_files import TENSORS, copies, make_source, names_in, plan_of, read_weights, run

from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.contract.diagnostics import DiagnosticError
from specctl.convert import directory as output
from specctl.convert.engine import write


def codes(error: pytest.ExceptionInfo[DiagnosticError]) -> list[str]:
    return [item.code for item in error.value.diagnostics]


@pytest.mark.parametrize("change", ["weights", "config", "missing"])
def test_an_output_that_differs_is_not_replaced_unasked(
    source: Checkpoint, tmp_path: Path, change: str
) -> None:
    out, plan = tmp_path / "out", plan_of(source, copies(source))
    run(plan, out)
    assert run(plan, out).state == "unchanged"
    if change == "weights":
        path = out / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    elif change == "config":
        (out / "config.json").write_text("{}\n")
    else:
        (out / "config.json").unlink()
    with pytest.raises(DiagnosticError) as error:
        run(plan, out)
    assert codes(error) == ["SD603"]
    assert run(plan, out, is_forced=True).state == "written"
    assert run(plan, out).state == "unchanged"
    assert names_in(tmp_path) == {"source", "out"}


@pytest.mark.parametrize("record", [None, "[]", "{", '{"files": 1}'])
def test_a_file_that_someone_put_into_an_output_is_never_deleted(
    source: Checkpoint, tmp_path: Path, record: str | None
) -> None:
    out, plan = tmp_path / "out", plan_of(source, copies(source))
    run(plan, out)
    if record is None:
        (out / "notes.md").write_text("mine")
    else:  # without a record nobody knows whose files they are
        (out / "specctl.json").write_text(record)
    for is_forced in (False, True):
        with pytest.raises(DiagnosticError) as error:
            run(plan, out, is_forced=is_forced)
        assert codes(error) == ["SD603"]
        assert "did not write" in (error.value.diagnostics[0].found or "")
    assert (out / "model.safetensors").is_file()
    assert record is not None or (out / "notes.md").read_text() == "mine"


def test_a_directory_that_we_did_not_write_is_never_replaced(
    source: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("the only copy")
    for is_forced in (False, True):
        with pytest.raises(DiagnosticError) as error:
            run(plan_of(source, copies(source)), out, is_forced=is_forced)
        assert codes(error) == ["SD603"]
    assert (out / "thesis.txt").read_text() == "the only copy"


def test_an_empty_directory_and_missing_parents_are_used(
    source: Checkpoint, tmp_path: Path
) -> None:
    plan = plan_of(source, copies(source))
    (tmp_path / "empty").mkdir()
    run(plan, tmp_path / "empty")
    run(plan, tmp_path / "new" / "deep" / "out")
    assert (tmp_path / "new" / "deep" / "out" / "model.safetensors").is_file()


def test_the_output_is_never_a_source(source: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(source, copies(source))
    (tmp_path / "link").symlink_to(tmp_path / "source")
    before = read_weights(tmp_path / "source")
    for out in (
        tmp_path / "source",
        tmp_path / "source" / "out",
        tmp_path / "link",
        tmp_path / "link" / "out",
        tmp_path / "source" / ".." / "source",
        tmp_path,
    ):
        with pytest.raises(DiagnosticError) as error:
            run(plan, out, is_forced=True)
        assert codes(error) == ["SD604"]
    assert read_weights(tmp_path / "source") == before
    assert names_in(tmp_path / "source") == {"config.json", "model.safetensors"}


def test_the_blobs_of_a_hub_cache_are_a_source_too(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    make_source(tmp_path / "made", TENSORS)
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "made" / name).rename(cache / "blobs" / name)
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / name)
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.tensors
    for out in (cache / "blobs" / "out", snapshot / "out", cache):
        with pytest.raises(DiagnosticError) as error:
            run(plan_of(checkpoint, copies(checkpoint)), out)
        assert codes(error) == ["SD604"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(
    source: Checkpoint, tmp_path: Path, failure: type[BaseException]
) -> None:
    def fail(directory: Path) -> None:
        assert names_in(directory) == {"config.json", "model.safetensors", "specctl.json"}
        raise failure

    plan = plan_of(source, copies(source))
    with pytest.raises(failure):
        write(plan, tmp_path / "new" / "out", is_forced=False, has_digests=True, check=fail)
    assert names_in(tmp_path) == {"source"}


def test_a_failure_keeps_the_output_that_was_there(source: Checkpoint, tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise RuntimeError

    out = tmp_path / "out"
    run(plan_of(source, copies(source)), out)
    before = {name: (out / name).read_bytes() for name in names_in(out)}
    other = plan_of(source, {"a": copies(source)["a"]})
    with pytest.raises(RuntimeError):
        write(other, out, is_forced=True, has_digests=True, check=fail)
    assert {name: (out / name).read_bytes() for name in names_in(out)} == before
    assert names_in(tmp_path) == {"source", "out"}


def test_a_failing_rename_puts_the_old_output_back(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(plan_of(source, copies(source)), out)
    rename, calls = Path.rename, []

    def second_fails(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.EIO, "input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(DiagnosticError) as error:
        run(plan_of(source, {"a": copies(source)["a"]}), out, is_forced=True)
    assert codes(error) == ["SD605"]
    assert set(read_weights(out)) == set(TENSORS)
    assert names_in(tmp_path) == {"source", "out"}


def test_a_source_that_changes_is_noticed(source: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(source, copies(source))
    path = tmp_path / "source" / "model.safetensors"

    def touch(count: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(DiagnosticError) as error:
        write(
            plan,
            tmp_path / "out",
            is_forced=False,
            has_digests=True,
            check=lambda directory: None,
            moved=touch,
        )
    assert codes(error) == ["SD606"]
    assert names_in(tmp_path) == {"source"}


def test_a_source_that_is_cut_is_noticed(source: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(source, copies(source))
    path = tmp_path / "source" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 9)
    for has_digests in (True, False):
        with pytest.raises(DiagnosticError) as error:
            run(plan, tmp_path / "out", has_digests=has_digests)
        assert codes(error) == ["SD108"]
    assert names_in(tmp_path) == {"source"}


def test_too_little_space_is_said_before_anything_is_written(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = output.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(DiagnosticError) as error:
        run(plan_of(source, copies(source)), tmp_path / "new" / "out")
    assert codes(error) == ["SD605"]
    assert names_in(tmp_path) == {"source"}


def test_a_place_that_cannot_be_written(source: Checkpoint) -> None:
    with pytest.raises(DiagnosticError) as error:
        run(plan_of(source, copies(source)), Path("/proc/specctl/out"))
    assert codes(error) == ["SD605"]


def test_a_file_size_limit_while_writing_leaves_nothing(source: Checkpoint, tmp_path: Path) -> None:
    """What a full disk or a quota does in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for has_digests in (True, False):
            with pytest.raises(DiagnosticError) as error:
                run(plan_of(source, copies(source)), tmp_path / "out", has_digests=has_digests)
            assert codes(error) == ["SD605"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert names_in(tmp_path) == {"source"}


def test_a_full_tmpfs(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        source = make_source(tmp_path / "source", {"a": ("F32", (40_000,))})
        free = disk.stat()
        assert free is not None
        with pytest.raises(DiagnosticError) as error:
            run(plan_of(source, copies(source)), disk / "out")
        assert codes(error) == ["SD605"]
        with pytest.MonkeyPatch.context() as patch:  # as if another process took the space
            patch.setattr(output, "check_space", lambda out, size: None)
            patch.setattr("specctl.convert.engine.check_space", lambda out, size: None)
            with pytest.raises(DiagnosticError) as error:
                run(plan_of(source, copies(source)), disk / "out")
        assert codes(error) == ["SD605"]
        assert "space" in error.value.diagnostics[0].message
        assert names_in(disk) == set()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


_SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from convert_files import copies, plan_of
from specctl.checkpoint import open_checkpoint
from specctl.convert.engine import write

def wait(directory):
    print("ready", flush=True)
    time.sleep(300)

source = open_checkpoint({source!r})
plan = plan_of(source, copies(source))
write(plan, Path({out!r}), is_forced=False, has_digests=False, check=wait)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing(source: Checkpoint, tmp_path: Path, number: int) -> None:
    code = _SLOW.format(
        tests=str(Path(__file__).parent),
        source=str(tmp_path / "source"),
        out=str(tmp_path / "new" / "out"),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert (tmp_path / "new").is_dir()
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Interrupt" in errors or "Terminated" in errors
    assert names_in(tmp_path) == {"source"}
