"""The file between the packages: the runtime takes what specctl writes; old files still load."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.contract.codec import dump_manifest, load_manifest, parse_manifest, verify_digests
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "fixtures" / "manifests"
CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
FROZEN = sorted((MANIFESTS / "v1").glob("*.yaml"))


def test_there_are_frozen_manifests() -> None:
    assert {path.stem for path in FROZEN} == {
        "target-only",
        "speculators-eagle3",
        "speculators-dspark",
        "deepseek-mtp-token-map",
    }


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_frozen_manifests_load_and_their_files_are_unchanged(path: Path) -> None:
    manifest = load_manifest(path)
    assert verify_digests(manifest, path.parent) == ()
    assert parse_manifest(dump_manifest(manifest), name="again.yaml") == manifest


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_facts_of_a_new_manifest_are_those_of_the_frozen_one(path: Path) -> None:
    frozen = load_manifest(path)
    draft = frozen.draft
    token_map = frozen.vocabulary.token_map_file
    new = emit_manifest(
        str(path.parent / frozen.target.source),
        None if draft is None else str(path.parent / draft.source),
        token_map=None if token_map is None else str(path.parent / token_map),
        num_speculative_tokens=1 if token_map is not None else None,
    )
    assert new.fingerprint == frozen.fingerprint
    assert new.geometry == frozen.geometry
    assert new.parallel == frozen.parallel


def test_the_runtime_loads_what_specctl_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the runtime extra is not installed")
    from runtime.loading import load_models

    for draft in (None, "speculators-eagle3-clean", "safeailab-eagle3-clean"):
        manifest = emit_manifest(
            str(CHECKPOINTS / "hf-llama-clean"),
            None if draft is None else str(CHECKPOINTS / draft),
            num_speculative_tokens=None if draft is None else 3,
            manifest_dir=tmp_path,
        )
        path = tmp_path / "manifest.yaml"
        path.write_text(dump_manifest(manifest), "utf-8")
        models = load_models(
            load_manifest(path), tmp_path, device=torch.device("cpu"), dtype=torch.float32
        )
        assert (models.draft is None) is (draft is None)
        assert models.diagnostics == ()


def test_the_runtime_refuses_files_that_changed_since(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the runtime extra is not installed")
    from runtime.loading import load_models

    defect = MANIFESTS / "defects" / "digest-mismatch.yaml"
    with pytest.raises(DiagnosticError) as caught:
        load_models(
            load_manifest(defect), defect.parent, device=torch.device("cpu"), dtype=torch.float32
        )
    assert {d.code for d in caught.value.diagnostics} == {"SD702"}


def test_a_frozen_mtp_manifest_runs_with_its_token_map() -> None:
    torch = pytest.importorskip("torch", reason="the runtime extra is not installed")
    from runtime.loading import load_models

    path = MANIFESTS / "v1" / "deepseek-mtp-token-map.yaml"
    manifest = load_manifest(path)
    models = load_models(manifest, path.parent, device=torch.device("cpu"), dtype=torch.float32)
    assert models.draft is not None
    ids = models.draft.draft_to_target_R
    assert len(ids) == manifest.vocabulary.draft_vocab_size
    assert torch.equal(models.draft.head_RH, models.target.head_VD[ids])
    assert models.draft.embedding_VH is models.target.embedding_VD


def test_the_runtime_loads_a_frozen_block_draft() -> None:
    torch = pytest.importorskip("torch", reason="the runtime extra is not installed")
    from runtime.loading import load_models

    path = MANIFESTS / "v1" / "speculators-dspark.yaml"
    models = load_models(
        load_manifest(path), path.parent, device=torch.device("cpu"), dtype=torch.float32
    )
    assert models.draft is not None
    assert models.draft.facts.algorithm == "dspark"


def test_expected_list_covers_every_manifest() -> None:
    import yaml

    listed = set(yaml.safe_load((MANIFESTS / "expected.yaml").read_text("utf-8")))
    found = {path.relative_to(MANIFESTS).as_posix() for path in MANIFESTS.rglob("*/*.yaml")}
    assert listed == found
