"""Manifests of the fixtures: facts, origins, given values, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.contract.codec import dump_manifest, parse_manifest, verify_digests
from specctl.contract.consistency import fact_paths
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import find_origin
from specctl.contract.vocabulary_map import map_digest
from specctl.ops.emit_manifest import build_manifest, emit_manifest
from specctl.ops.given import Given
from specctl.ops.inspect import inspect
from specctl.ops.manifest_sections import portable_path

Named = Callable[[str], str]
Copied = Callable[[str], Path]

PAIRS = [
    ("hf-llama-clean", "speculators-eagle3-clean", None),
    ("hf-llama-clean", "safeailab-eagle3-clean", 3),
    ("hf-llama-clean", "speculators-dspark-clean", None),
    ("hf-llama-clean", "speculators-mtp-clean", None),
    ("hf-llama-tiny", "deepseek-mtp-clean", 1),
    ("hf-llama-sharded", None, None),
    ("hf-llama-tied", None, None),
    ("hf-llama-bin", None, None),
    ("hf-mistral-clean", None, None),
    ("hf-qwen2-clean", None, None),
    ("hf-qwen3-clean", None, None),
]


def refuse(*arguments: object, **given: object) -> set[str]:
    with pytest.raises(DiagnosticError) as caught:
        emit_manifest(*arguments, **given)  # type: ignore[arg-type]
    assert all(d.severity != "info" for d in caught.value.diagnostics)
    return {d.code for d in caught.value.diagnostics}


@pytest.mark.parametrize(("target", "draft", "gamma"), PAIRS)
def test_round_trip_digests_and_origins(
    checkpoint: Named, target: str, draft: str | None, gamma: int | None, tmp_path: Path
) -> None:
    manifest = emit_manifest(
        checkpoint(target),
        None if draft is None else checkpoint(draft),
        num_speculative_tokens=gamma,
        manifest_dir=tmp_path,
    )
    assert parse_manifest(dump_manifest(manifest), name="m.yaml") == manifest
    assert verify_digests(manifest, tmp_path) == ()
    assert all(find_origin(manifest.origins, path) is not None for path in fact_paths(manifest))
    assert manifest.diagnostics == ()


def test_target_only(checkpoint: Named) -> None:
    manifest = emit_manifest(checkpoint("hf-llama-clean"), None)
    assert (manifest.draft, manifest.sharing) == (None, None)
    assert manifest.geometry.verify_width == 1
    assert manifest.vocabulary.map_kind == "identity"
    assert manifest.parallel.draft_bytes == 0


def test_facts_agree_with_inspect(checkpoint: Named) -> None:
    source, target = checkpoint("speculators-eagle3-clean"), checkpoint("hf-llama-clean")
    manifest, report = emit_manifest(target, source), inspect(source, target)
    assert manifest.draft is not None
    assert report.aux_hidden is not None
    assert report.geometry is not None
    assert manifest.draft.aux_layer_ids == report.aux_hidden.output_layer_ids
    assert manifest.geometry.num_speculative_tokens == report.geometry.num_speculative_tokens
    assert manifest.vocabulary.map_digest == report.vocabulary.map_digest
    assert manifest.vocabulary.map_tensor == report.vocabulary.map_tensor
    assert manifest.parallel.draft_bytes == report.tensors.num_bytes
    assert set(manifest.vocabulary.forced_ids) <= set(manifest.target.eos_token_ids)


def test_parallel_facts(checkpoint: Named) -> None:
    report = inspect(checkpoint("hf-llama-clean"))
    parallel = emit_manifest(checkpoint("hf-llama-clean"), None).parallel
    parts = {part.name: part.num_bytes for part in report.tensors.parts}
    assert sum(parallel.layer_bytes) == parts["layers"]
    assert (parallel.embedding_bytes, parallel.head_bytes) == (parts["embedding"], parts["head"])
    assert parallel.tensor_parallel_sizes[0] == 1
    tied = emit_manifest(checkpoint("hf-llama-tied"), None).parallel
    assert tied.head_bytes == tied.embedding_bytes, "the last stage holds a copy"


def test_given_token_count_wins_and_says_so(checkpoint: Named) -> None:
    emission = build_manifest(
        checkpoint("hf-llama-clean"),
        checkpoint("speculators-eagle3-clean"),
        given=Given(num_speculative_tokens=1),
    )
    manifest = emission.manifest
    assert manifest.geometry.num_speculative_tokens == 1
    origin = manifest.origins["geometry.num_speculative_tokens"]
    assert (origin.kind, origin.where) == ("given", "--num-speculative-tokens")
    assert "SD713" not in {d.code for d in emission.diagnostics}, "a choice, no contradiction"


def test_given_layers_that_differ_are_a_warning(checkpoint: Named) -> None:
    target, draft = checkpoint("hf-llama-clean"), checkpoint("speculators-eagle3-clean")
    stated = emit_manifest(target, draft).draft
    assert stated is not None
    assert stated.aux_layer_ids is not None
    same = build_manifest(target, draft, given=Given(aux_layer_ids=stated.aux_layer_ids))
    assert same.diagnostics == ()
    other = (0, *stated.aux_layer_ids[1:])
    emission = build_manifest(target, draft, given=Given(aux_layer_ids=other))
    assert [d.code for d in emission.diagnostics] == ["SD713"]
    assert [d.code for d in emission.manifest.diagnostics] == ["SD713"]
    assert emission.manifest.draft is not None
    assert emission.manifest.draft.aux_layer_ids == other
    assert emission.manifest.origins["draft.aux_layer_ids"].kind == "given"


def test_boundary_numbering_is_converted(checkpoint: Named) -> None:
    target, draft = checkpoint("hf-llama-clean"), checkpoint("speculators-eagle3-clean")
    read = inspect(draft).aux_hidden
    assert read is not None
    manifest = emit_manifest(target, draft, aux_layer_ids=read.read_ids, aux_numbering="boundary")
    assert manifest.draft is not None
    assert manifest.draft.aux_layer_ids == read.output_layer_ids


def test_refusals(checkpoint: Named) -> None:
    target, eagle3 = checkpoint("hf-llama-clean"), checkpoint("speculators-eagle3-clean")
    assert refuse(target, checkpoint("safeailab-eagle3-clean")) == {"SD301"}
    assert refuse(target, checkpoint("speculators-dspark-clean"), num_speculative_tokens=99) == {
        "SD302"
    }
    assert refuse(eagle3, target) == {"SD201"}
    assert refuse(eagle3, None) == {"SD201"}
    assert "SD305" in refuse(checkpoint("hf-llama-wide"), eagle3)
    assert refuse(target, None, num_speculative_tokens=4) == {"SD714"}
    assert refuse(target, eagle3, aux_layer_ids=(0, 1, 99)) >= {"SD304"}
    assert refuse(checkpoint("hf-llama-layer-missing"), None) == {"SD501"}
    assert refuse(checkpoint("hf-gpt2-unsupported"), None) == {"SD716"}


def test_token_map_of_a_shared_head(checkpoint: Named, tmp_path: Path) -> None:
    target, draft = checkpoint("hf-llama-tiny"), checkpoint("deepseek-mtp-clean")
    ids = [1, 0, 7, 30, 9]
    path = tmp_path / "map.json"
    path.write_text(json.dumps(ids))
    manifest = emit_manifest(
        target, draft, num_speculative_tokens=1, token_map=str(path), manifest_dir=tmp_path
    )
    vocabulary = manifest.vocabulary
    assert (vocabulary.map_kind, vocabulary.draft_vocab_size) == ("reduced", 5)
    assert vocabulary.map_digest == map_digest(ids), "file order is draft-id order"
    assert vocabulary.token_map_file == "map.json"
    assert manifest.origins["vocabulary.map_digest"].kind == "given"
    assert verify_digests(manifest, tmp_path) == ()
    path.write_text(json.dumps(ids[::-1]))
    assert [d.code for d in verify_digests(manifest, tmp_path)] == ["SD702"]


@pytest.mark.parametrize(
    ("text", "code"),
    [("[1, 1]", "SD404"), ("[1, 64]", "SD402"), ("{}", "SD420"), ("[]", "SD420"), (None, "SD135"),
     (json.dumps([*range(64)]), "SD715")],
)  # fmt: skip
def test_unusable_token_maps(
    checkpoint: Named, tmp_path: Path, text: str | None, code: str
) -> None:
    path = tmp_path / "map.json"
    if text is not None:
        path.write_text(text)
    found = refuse(
        checkpoint("hf-llama-tiny"),
        checkpoint("deepseek-mtp-clean"),
        num_speculative_tokens=1,
        token_map=str(path),
    )
    assert code in found


def test_token_map_against_the_drafts_own(checkpoint: Named, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text("[1, 2, 3]")
    target, draft = checkpoint("hf-llama-clean"), checkpoint("speculators-eagle3-clean")
    assert refuse(target, draft, token_map=str(path)) == {"SD715"} | (
        {"SD406"} if 1 not in (1, 2, 3) else set()
    )


def test_a_map_without_end_ids_is_a_warning(checkpoint: Named, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text("[5, 6]")
    emission = build_manifest(
        checkpoint("hf-llama-tiny"),
        checkpoint("deepseek-mtp-clean"),
        given=Given(num_speculative_tokens=1, token_map=str(path)),
    )
    assert "SD406" in {d.code for d in emission.diagnostics}
    assert emission.manifest.vocabulary.forced_ids == ()


def test_paths_are_relative_inside_the_manifests_directory(copied: Copied, tmp_path: Path) -> None:
    target = copied("hf-llama-clean")
    inside = emit_manifest(str(target), None, manifest_dir=tmp_path)
    assert inside.target.source == "hf-llama-clean"
    outside = emit_manifest(str(target), None, manifest_dir=tmp_path / "elsewhere")
    assert outside.target.source == str(target.resolve())
    assert portable_path(str(tmp_path), tmp_path.resolve()) == "."


def test_a_head_whose_rows_are_of_other_ids_is_refused(checkpoint: Named) -> None:
    """Each fact of it is sound, and every proposal would be another token than is meant."""
    draft = checkpoint("speculators-eagle3-numbers-other-order")
    with pytest.raises(DiagnosticError) as caught:
        emit_manifest(checkpoint("hf-llama-tiny"), draft)
    (found,) = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert found.code == "SD532"
    assert found.where.endswith("model.safetensors::d2t[24 I64]")
