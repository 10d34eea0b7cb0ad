"""Hubs that are slow, cut off, wrong or something else: a code, bounded waits, no download."""

from __future__ import annotations

import pytest

from specctl.checkpoint.directory import read_store
from specctl.checkpoint.sources.opening import open_store
from specctl.checkpoint.sources.ranges import ATTEMPTS
from tests.hub_clients import GIB, IDS, SMALL, Clock, opened, refusal, sharded
from tests.mock_hub import Fault, MockHub, Repo, Sparse, header, safetensors

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


def test_a_config_of_600_gb_is_refused_by_its_size(hub: MockHub, kind: str) -> None:
    hub.repos["org/small"].files["config.json"] = Sparse(b"{", 600 * 10**9)
    found = opened(f"{kind}:org/small")
    assert [(d.code, d.where) for d in found.diagnostics] == [("SD117", "config.json")]
    assert hub.num_bytes < 10**6


def test_more_shards_than_are_kept_open(hub: MockHub, kind: str) -> None:
    hub.repos["org/big"] = Repo(files=sharded(300, 1 << 20))
    found = opened(f"{kind}:org/big")
    assert len(found.tensors) == 300
    assert found.diagnostics == ()
    assert len(hub.of("//model-")) == 300
