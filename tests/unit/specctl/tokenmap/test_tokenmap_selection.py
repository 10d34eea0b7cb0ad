"""What is in a map, what coverage it has and which size the rule chooses."""

from __future__ import annotations

import itertools
import json
import shutil
from array import array
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.coverage import (
    SIZE_STEP,
    Slice,
    allowed_sizes,
    coverage_at,
    cumulative_hits,
    curve_sizes,
    size_step,
    slice_coverage,
    smallest_within,
)
from specctl.tokenmap.forced import find_forced_ids
from specctl.tokenmap.selection import rank, refusals, select, weighted_counts
from specctl.tokenmap.sizes import (
    SizeTextError,
    integer_weights,
    parse_sizes,
    parse_weights,
)

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


@pytest.mark.parametrize("divisible_by", [1, 3, 8])
def test_smallest_size_that_keeps_coverage(divisible_by: int) -> None:
    num_ids = 4000
    per_id = array("Q", [max(0, 3000 - i) for i in range(num_ids)])
    ranking = rank(per_id, (num_ids - 1,))
    hits = cumulative_hits(ranking, per_id)
    sizes = allowed_sizes(ranking, divisible_by)
    step = size_step(divisible_by)
    assert step % SIZE_STEP == 0
    for max_loss in (0.0, 0.001, 0.005, 0.05, 0.5):
        size = smallest_within(ranking, hits, max_loss, sizes)
        assert size % divisible_by == 0
        goal = coverage_at(hits, ranking.num_seen) - max_loss
        assert coverage_at(hits, size) >= goal
        assert size == step or coverage_at(hits, size - step) < goal


def test_allowed_sizes_stay_in_the_tokenizer_and_hold_the_forced_ids() -> None:
    ranking = rank(array("Q", [1] * 200), range(150))
    assert allowed_sizes(ranking) == (200,)
    assert allowed_sizes(ranking, 16) == (192,)
    assert allowed_sizes(ranking, 128) == (200,)  # no multiple holds the forced ids
    assert curve_sizes(ranking) == (160, 192, 200)


def test_a_slice_has_its_own_curve_and_ids_outside_are_lost() -> None:
    per_id = array("Q", range(1000))
    ranking = rank(per_id, ())
    total = sum(per_id)
    part = Slice(kind="domain", name="x", per_id=per_id, total=total + 100, num_tokens=total + 100)
    curve = slice_coverage(ranking, part, (1000, 333, 333, 128)).curve
    assert [p.size for p in curve] == [128, 333, 1000]
    assert all(a.coverage < b.coverage for a, b in itertools.pairwise(curve))
    assert curve[-1].coverage == total / (total + 100)


def test_ids_without_a_token_are_never_taken() -> None:
    per_id = array("Q", [0, 9, 9, 1])
    ranking = rank(per_id, (), without_token={2})
    assert ranking.ids_target == (1, 3, 0)
    assert (
        refusals(ranking, (4,), 1)[0].message == "a map of 4 ids does not fit a tokenizer of 3 ids"
    )


def test_files_of_fr_spec_list_ids_by_rank() -> None:
    per_id = array("Q", [1, 5, 5, 0, 9])
    selection = select(rank(per_id, (3,)), per_id, 4)
    assert selection.ids_target == (1, 2, 3, 4)
    assert selection.ids_by_rank == (4, 1, 2, 3)


@pytest.mark.parametrize(
    ("size", "divisible_by", "expected"),
    [(10, 4, "8 or 12"), (19, 8, "16"), (5, 64, "a multiple of 64 from 3 to 20")],
)
def test_a_size_that_ranks_cannot_share_names_the_next_ones(
    size: int, divisible_by: int, expected: str
) -> None:
    ranking = rank(array("Q", [1] * 20), (0, 1, 2))
    (diagnostic,) = refusals(ranking, (size,), divisible_by)
    assert (diagnostic.code, diagnostic.where, diagnostic.expected) == (
        "SD421",
        f"--size {size}",
        expected,
    )
    assert f"{size % divisible_by} rows are left over" in diagnostic.message
    assert diagnostic.help == f"Choose a multiple of {divisible_by}"
    assert refusals(ranking, (16,), 8) == []


def test_sizes_as_people_write_them() -> None:
    assert parse_sizes(["16k,32K", "32000", "32768"]) == (16384, 32000, 32768)
    for text in ("", "k", "1.5k", "-4", "0", "32 k", "9999999k", "8,,9"):
        with pytest.raises(SizeTextError):
            parse_sizes([text])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=20),
    st.decimals(0, 100, places=3),
)
def test_weights_are_exact(values: list[tuple[int, int]], weight: Decimal) -> None:
    """Ranks under a decimal weight are those of exact fractions."""
    weights = parse_weights([f"code={weight}"])
    factors = integer_weights(("code", "prose"), weights)
    code, prose = (array("Q", column) for column in zip(*values, strict=True))
    total = weighted_counts([code, prose], factors, len(values))
    exact = [Fraction(weight) * a + b for a, b in values]
    assert rank(total, ()).ids_target == tuple(
        sorted(range(len(values)), key=lambda i: (-exact[i], i))
    )


@pytest.mark.parametrize(
    "text", ["code", "code=", "=2", "code=x", "code=-1", "code=nan", "a=1,a=2"]
)
def test_texts_that_are_no_weight(text: str) -> None:
    with pytest.raises(SizeTextError):
        parse_weights([text])


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


def test_a_range_of_characters_is_kept(tokenizer: LoadedTokenizer) -> None:
    kept = find_forced_ids(tokenizer, ["U+0041-U+0043"]).forced
    assert {f.token for f in kept if f.reasons == ("--keep",)} == {"A", "B", "C"}
    with pytest.raises(DiagnosticError) as caught:
        find_forced_ids(tokenizer, ["U+4E00-U+9FFF"])  # bytes only: no such token
    assert [d.code for d in caught.value.diagnostics] == ["SD426"]


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
