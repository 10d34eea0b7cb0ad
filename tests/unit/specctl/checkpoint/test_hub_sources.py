"""What is read of a repository on a hub, with how many requests, and who may read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.checkpoint import open_checkpoint
from tests.hub_clients import DATA, GIB, IDS, SMALL, TENSORS, log_in, opened, refusal, sharded
from tests.mock_hub import COMMIT, TOKEN, Fault, MockHub, Repo, Sparse, header, safetensors

# What is read


def test_a_small_repository_is_three_files_and_few_bytes(hub: MockHub, kind: str) -> None:
    found = opened(f"{kind}:org/small")
    assert found.config == {"hidden_size": 16}
    assert set(found.tensors) == set(TENSORS)
    assert found.diagnostics == ()
    assert found.root is None
    assert found.file_names == ("config.json", "model.safetensors")
    assert found.revision == (COMMIT if kind == "hf" else "master")
    assert found.store.identity == f"{kind}:org/small@{found.revision}"
    assert len(hub.of("config.json")) == 1
    assert [s.host for s in hub.of("model.safetensors")] == ["hub", "cdn"]
    assert found.files[0].size_bytes == len(SMALL["model.safetensors"])


def test_it_is_the_same_as_the_directory(hub: MockHub, kind: str, tmp_path: Path) -> None:
    for name, content in SMALL.items():
        (tmp_path / name).write_bytes(content)
    local, remote = open_checkpoint(tmp_path), opened(f"{kind}:org/small")
    assert dict(local.tensors) == dict(remote.tensors)
    assert (local.files, local.config_digest) == (remote.files, remote.config_digest)
    assert remote.read_ints("d2t") == IDS == local.read_ints("d2t")
    assert remote.file_digest("model.safetensors") == local.file_digest("model.safetensors")
    assert remote.json_file("config.json") == local.config
    assert remote.json_file("absent.json") is None
    assert b"".join(remote.iter_range("model.safetensors", 8, 200, 50)) == remote.read_range(
        "model.safetensors", 8, 200
    )


def test_a_header_above_100_kb_is_a_second_request(hub: MockHub, kind: str) -> None:
    many = {f"layers.{i}.weight": ("BF16", [2], 4) for i in range(3000)}
    assert 150_000 < len(header(many)) < 300_000
    hub.repos["org/small"].files["model.safetensors"] = Sparse(header(many), 10**6)
    opened(f"{kind}:org/small")
    ranges = [s.range for s in hub.of("model.safetensors") if s.host == "cdn"]
    assert ranges == ["bytes=0-99999", f"bytes=100000-{len(header(many)) - 1}"]


def test_600_gb_cost_a_few_megabytes(hub: MockHub, kind: str) -> None:
    hub.repos["org/big"] = Repo(files=sharded(60, 10 * GIB))
    found = opened(f"{kind}:org/big")
    assert len(found.tensors) == 60
    assert sum(entry.nbytes for entry in found.tensors.values()) > 600 * 10**9
    files = [s for s in hub.seen if s.status in (200, 206) and "agent" not in s.path]
    assert len(files) == 1 + 2 + 60  # list, config and index, headers
    assert hub.num_bytes < 10 * 10**6
    assert found.diagnostics == ()


def test_a_tensor_is_its_range_and_nothing_more(hub: MockHub, kind: str) -> None:
    wide = {"big": ("U8", [10**6], 10**6), "d2t": ("I64", [3], 24), "rest": ("U8", [10**6], 10**6)}
    head = header(wide)
    content = safetensors(wide, bytes(10**6) + DATA[32:] + bytes(10**6))
    hub.repos["org/small"].files["model.safetensors"] = content
    found = opened(f"{kind}:org/small")
    hub.seen.clear()
    assert found.read_ints("d2t") == IDS
    begin = len(head) + 10**6
    assert [s.range for s in hub.seen if s.host == "cdn"] == [f"bytes={begin}-{begin + 23}"]
    assert hub.num_bytes == 24


def test_a_subfolder_and_a_revision(hub: MockHub, kind: str) -> None:
    files = {f"drafts/eagle/{name}": content for name, content in SMALL.items()}
    hub.repos["org/many"] = Repo(files={"README.md": b"", **files}, revisions=("main", "v1.0"))
    found = opened(f"{kind}:org/many@v1.0/drafts/eagle")
    assert found.read_ints("d2t") == IDS
    assert found.file_names == ("config.json", "model.safetensors")
    code, text = refusal(lambda: opened(f"{kind}:org/many@v1.0/drafts/medusa"))
    assert (code, "drafts/medusa" in text) == ("SD139", True)


def test_a_hub_that_lists_no_sizes(hub: MockHub) -> None:
    hub.repos["org/small"].has_sizes = False
    found = opened("hf:org/small")
    assert found.read_ints("d2t") == IDS
    assert found.diagnostics == ()


# Access


@pytest.mark.parametrize("gate", ["login", "closed"])
def test_a_gated_repository_says_how_to_log_in(
    hub: MockHub, kind: str, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/small"].gate = gate
    code, text = refusal(lambda: opened(f"{kind}:org/small"))
    assert code == "SD136"
    assert ("hf auth login" if kind == "hf" else "modelscope login") in text
    log_in(monkeypatch)
    if gate == "login":
        assert opened(f"{kind}:org/small").read_ints("d2t") == IDS
    else:
        assert refusal(lambda: opened(f"{kind}:org/small"))[0] == "SD136"


def test_the_login_never_reaches_another_host(
    hub: MockHub, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch)
    opened(f"{kind}:org/small")
    own = [s for s in hub.seen if s.host == "hub" and "agent" not in s.path]
    other = [s for s in hub.seen if s.host == "cdn"]
    assert all(s.authorization == f"Bearer {TOKEN}" for s in own)
    assert other
    assert all(s.authorization is None and s.cookie is None for s in other)


# What is missing


def test_no_such_repository(hub: MockHub, kind: str) -> None:
    code, text = refusal(lambda: opened(f"{kind}:org/absent"))
    assert (code, f"{kind}:org/absent" in text) == ("SD137", True)


def test_no_such_revision(hub: MockHub, kind: str) -> None:
    code, text = refusal(lambda: opened(f"{kind}:org/small@absent"))
    assert (code, "@absent" in text) == ("SD138", True)


def test_a_listed_file_that_is_gone(hub: MockHub, kind: str) -> None:
    body = b'{"Code": 404, "Message": "no such file"}'
    gone = Fault(status=404, headers={"X-Error-Code": "EntryNotFound"}, body=body)
    hub.fail("model.safetensors", gone, gone)  # it is asked for twice: ahead, and when opened
    found = opened(f"{kind}:org/small")
    assert [(d.code, d.where) for d in found.diagnostics] == [("SD139", "model.safetensors")]
    assert found.tensors == {}


def test_a_repository_without_a_checkpoint(hub: MockHub, kind: str) -> None:
    hub.repos["org/notes"] = Repo(files={"README.md": b"hello"})
    assert refusal(lambda: opened(f"{kind}:org/notes"))[0] == "SD119"
