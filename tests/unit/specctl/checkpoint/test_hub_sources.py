"""Both hub clients against local servers that speak their protocols, faults included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.checkpoint import Access, Checkpoint, open_checkpoint
from specctl.checkpoint.directory import read_store
from specctl.checkpoint.sources.hub import parse_hub_name
from specctl.checkpoint.sources.opening import open_store
from specctl.checkpoint.sources.ranges import ATTEMPTS
from specctl.contract.diagnostics import DiagnosticError
from tests.mock_hub import (
    COMMIT,
    TOKEN,
    Fault,
    MockHub,
    Repo,
    Sparse,
    header,
    need_modelscope,
    point_clients,
    safetensors,
    serving,
)

GIB = 1 << 30
CONFIG = b'{"hidden_size": 16}'
TENSORS = {"a.weight": ("BF16", [4, 4], 32), "d2t": ("I64", [3], 24)}
IDS = (5, 0, 7)
DATA = bytes(range(32)) + b"".join(i.to_bytes(8, "little") for i in IDS)
SMALL = {"config.json": CONFIG, "model.safetensors": safetensors(TENSORS, DATA)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    """A hub with `org/small`, which both clients are pointed at, without any login."""
    with serving({"org/small": Repo(files=dict(SMALL))}) as server:
        point_clients(server, tmp_path, monkeypatch)
        yield server


@pytest.fixture(params=["hf", "ms"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ms":
        need_modelscope()
        import modelscope_hub._legacy_api as client

        monkeypatch.setattr(client, "REPO_TREE_PAGE_RETRY_MAX_DELAY_SECONDS", 0)
    return str(request.param)


class Clock:
    """Counts what would have been waited."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


def opened(source: str, clock: Clock | None = None) -> Checkpoint:
    return read_store(open_store(source, pause=clock or Clock()), where=source)


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """Return code and text of the first diagnostic that `call` raises."""
    with pytest.raises(DiagnosticError) as caught:
        call()
    first = caught.value.diagnostics[0]
    return first.code, f"{first.where} {first.message} {first.help}"


def log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)


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


def sharded(num_shards: int, size: int) -> dict[str, bytes | Sparse]:
    names = [f"model-{i:05}-of-{num_shards:05}.safetensors" for i in range(1, num_shards + 1)]
    files: dict[str, bytes | Sparse] = {"config.json": CONFIG}
    entries = []
    for number, name in enumerate(names):
        head = header({f"layers.{number}.weight": ("U8", [size], size)})
        files[name] = Sparse(head, len(head) + size)
        entries.append(f'"layers.{number}.weight": "{name}"')
    files["model.safetensors.index.json"] = (
        '{"weight_map": {' + ", ".join(entries) + "}}"
    ).encode()
    return files


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
    assert "hf auth login" in text
    assert "modelscope login" in text
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
    hub.fail("model.safetensors", gone)
    found = opened(f"{kind}:org/small")
    assert [(d.code, d.where) for d in found.diagnostics] == [("SD139", "model.safetensors")]
    assert found.tensors == {}


def test_a_repository_without_a_checkpoint(hub: MockHub, kind: str) -> None:
    hub.repos["org/notes"] = Repo(files={"README.md": b"hello"})
    assert refusal(lambda: opened(f"{kind}:org/notes"))[0] == "SD119"


# Retries


def test_429_waits_as_long_as_it_is_told(hub: MockHub, kind: str) -> None:
    clock = Clock()
    hub.fail("config.json", Fault(status=429, headers={"Retry-After": "7"}))
    assert opened(f"{kind}:org/small", clock).config is not None
    assert clock.waits == [7.0]


def test_429_without_end_is_given_up(hub: MockHub, kind: str) -> None:
    clock = Clock()
    hub.fail("config.json", *[Fault(status=429, headers={"Retry-After": "1"})] * 20)
    code, text = refusal(lambda: opened(f"{kind}:org/small", clock))
    assert (code, "429" in text) == ("SD140", True)
    assert len(clock.waits) == ATTEMPTS - 1
    assert len(hub.of("config.json")) == ATTEMPTS


def test_429_for_an_hour_is_not_waited_for(hub: MockHub, kind: str) -> None:
    clock = Clock()
    hub.fail("config.json", Fault(status=429, headers={"Retry-After": "3600"}))
    code, text = refusal(lambda: opened(f"{kind}:org/small", clock))
    assert (code, "3600 s" in text, clock.waits) == ("SD140", True, [])


def test_429_for_the_list_of_files(hub: MockHub, kind: str) -> None:
    path = "/api/models" if kind == "hf" else "repo/files"
    hub.fail(path, Fault(status=429, headers={"Retry-After": "1"}))
    assert opened(f"{kind}:org/small").config is not None
    hub.fail(path, *[Fault(status=429, headers={"Retry-After": "1"})] * 20)
    assert refusal(lambda: opened(f"{kind}:org/small"))[0] == "SD140"


