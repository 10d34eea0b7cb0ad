"""What is in a map, what coverage it has and which size the rule chooses."""

from __future__ import annotations

import itertools
import json
import shutil
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.coverage import (
    SIZE_STEP,
    coverage_at,
    coverage_curve,
    cumulative_hits,
    curve_sizes,
    recommended_size,
)
from specctl.tokenmap.forced import find_forced_ids
from specctl.tokenmap.selection import rank, select

counts = st.lists(st.integers(0, 5), min_size=1, max_size=30)


def test_ties_go_to_the_lowest_id() -> None:
    per_id = array("Q", [1, 5, 5, 0, 1, 9])
    assert rank(per_id, ()).ids_target == (5, 1, 2, 0, 4, 3)
    assert select(rank(per_id, ()), per_id, 2).ids_target == (1, 5)


def test_forced_ids_displace_the_rarest() -> None:
    per_id = array("Q", [0, 5, 4, 3, 2, 1])
    selection = select(rank(per_id, (0, 5)), per_id, 4)
    assert selection.ids_target == (0, 1, 2, 5)
    assert selection.displaced == (3, 4)
    assert selection.num_unseen == 0


def test_unseen_ids_are_counted() -> None:
    per_id = array("Q", [0, 3, 0, 0])
    selection = select(rank(per_id, (3,)), per_id, 4)
    assert selection.num_unseen == 2


@pytest.mark.parametrize(("size", "words"), [(1, "2 forced"), (5, "4 ids"), (0, "nothing")])
def test_impossible_sizes(size: int, words: str) -> None:
    per_id = array("Q", [1, 1, 1, 1])
    with pytest.raises(DiagnosticError) as caught:
        select(rank(per_id, (2, 3)), per_id, size)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SD421"
    assert words in diagnostic.message
    assert diagnostic.expected == "2 to 4"


@settings(max_examples=100, deadline=None)
@given(counts, st.data())
def test_selection_invariants(values: list[int], data: st.DataObject) -> None:
    per_id = array("Q", values)
    forced = data.draw(st.sets(st.integers(0, len(values) - 1)))
    size = data.draw(st.integers(max(1, len(forced)), len(values)))
    ranking = rank(per_id, forced)
    ids = select(ranking, per_id, size).ids_target
    assert sorted(ranking.ids_target) == list(range(len(values)))
    assert list(ids) == sorted(set(ids))
    assert len(ids) == size
    assert forced <= set(ids)
    left_out = set(range(len(values))) - set(ids)
    free = set(ids) - forced
    if left_out and free:
        # Whoever is out has fewer occurrences, or as many and a higher id.
        assert max((values[i], -i) for i in left_out) < min((values[i], -i) for i in free)
    larger = data.draw(st.integers(size, len(values)))
    assert set(ids) <= set(select(ranking, per_id, larger).ids_target)


@settings(max_examples=100, deadline=None)
@given(counts, st.data())
def test_coverage_is_the_share_of_held_out_tokens(values: list[int], data: st.DataObject) -> None:
    per_id = array("Q", values)
    held = data.draw(st.lists(st.integers(0, 5), min_size=len(values), max_size=len(values)))
    ranking = rank(per_id, ())
    hits = cumulative_hits(ranking, array("Q", held))
    for size in range(1, len(values) + 1):
        inside = sum(held[i] for i in select(ranking, per_id, size).ids_target)
        expected = inside / sum(held) if sum(held) else 1.0
        assert coverage_at(hits, size) == expected


def test_recommended_size_is_the_smallest_that_keeps_coverage() -> None:
    num_ids = 4000
    per_id = array("Q", [max(0, 3000 - i) for i in range(num_ids)])
    ranking = rank(per_id, (num_ids - 1,))
    hits = cumulative_hits(ranking, per_id)
    for max_loss in (0.0, 0.001, 0.005, 0.05, 0.5):
        size = recommended_size(ranking, hits, max_loss)
        assert size % SIZE_STEP == 0
        goal = coverage_at(hits, ranking.num_seen) - max_loss
        assert coverage_at(hits, size) >= goal
        assert size == SIZE_STEP or coverage_at(hits, size - SIZE_STEP) < goal
    assert recommended_size(ranking, hits, 0.0) == 3072


