"""Facts that contradict each other, origins, and the fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.contract.codec import fingerprint
from specctl.contract.consistency import check_manifest, fact_paths
from specctl.contract.manifest import Manifest, Origin, TensorRef, find_origin

replace = msgspec.structs.replace

OTHER_MAP = TensorRef(key="other", file="model.safetensors", shape=(), dtype="I64", begin=0, end=8)


def with_value(manifest: Manifest, path: str, value: Any) -> Manifest:
    """Return the manifest with one dotted path replaced."""
    first, _, rest = path.partition(".")
    if not rest:
        return replace(manifest, **{first: value})
    return replace(manifest, **{first: with_value(getattr(manifest, first), rest, value)})


def test_a_good_manifest_has_no_findings(manifest: Manifest) -> None:
    assert check_manifest(manifest) == ()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("geometry.verify_width", 5),
        ("geometry.draft_width", 3),
        ("vocabulary.target_vocab_size", 65),
        ("vocabulary.draft_vocab_size", 64),
        ("vocabulary.map_kind", "identity"),
        ("vocabulary.map_tensor", None),
        ("vocabulary.map_digest", None),
        ("vocabulary.token_map_file", "map.json"),
        ("target.vocab_size", 65),
        ("target.decoder.layer_types", ("full_attention",)),
        ("target.decoder.num_kv_heads", 3),
        ("target.files", ()),
        ("draft.decoder.layer_types", ()),
        ("draft.target_hidden_size", 32),
        ("draft.aux_layer_ids", (0, 1, 2)),
        ("draft.aux_layer_ids", None),
        ("parallel.layer_bytes", (1,)),
        ("sharing", None),
        ("sharing.head", "target"),
        ("sharing.embedding_single_stage", "own"),
        ("sharing.embedding_multi_stage", "own"),
        ("vocabulary.map_tensor", OTHER_MAP),
        ("vocabulary.forced_ids", (-1,)),
        ("vocabulary.forced_ids", (64,)),
        ("parallel.layer_bytes", (-1, 100)),
        ("parallel.tensor_parallel_sizes", (0, 1)),
        ("graphs.batch_buckets", (2, 1)),
        ("graphs.batch_buckets", (1, 1)),
        ("draft", None),
    ],
)
def test_contradictions(manifest: Manifest, path: str, value: Any) -> None:
    found = check_manifest(with_value(manifest, path, value), name="m.yaml")
    assert found
    assert {d.code for d in found} == {"SD710"}
    assert all(d.where.startswith("m.yaml#/") and d.expected != d.found for d in found)


def test_block_draft_widths(seal: Callable[[Manifest], Manifest], manifest: Manifest) -> None:
    def block(**facts: Any) -> Manifest:
        assert manifest.draft is not None
        draft = replace(manifest.draft, algorithm="dspark", format="speculators-dspark")
        geometry = replace(manifest.geometry, **facts)
        return seal(replace(manifest, draft=draft, geometry=geometry))

    good: dict[str, Any] = {"sample_from_anchor": False, "draft_block_size": 6, "draft_width": 4}
    assert check_manifest(block(**good)) == ()
    for wrong in ({"draft_width": 3}, {"draft_block_size": 3}, {"sample_from_anchor": None}):
        assert {d.code for d in check_manifest(block(**{**good, **wrong}))} == {"SD710"}


def test_every_fact_needs_an_origin(manifest: Manifest) -> None:
    origins = {key: value for key, value in manifest.origins.items() if key != "geometry"}
    found = check_manifest(replace(manifest, origins=origins))
    assert {d.code for d in found} == {"SD708"}
    assert len(found) == len(manifest.geometry.__struct_fields__)


def test_a_key_that_came_later_needs_no_origin_while_it_is_null(manifest: Manifest) -> None:
    """Manifests written before it have origins of single facts, and none for it."""
    origins = {key: value for key, value in manifest.origins.items() if key != "graphs"}
    origins["graphs.batch_buckets"] = Origin(kind="given", where="--batch-buckets")
    assert check_manifest(replace(manifest, origins=origins)) == ()
    graphs = replace(manifest.graphs, cost_table="costs.json")
    (found,) = check_manifest(replace(manifest, origins=origins, graphs=graphs))
    assert (found.code, found.where) == ("SD708", "manifest#/graphs/cost_table")


def test_origins_that_name_nothing(manifest: Manifest) -> None:
    extra = {**manifest.origins, "geometri": Origin(kind="read", where="x")}
    (found,) = check_manifest(replace(manifest, origins=extra))
    assert (found.code, found.where) == ("SD709", "manifest#/origins/geometri")


def test_origins_match_whole_path_parts(manifest: Manifest) -> None:
    assert find_origin({"target": 1, "target.decoder": 2}, "target.decoder.rope.theta") == 2
    assert find_origin({"tar": 1}, "target.vocab_size") is None
    assert all(find_origin(manifest.origins, path) is not None for path in fact_paths(manifest))


def test_more_tokens_than_the_target_has_positions(manifest: Manifest) -> None:
    geometry = replace(manifest.geometry, num_speculative_tokens=128, verify_width=129)
    (found,) = check_manifest(replace(manifest, geometry=geometry))
    assert found.code == "SD710"
    assert (found.expected, found.found) == ("at most 127", "128")


def test_a_head_is_a_matrix(manifest: Manifest) -> None:
    assert manifest.draft is not None
    head = replace(manifest.draft.tensors["head"], shape=())
    draft = replace(manifest.draft, tensors={**manifest.draft.tensors, "head": head})
    (found,) = check_manifest(replace(manifest, draft=draft))
    assert (found.expected, found.found) == ("2", "0")


def test_stale_fingerprint(manifest: Manifest) -> None:
    (found,) = check_manifest(replace(manifest, fingerprint="sha256:0"))
    assert (found.code, found.expected) == ("SD711", manifest.fingerprint)


def digest(manifest: Manifest) -> str:
    return fingerprint(
        target=manifest.target,
        draft=manifest.draft,
        geometry=manifest.geometry,
        vocabulary=manifest.vocabulary,
        sampling=manifest.sampling,
    )


@pytest.mark.parametrize(
    ("path", "value", "changes"),
    [
        ("geometry.num_speculative_tokens", 2, True),
        ("vocabulary.map_digest", "sha256:1", True),
        ("draft.aux_layer_ids", (0, 1, 1), True),
        ("draft.dtype", "F16", True),
        ("target.dtype", "F16", True),
        ("target.decoder.num_kv_heads", 4, True),
        ("target.eos_token_ids", (2, 3), True),
        ("target.config_digest", "sha256:1", True),
        ("draft.has_norm_output", True, True),
        ("draft", None, True),
        ("target.source", "elsewhere", False),
        ("draft.revision", "main", False),
        ("vocabulary.token_map_file", "x.json", False),
    ],
)
def test_what_the_fingerprint_covers(
    manifest: Manifest, path: str, value: Any, changes: bool
) -> None:
    assert (digest(with_value(manifest, path, value)) != digest(manifest)) is changes


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(3)))
def test_fingerprint_ignores_file_order(manifest_parts: Manifest, order: list[int]) -> None:
    files = [replace(manifest_parts.target.files[0], file=f"{i}.safetensors") for i in range(3)]
    first = with_value(manifest_parts, "target.files", tuple(files))
    second = with_value(manifest_parts, "target.files", tuple(files[i] for i in order))
    assert digest(first) == digest(second)
