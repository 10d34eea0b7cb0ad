"""Hub sources through the use cases: reports, validation, manifests and what the runtime loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.checkpoint import Access, source_directory
from specctl.contract.codec import dump_manifest, load_manifest, verify_digests, verify_places
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.hub_manifest import local_manifest
from specctl.ops.inspect import inspect
from specctl.ops.validate import validate
from tests.hub_clients import need_modelscope, point_clients
from tests.mock_hub import COMMIT, MockHub, Repo, serving

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
DRAFT, TARGET = "speculators-eagle3-clean", "hf-llama-clean"
OTHER = "f" * 40


def files_of(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (CHECKPOINTS / name).iterdir()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    repos = {"org/draft": Repo(files=files_of(DRAFT)), "org/target": Repo(files=files_of(TARGET))}
    with serving(repos) as server:  # type: ignore[arg-type]
        point_clients(server, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture(params=["hf", "ms"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ms":
        need_modelscope()
    return str(request.param)


def written(kind: str, draft: str = "") -> tuple[Path, Manifest]:
    manifest = emit_manifest(
        f"{kind}:org/target", draft or f"{kind}:org/draft", num_speculative_tokens=3
    )
    Path("manifest.yaml").write_text(dump_manifest(manifest))
    return Path("manifest.yaml"), manifest


def test_inspect_says_the_revision(hub: MockHub, kind: str) -> None:
    report = inspect(f"{kind}:org/draft", f"{kind}:org/target")
    assert report.diagnostics == ()
    assert report.roles.source.path == f"{kind}:org/draft"
    assert report.roles.source.revision == (COMMIT if kind == "hf" else "master")
    assert report.roles.target is not None
    assert report.roles.target.revision == report.roles.source.revision
    assert inspect(str(CHECKPOINTS / DRAFT)).roles.source.revision is None


def test_findings_are_placed_in_the_source(hub: MockHub, kind: str) -> None:
    report = validate([f"{kind}:org/draft", f"{kind}:org/absent"], target=f"{kind}:org/target")
    assert [r.source for r in report.results] == [f"{kind}:org/draft", f"{kind}:org/absent"]
    assert report.results[0].diagnostics == ()
    assert [d.code for d in report.results[1].diagnostics] == ["SD137"]
    config = hub.repos["org/draft"].files["config.json"]
    assert isinstance(config, bytes)
    hub.repos["org/draft"].files["config.json"] = b"\xef\xbb\xbf" + config
    (result,) = validate([f"{kind}:org/draft"]).results
    assert [d.where for d in result.diagnostics] == [f"{kind}:org/draft/config.json"]


def test_the_manifest_is_the_same_as_from_directories(hub: MockHub, kind: str) -> None:
    _, manifest = written(kind)
    local = emit_manifest(
        str(CHECKPOINTS / TARGET), str(CHECKPOINTS / DRAFT), num_speculative_tokens=3
    )
    assert manifest.draft is not None
    assert manifest.target.source == f"{kind}:org/target"
    assert manifest.draft.source == f"{kind}:org/draft"
    revision = COMMIT if kind == "hf" else "master"
    assert (manifest.target.revision, manifest.draft.revision) == (revision, revision)
    assert (local.target.revision, manifest.fingerprint) == (None, local.fingerprint)
    assert manifest.target.files == local.target.files


def test_a_manifest_is_checked_on_its_hub(hub: MockHub, kind: str) -> None:
    path, _ = written(kind)
    assert validate([str(path)]).is_clean
    assert all(s.num_bytes < 200_000 for s in hub.seen)
    files = hub.repos["org/draft"].files
    files["config.json"] = bytes(files["config.json"]) + b"\n"  # type: ignore[arg-type]
    (result,) = validate([str(path)]).results
    assert [(d.code, d.where) for d in result.diagnostics] == [
        ("SD702", "manifest.yaml#/draft/source")
    ]


def test_a_moved_branch_does_not_change_a_manifest(hub: MockHub) -> None:
    path, _ = written("hf")
    hub.seen.clear()
    assert validate([str(path)]).is_clean
    asked = [s.path for s in hub.of("/api/models/")]
    assert all(f"/revision/{COMMIT}" in part for part in asked)
    hub.repos["org/draft"].commit = OTHER
    (result,) = validate([str(path)]).results
    assert [d.code for d in result.diagnostics] == ["SD138"]


def test_the_runtime_gets_directories(hub: MockHub, kind: str) -> None:
    path, manifest = written(kind)
    before = path.read_bytes()
    with local_manifest(path) as local:
        assert local.target_name == "target"
        found = load_manifest(local.path)
        assert verify_digests(found, local.path.parent) == ()
        assert verify_places(found, local.path.parent) == ()
        assert found.fingerprint == manifest.fingerprint
        assert Path(found.target.source).is_dir()
        assert found.draft is not None
        assert {p.name for p in Path(found.draft.source).iterdir()} >= set(files_of(DRAFT))
    assert not local.path.exists()
    assert path.read_bytes() == before
    count = len(hub.seen)
    with local_manifest(path, access=Access(offline=True)) as local:
        assert verify_digests(load_manifest(local.path), local.path.parent) == ()
    assert len(hub.seen) == count


def test_a_local_target_beside_a_draft_of_a_hub(hub: MockHub, tmp_path: Path) -> None:
    place = tmp_path / "target"
    place.mkdir()
    for name, content in files_of(TARGET).items():
        (place / name).write_bytes(content)
    manifest = emit_manifest("target", "hf:org/draft", num_speculative_tokens=3)
    Path("manifest.yaml").write_text(dump_manifest(manifest))
    assert manifest.target.source == "target"
    with local_manifest(Path("manifest.yaml")) as local:
        assert local.target_name is None
        assert load_manifest(local.path).target.source == str(place)
        assert verify_digests(load_manifest(local.path), local.path.parent) == ()


def test_a_manifest_without_hubs_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    with local_manifest(path) as local:
        assert local.path == path


def test_the_loader_says_that_a_source_is_on_a_hub(hub: MockHub) -> None:
    path, manifest = written("hf")
    found = verify_digests(manifest, path.parent)
    assert [(d.code, d.where) for d in found] == [
        ("SD712", "manifest#/target/source"),
        ("SD712", "manifest#/draft/source"),
    ]
    assert verify_places(manifest, path.parent) == ()


def test_a_tokenizer_of_a_hub(hub: MockHub, kind: str) -> None:
    directory = source_directory(f"{kind}:org/target")
    assert (directory / "tokenizer.json").read_bytes() == files_of(TARGET)["tokenizer.json"]
    assert not (directory / "model.safetensors").exists()
