"""Caches, offline, and how a hub source is spelled."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.checkpoint import Access, open_checkpoint
from specctl.checkpoint.sources.hub import parse_hub_name
from specctl.contract.diagnostics import DiagnosticError
from tests.hub_clients import IDS, SMALL, need_modelscope, opened, refusal, sharded
from tests.mock_hub import MockHub, Repo

# Cache


def test_offline_without_a_cache(hub: MockHub, kind: str) -> None:
    before = len(hub.seen)
    code, text = refusal(lambda: open_checkpoint(f"{kind}:org/small", access=Access(offline=True)))
    assert code == "SD145"
    assert re.search(r"`(hf download|modelscope download --model) org/small", text)
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


# Clients


@pytest.mark.parametrize("module", ["huggingface_hub", "modelscope_hub"])
def test_a_client_that_is_not_installed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    source = "hf:org/small" if module == "huggingface_hub" else "ms:org/small"
    code, text = refusal(lambda: open_checkpoint(source))
    assert (code, "pip install" in text, module in text) == ("SD147", True, True)


def test_a_client_that_is_too_old(hub: MockHub, monkeypatch: pytest.MonkeyPatch) -> None:
    need_modelscope()
    import modelscope_hub

    monkeypatch.setattr(modelscope_hub, "__version__", "0.4.6")
    code, text = refusal(lambda: open_checkpoint("ms:org/small"))
    assert (code, "too old" in text, hub.seen) == ("SD147", True, [])