def test_recommended_size_stays_in_the_tokenizer_and_holds_the_forced_ids() -> None:
    per_id = array("Q", [1] * 200)
    ranking = rank(per_id, range(150))
    hits = cumulative_hits(ranking, per_id)
    assert recommended_size(ranking, hits) == 200
    assert recommended_size(ranking, hits, 0.9) == 200
    assert curve_sizes(ranking) == (192, 200)


def test_curve_rises_and_has_the_extra_sizes() -> None:
    per_id = array("Q", range(1000))
    ranking = rank(per_id, ())
    curve = coverage_curve(ranking, cumulative_hits(ranking, per_id), (333,))
    assert [p.size for p in curve] == [128, 192, 256, 333, 384, 512, 768, 1000]
    assert all(a.coverage <= b.coverage for a, b in itertools.pairwise(curve))
    assert curve[-1].coverage == 1.0


def test_no_held_out_token_is_full_coverage() -> None:
    per_id = array("Q", [1, 1])
    hits = cumulative_hits(rank(per_id, ()), array("Q", [0, 0]))
    assert coverage_at(hits, 1) == 1.0


def test_forced_ids_and_their_reasons(tokenizer: LoadedTokenizer) -> None:
    found = find_forced_ids(tokenizer, ["100", "<think>"])
    reasons = {forced.target_id: forced.reasons for forced in found.forced}
    think = tokenizer.size - 1
    assert set(reasons) == {0, 1, 2, 40, 100, think}
    assert reasons[0] == (
        "config.json#/eos_token_id",
        "generation_config.json#/eos_token_id",
        "tokenizer_config.json#/eos_token",
        "chat template",
        "special token",
    )
    assert reasons[2] == ("special token",)
    assert reasons[40] == ("generation_config.json#/eos_token_id",)
    assert reasons[100] == ("--keep",)
    assert reasons[think] == ("chat template", "--keep")
    assert found.num_reserved == 1
    assert found.target_vocab_size == tokenizer.size + 11


def copy_target(target_dir: Path, tmp_path: Path, **files: object) -> LoadedTokenizer:
    copy = tmp_path / "copy"
    shutil.copytree(target_dir, copy)
    for name, value in files.items():
        path = copy / f"{name}.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return load_tokenizer(copy / "tokenizer.json")


def test_a_tokenizer_alone_has_its_specials(target_dir: Path, tmp_path: Path) -> None:
    shutil.copy(target_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    found = find_forced_ids(load_tokenizer(tmp_path / "tokenizer.json"))
    assert [forced.target_id for forced in found.forced] == [0, 1, 2]
    assert found.target_vocab_size is None


def test_text_config_and_template_file(target_dir: Path, tmp_path: Path) -> None:
    tokenizer = copy_target(
        target_dir,
        tmp_path,
        config={"text_config": {"eos_token_id": 60, "vocab_size": 999}},
        tokenizer_config={"chat_template": [{"name": "x", "template": "<think>"}]},
    )
    (tmp_path / "copy" / "chat_template.jinja").write_text("<|reserved_special_token_0|>")
    found = find_forced_ids(tokenizer)
    assert {f.target_id for f in found.forced} == {0, 1, 2, 3, 40, 60, tokenizer.size - 1}
    assert found.num_reserved == 0
    assert found.target_vocab_size == 999


def test_ids_that_the_tokenizer_lacks(target_dir: Path, tmp_path: Path) -> None:
    tokenizer = copy_target(target_dir, tmp_path, config={"eos_token_id": 5000})
    with pytest.raises(DiagnosticError) as caught:
        find_forced_ids(tokenizer, ["<nope>", "7000", str(1 << 80)])
    assert [(d.code, d.where) for d in caught.value.diagnostics] == [
        ("SD426", "--keep <nope>"),
        ("SD426", "config.json#/eos_token_id"),
        ("SD426", "--keep"),
        ("SD426", "--keep"),
    ]


def test_a_broken_config_is_reported(target_dir: Path, tmp_path: Path) -> None:
    tokenizer = copy_target(target_dir, tmp_path, generation_config="{nope")
    with pytest.raises(DiagnosticError) as caught:
        find_forced_ids(tokenizer)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.where) == ("SD117", "generation_config.json")