def test_a_server_that_recovers(hub: MockHub, kind: str) -> None:
    clock = Clock()
    hub.fail("model.safetensors", Fault(status=503), Fault(status=502), Fault(status=500))
    assert opened(f"{kind}:org/small", clock).read_ints("d2t") == IDS
    assert clock.waits == [0.5, 1.0, 2.0]


def test_a_server_that_does_not(hub: MockHub, kind: str) -> None:
    hub.fail("model.safetensors", *[Fault(status=500)] * 20)
    code, text = refusal(lambda: opened(f"{kind}:org/small"))
    assert (code, "500" in text) == ("SD144", True)


def test_a_cut_connection_goes_on_where_it_ended(hub: MockHub, kind: str) -> None:
    many = {f"layers.{i}.weight": ("BF16", [2], 4) for i in range(1000)}
    content = safetensors(many)
    hub.repos["org/small"].files["model.safetensors"] = content
    cuts = (16384, 0, 8192)  # the ModelScope client hands on pieces of 8192 bytes
    hub.fail("//model.safetensors", *(Fault(cut_after=cut) for cut in cuts))
    assert len(opened(f"{kind}:org/small").tensors) == 1000
    last = min(len(content), 100_000) - 1
    assert [s.range for s in hub.of("//model.safetensors")] == [
        f"bytes={begin}-{last}" for begin in (0, 16384, 16384, 24576)
    ]


def test_a_connection_that_is_always_cut(hub: MockHub, kind: str) -> None:
    hub.fail("//model.safetensors", *[Fault(cut_after=0)] * 20)
    assert refusal(lambda: opened(f"{kind}:org/small"))[0] == "SD142"
    assert len(hub.of("//model.safetensors")) == ATTEMPTS


def test_a_lost_hub_is_not_asked_for_every_shard(hub: MockHub, kind: str) -> None:
    hub.repos["org/big"] = Repo(files=sharded(163, GIB))
    hub.fail("//model-", *[Fault(status=500)] * 5000)
    assert refusal(lambda: opened(f"{kind}:org/big"))[0] == "SD144"
    assert len(hub.of("//model-")) <= 16 * ATTEMPTS


# Servers that are something else


def test_a_server_without_ranges_is_not_downloaded(hub: MockHub, kind: str) -> None:
    size = 600 * 10**9
    head = header({"big": ("U8", [size], size), "d2t": ("I64", [3], 24)})
    hub.repos["org/small"].files["model.safetensors"] = Sparse(head, len(head) + size + 24)
    hub.fail("//model.safetensors", *[Fault(ignore_range=True)] * 20)
    found = opened(f"{kind}:org/small")  # the beginning of the whole file is the header
    assert set(found.tensors) == {"big", "d2t"}
    code, text = refusal(lambda: found.read_ints("d2t"))
    assert (code, "model.safetensors" in text) == ("SD143", True)
    assert hub.num_bytes < 100 * 10**6


def test_a_server_that_gives_another_range(hub: MockHub, kind: str) -> None:
    hub.fail("//model.safetensors", *[Fault(wrong_range=True)] * 20)
    assert refusal(lambda: opened(f"{kind}:org/small"))[0] == "SD144"


def test_a_file_of_another_size_than_listed(hub: MockHub, kind: str) -> None:
    store = open_store(f"{kind}:org/small", pause=Clock())
    hub.repos["org/small"].files["model.safetensors"] = SMALL["model.safetensors"] + b"more"
    found = read_store(store, where="x")
    assert [d.code for d in found.diagnostics] == ["SD144"]


def test_redirects_without_end(hub: MockHub, kind: str) -> None:
    place = f"{hub.endpoint}/org/small/resolve/main/config.json"
    hub.fail("config.json", *[Fault(status=302, headers={"Location": place})] * 200)
    code, _ = refusal(lambda: opened(f"{kind}:org/small"))
    assert code in ("SD144", "SD141")


def test_no_server_at_all(hub: MockHub, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "http://127.0.0.1:9")
    code, text = refusal(lambda: opened(f"{kind}:org/small"))
    assert (code, "--offline" in text) == ("SD141", True)


@pytest.mark.parametrize(
    ("status", "kind_of_text", "body"),
    [(200, "text/html", b"<html>log in</html>"), (200, "application/json", b"[1, 2]"),
     (200, "application/json", b'{"hello": 1}'), (404, "text/html", b"<html>no</html>"),
     (418, "text/plain", b"teapot")],
)  # fmt: skip
def test_a_server_that_is_no_hub(
    hub: MockHub, kind: str, status: int, kind_of_text: str, body: bytes
) -> None:
    hub.fail(
        "/api/", *[Fault(status=status, headers={"Content-Type": kind_of_text}, body=body)] * 9
    )
    code, _ = refusal(lambda: opened(f"{kind}:org/small"))
    assert code in ("SD144", "SD137", "SD139")
    if status == 200 and kind == "hf":
        assert code == "SD144"


