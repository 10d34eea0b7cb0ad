"""Whole processes with hub sources: settings from the environment, one document on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_clients import need_modelscope
from tests.mock_hub import COMMIT, TOKEN, Fault, MockHub, Repo, serving

ROOT = Path(__file__).parents[4]
DRAFT = ROOT / "fixtures" / "checkpoints" / "speculators-eagle3-clean"


@pytest.fixture
def hub() -> Iterator[MockHub]:
    files = {path.name: path.read_bytes() for path in DRAFT.iterdir()}
    with serving({"org/draft": Repo(files=dict(files), gate="login")}) as server:
        yield server


def run(
    hub: MockHub, home: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HF_ENDPOINT": hub.endpoint,
        "MODELSCOPE_DOMAIN": hub.endpoint,
        **settings,
    }
    return subprocess.run(
        [sys.executable, "-m", "specctl", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("kind", ["hf", "ms"])
def test_inspect_writes_one_document(hub: MockHub, tmp_path: Path, kind: str) -> None:
    if kind == "ms":
        need_modelscope()
    login = {"HF_TOKEN": TOKEN, "MODELSCOPE_API_TOKEN": TOKEN}
    done = run(hub, tmp_path, "inspect", f"{kind}:org/draft", "--json", **login)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["roles"]["source"]["path"] == f"{kind}:org/draft"
    assert report["roles"]["source"]["revision"] == (COMMIT if kind == "hf" else "master")
    assert report["diagnostics"] == []


@pytest.mark.parametrize("kind", ["hf", "ms"])
def test_a_login_that_is_missing_is_no_traceback(hub: MockHub, tmp_path: Path, kind: str) -> None:
    if kind == "ms":
        need_modelscope()
    done = run(hub, tmp_path, "validate", f"{kind}:org/draft")
    assert done.returncode == 1
    assert "SD136" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_offline_and_the_variable_of_the_client(hub: MockHub, tmp_path: Path) -> None:
    for arguments, settings in ((["--offline"], {}), ([], {"HF_HUB_OFFLINE": "1"})):
        done = run(hub, tmp_path, "inspect", "hf:org/draft", *arguments, **settings)
        assert done.returncode == 1
        assert "SD145" in done.stdout
    assert hub.seen == []


def test_an_answer_with_escape_codes_stays_text(hub: MockHub, tmp_path: Path) -> None:
    body = b"\x1b[31mred\x1b[0m"
    hub.fail("/api/models", Fault(status=400, headers={"X-Error-Message": "x"}, body=body))
    done = run(hub, tmp_path, "inspect", "hf:org/draft")
    assert done.returncode == 1
    assert "SD144" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
