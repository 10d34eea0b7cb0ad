"""The stage split against every split there is, and what each stage holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import Stage, split_stages

MANIFESTS = Path(__file__).parents[4] / "fixtures" / "manifests" / "v1"
EAGLE3 = load_manifest(MANIFESTS / "speculators-eagle3.yaml")
MTP = load_manifest(MANIFESTS / "deepseek-mtp-token-map.yaml")
TARGET_ONLY = load_manifest(MANIFESTS / "target-only.yaml")


def sized(
    manifest: Manifest,
    layers: Sequence[int],
    *,
    embedding: int = 0,
    head: int = 0,
    draft: int = 0,
    is_tied: bool = False,
) -> Manifest:
    decoder = msgspec.structs.replace(manifest.target.decoder, num_layers=len(layers))
    return msgspec.structs.replace(
        manifest,
        target=msgspec.structs.replace(manifest.target, decoder=decoder, is_head_tied=is_tied),
        parallel=msgspec.structs.replace(
            manifest.parallel,
            layer_bytes=tuple(layers),
            embedding_bytes=embedding,
            head_bytes=head,
            draft_bytes=draft,
        ),
    )


def counts(stages: Sequence[Stage]) -> tuple[int, ...]:
    return tuple(stage.num_layers for stage in stages)


def heaviest(manifest: Manifest, split: tuple[int, ...]) -> int:
    stages = split_stages(manifest, len(split), stage_layers=split)
    return max(stage.num_bytes for stage in stages)


@settings(deadline=None, max_examples=60)
@given(
    layers=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    embedding=st.integers(0, 20),
    head=st.integers(0, 20),
    draft=st.integers(0, 20),
    data=st.data(),
)
def test_no_other_split_has_a_lighter_heaviest_stage(
    layers: list[int], embedding: int, head: int, draft: int, data: st.DataObject
) -> None:
    manifest = sized(EAGLE3, layers, embedding=embedding, head=head, draft=draft)
    num_stages = data.draw(st.integers(1, len(layers)))
    stages = split_stages(manifest, num_stages)
    cuts = itertools.combinations(range(1, len(layers)), num_stages - 1)
    splits = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(layers)))) for cut in cuts]
    best = min((heaviest(manifest, split), split) for split in splits)
    assert (max(stage.num_bytes for stage in stages), counts(stages)) == best
    assert [stage.first_layer for stage in stages] == [
        sum(counts(stages)[:index]) for index in range(num_stages)
    ]
    assert sum(counts(stages)) == len(layers)


def test_embedding_head_and_draft_are_where_they_run() -> None:
    manifest = sized(EAGLE3, (10,) * 4, embedding=7, head=5, draft=3)
    first, middle, last = split_stages(manifest, 3, stage_layers=(1, 2, 1))
    assert (first.has_embedding, first.has_head, first.target_bytes) == (True, False, 17)
    assert (middle.has_embedding, middle.has_head, middle.num_bytes) == (False, False, 20)
    assert (last.has_embedding, last.has_head, last.target_bytes) == (False, True, 15)
    assert first.draft_embedding is None
    assert last.draft_bytes >= 3


@pytest.mark.parametrize(
    ("multi_stage", "is_tied", "origin", "draft_bytes"),
    [
        ("own", False, "own", 3),
        ("own", True, "own", 3),
        ("checkpoint", False, "checkpoint", 10),
        ("checkpoint", True, "head", 3),
    ],
)
def test_the_draft_has_an_embedding_on_the_last_stage(
    multi_stage: str, is_tied: bool, origin: str, draft_bytes: int
) -> None:
    manifest = sized(MTP, (10, 10), embedding=7, head=7, draft=3, is_tied=is_tied)
    assert manifest.sharing is not None
    sharing = msgspec.structs.replace(manifest.sharing, embedding_multi_stage=multi_stage)
    last = split_stages(msgspec.structs.replace(manifest, sharing=sharing), 2)[-1]
    assert (last.draft_embedding, last.draft_bytes) == (origin, draft_bytes)


def test_one_stage_shares_the_embedding_as_the_manifest_says() -> None:
    manifest = sized(MTP, (10, 10), embedding=7, head=7, draft=3, is_tied=True)
    assert manifest.sharing is not None
    (stage,) = split_stages(manifest, 1)
    assert stage.draft_embedding == manifest.sharing.embedding_single_stage
    assert stage.num_bytes == 20 + 7 + 3  # a tied head is the embedding


def test_without_a_draft_nothing_is_said_of_one() -> None:
    stages = split_stages(TARGET_ONLY, 1)
    assert [(stage.draft_embedding, stage.draft_bytes) for stage in stages] == [(None, 0)]


def test_more_stages_than_layers() -> None:
    with pytest.raises(DiagnosticError, match="SD850"):
        split_stages(sized(EAGLE3, (1, 1)), 3)


@pytest.mark.parametrize("given_layers", [(1, 1), (4,), (0, 4), (-1, 5), (2, 1, 1), ()])
def test_layers_that_are_no_split(given_layers: tuple[int, ...]) -> None:
    with pytest.raises(DiagnosticError, match="SD851"):
        split_stages(sized(EAGLE3, (1,) * 4), 2, stage_layers=given_layers)