def test_silence_ends_after_the_timeout(
    hub: MockHub, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    if kind == "ms":
        import modelscope_hub._legacy_api as client

        monkeypatch.setattr(client, "DOWNLOAD_TIMEOUT", 0.05)
    hub.fail("config.json", *[Fault(stall_s=0.3)] * ATTEMPTS)
    assert refusal(lambda: opened(f"{kind}:org/small"))[0] == "SD141"


# Cache


def test_offline_without_a_cache(hub: MockHub, kind: str) -> None:
    before = len(hub.seen)
    code, text = refusal(lambda: open_checkpoint(f"{kind}:org/small", access=Access(offline=True)))
    assert (code, "--offline" in text) == ("SD145", True)
    assert len(hub.seen) == before


def test_offline_reads_what_was_downloaded(hub: MockHub, kind: str) -> None:
    online = opened(f"{kind}:org/small")
    for name in online.file_names:
        assert online.store.fetch(name).read_bytes() == SMALL[name]
    before = len(hub.seen)
    found = open_checkpoint(f"{kind}:org/small", access=Access(offline=True))
    assert found.read_ints("d2t") == IDS
    assert found.revision == online.revision
    assert found.root is not None
    assert found.store.identity == online.store.identity
    assert found.diagnostics == ()
    assert len(hub.seen) == before


def test_hf_hub_offline_is_obeyed(hub: MockHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal(lambda: opened("hf:org/small"))[0] == "SD145"
    assert hub.seen == []


def test_cached_files_of_the_commit_are_not_asked_again(hub: MockHub) -> None:
    opened("hf:org/small").store.fetch("model.safetensors")
    hub.seen.clear()
    assert opened("hf:org/small").read_ints("d2t") == IDS
    assert hub.of("model.safetensors") == []


def test_offline_with_a_part_of_the_shards(hub: MockHub, kind: str) -> None:
    hub.repos["org/big"] = Repo(files=sharded(3, 64))
    online = opened(f"{kind}:org/big")
    for name in online.file_names:
        if "00003-of" not in name:
            online.store.fetch(name)
    found = open_checkpoint(f"{kind}:org/big", access=Access(offline=True))
    assert [d.code for d in found.diagnostics if d.severity == "error"] == ["SD102"]
    assert found.diagnostics[0].where == "model-00003-of-00003.safetensors"


def test_a_download_that_is_refused(hub: MockHub, kind: str) -> None:
    found = opened(f"{kind}:org/small")
    hub.repos["org/small"].gate = "closed"
    assert refusal(lambda: found.store.fetch("model.safetensors"))[0] in ("SD136", "SD141")


# Names


@pytest.mark.parametrize(
    ("source", "repository", "revision", "subfolder"),
    [
        ("hf:org/name", "org/name", None, ""),
        ("ms:org/name@v1", "org/name", "v1", ""),
        ("hf:org/name@v1/a/b", "org/name", "v1", "a/b"),
        ("hf:org/name/a/", "org/name", None, "a"),
        ("hf:org/name@refs/pr/3/a", "org/name", "refs/pr/3", "a"),
        ("hf:org/name@feature%2Fx/a", "org/name", "feature/x", "a"),
    ],
)
def test_hub_names(source: str, repository: str, revision: str | None, subfolder: str) -> None:
    name = parse_hub_name(source)
    assert (name.repository, name.revision, name.subfolder) == (repository, revision, subfolder)
    assert parse_hub_name(name.text(name.revision)) == name


@pytest.mark.parametrize(
    "source",
    ["hf:", "hf:name", "hf:/name", "ms:org/", "hf:org/name@", "hf:org/name/../x", "hf:org/name/./x",
     "hf:org/name/..", "hf:org/name/a//b", "hf:org/name@a@b", "hf:../name", "hf:org/na me",
     "hf:org/name/a\x00b", "hf:org/name/a\\b", "hf:org/name\n"],
)  # fmt: skip
def test_malformed_hub_names(source: str) -> None:
    assert refusal(lambda: open_checkpoint(source))[0] == "SD146"


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_after_the_scheme_is_a_name_or_refused(text: str) -> None:
    try:
        name = parse_hub_name("hf:" + text)
    except DiagnosticError as error:
        codes = {d.code for d in error.diagnostics}
    else:
        codes = {"SD146"}
        assert ".." not in name.subfolder.split("/")
        assert name.repository.count("/") == 1
    assert codes == {"SD146"}
