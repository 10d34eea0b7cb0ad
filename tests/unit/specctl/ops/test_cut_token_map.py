"""Maps cut from counts: weights, slices, the target's outputs, the cost model, ranked lists."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from specctl.cli import app
from specctl.cli.token_map_text import report_text
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.cut_token_map import CutOptions, cut_from_file, cut_token_map
from specctl.ops.token_map_cost import CostOptions
from specctl.tokenmap import read_token_map
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.counts import CountArtefact, CountTable, write_counts
from specctl.tokenmap.writing import write_token_map
from tests.tiny_corpus import write_target
from tests.unit.specctl.ops.counts_samples import artefact

PROSE = ["the quick brown fox jumps over the lazy dog"] * 6
CODE = ["def add(left, right): return left + right"] * 2
CHINESE = ["\u4f60\u597d\u4e16\u754c"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    return load_tokenizer(write_target(tmp_path_factory.mktemp("target")) / "tokenizer.json")


@pytest.fixture(scope="module")
def counts(tokenizer: LoadedTokenizer) -> CountArtefact:
    texts = {"prose": PROSE, "code": CODE}
    return artefact(tokenizer, texts, {"prose": PROSE[:2], "code": CODE})


def options(tmp_path: Path, **changes: object) -> CutOptions:
    return replace(CutOptions(sizes=(24,), weights={}, output=tmp_path / "map"), **changes)  # type: ignore[arg-type]


def ids_of(directory: Path) -> set[int]:
    return set(read_token_map(directory / "token_map.json"))


def test_a_weight_moves_the_map_towards_its_domain(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    plain = cut_token_map(counts, tokenizer, options(tmp_path))
    before = ids_of(tmp_path / "map")
    weights = {"code": Decimal(10)}
    heavy = cut_token_map(counts, tokenizer, options(tmp_path, weights=weights))
    assert ids_of(tmp_path / "map") != before
    code = {r.maps[0].size: [s.at(24) for s in r.slices if s.name == "code"] for r in (plain,)}
    more = next(s.at(24) for s in heavy.slices if s.name == "code")
    assert more > code[24][0]
    assert heavy.corpus.weights == {"code": "10"}
    assert heavy.maps[0].coverage == heavy.slices[0].at(24) != plain.maps[0].coverage


def test_a_weight_of_no_domain_is_refused(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    for weights in ({"cod": Decimal(2)}, {"code": Decimal(0), "prose": Decimal(0)}):
        with pytest.raises(DiagnosticError) as caught:
            cut_token_map(counts, tokenizer, options(tmp_path, weights=weights))
        assert [d.code for d in caught.value.diagnostics] == ["SD440"]
    assert not (tmp_path / "map").exists()


def test_sizes_that_cannot_be_built_are_all_named(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    wanted = options(tmp_path, sizes=(2, 30, 32, 5000), divisible_by=8)
    with pytest.raises(DiagnosticError) as caught:
        cut_token_map(counts, tokenizer, wanted)
    assert [d.where for d in caught.value.diagnostics] == ["--size 2", "--size 30", "--size 5000"]
    assert not (tmp_path / "map").exists()


def test_unseen_ids_fill_the_rest_lowest_first_and_are_counted(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    report = cut_token_map(counts, tokenizer, options(tmp_path, sizes=(200,)))
    found = {d.code: d for d in report.diagnostics}
    assert report.maps[0].num_unseen == 200 - report.num_seen
    assert f"{200 - report.num_seen} of 200 ids never occur" in found["SD428"].message
    assert "lowest ids fill" in found["SD428"].message
    held = ids_of(tmp_path / "map")
    unseen = sorted(i for i in held if not any(d.per_id[i] for d in counts.counted.domains))
    left_out = set(range(tokenizer.size)) - held
    assert max(i for i in unseen if i not in {f.target_id for f in report.forced}) < min(left_out)


def test_the_targets_own_outputs_decide(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    counted = {"rounds": 10, "proposed_drafts": 20, "accepted_drafts": 7}
    place = {"kind": "request", "point": 0, "prompt": 0, "turn": 1}
    records = [
        {"kind": "run", "point": 0, "arm": "speculative"},
        {**place, "arm": "speculative", "run": 0, "ids": [5, 5, 5], **counted},
        {**place, "arm": "target-only", "run": 0, "ids": [0, 1, 2, 5]},
        {**place, "arm": "target-only", "run": 1, "ids": [0, 1, 2, 5]},
        {"kind": "copy", "bytes": 1},
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    outputs = (str(tmp_path),)
    report = cut_token_map(counts, tokenizer, options(tmp_path, outputs=outputs, sizes=(16,)))
    assert report.measured_on == "the target's own outputs"
    assert report.maps[0].coverage == 0.75  # 0, 1, 2 are forced, 5 does not occur
    assert report.cost.num_speculative_tokens == 2
    p = report.cost.acceptance
    assert p + p * p == pytest.approx(0.7)
    assert report.cost.origins["acceptance"] == "benchmark, accept length 1.700"
    assert [s.name for s in report.slices] == ["all", "code", "prose", "outputs"]
    text = report_text(report, width=100, color=False)
    assert "outputs       4 tokens that the target wrote" in text


@pytest.mark.parametrize("given", [None, 0.5])
def test_acceptance_of_a_reduced_head_is_not_that_of_the_full_one(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact, given: float | None
) -> None:
    """Taken for the full head's, what the map of the benchmark lost would be lost again."""
    place = {"kind": "request", "point": 0, "prompt": 0, "turn": 1, "run": 0}
    drafted = {"rounds": 10, "proposed_drafts": 20, "accepted_drafts": 7}
    record = {**place, "arm": "speculative", "ids": [5, 5, 5], **drafted}
    (tmp_path / "records.jsonl").write_text(json.dumps(record))
    (tmp_path / "settings.json").write_text(json.dumps({"draft_vocab_size": 24}))
    wanted = options(
        tmp_path, outputs=(str(tmp_path),), sizes=(16,), cost=CostOptions(acceptance=given)
    )
    report = cut_token_map(counts, tokenizer, wanted)
    assert report.measured_on == "the target's own outputs"
    assert report.cost.num_speculative_tokens == 2
    assert report.cost.origins["acceptance"] == ("assumed" if given is None else "--acceptance")
    assert report.cost.acceptance == (given or 0.7)
    found = [d for d in report.diagnostics if d.code == "SD443"]
    assert len(found) == (given is None)
    for item in found:
        assert item.where == f"{tmp_path}/settings.json#/draft_vocab_size"
        assert item.expected == f"a head of {report.target_vocab_size} rows"
        assert item.found == "24 rows"
        assert "1.700" in item.message
        assert "--acceptance" in (item.help or "")


@pytest.mark.parametrize(
    ("num_tokens", "points"), [(16, "15.0"), (900, "2.0"), (3599, "1.0"), (3600, None)]
)
def test_outputs_of_few_tokens_choose_no_size(
    tmp_path: Path,
    tokenizer: LoadedTokenizer,
    counts: CountArtefact,
    num_tokens: int,
    points: str | None,
) -> None:
    path = tmp_path / "o.jsonl"
    path.write_text(json.dumps({"ids": [1] * num_tokens}))
    report = cut_token_map(counts, tokenizer, options(tmp_path, outputs=(str(path),)))
    found = [d for d in report.diagnostics if d.code == "SD444"]
    assert len(found) == (points is not None)
    for item in found:
        assert item.where == "--outputs"
        assert f"{points} points" in item.message
        assert (item.expected, item.found) == ("3600 tokens or more", f"{num_tokens} tokens")


def test_held_out_text_of_few_tokens_is_measured_by_the_same_rule(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    [found] = [
        d
        for d in cut_token_map(counts, tokenizer, options(tmp_path)).diagnostics
        if d.code == "SD444"
    ]
    assert found.where == "--counts"
    assert found.found == f"{counts.held_out.num_tokens} tokens"
    alone = replace(counts, held_out=CountTable(domains=()))  # SD427 says so already
    codes = [d.code for d in cut_token_map(alone, tokenizer, options(tmp_path)).diagnostics]
    assert "SD444" not in codes


def test_a_language_that_is_covered_badly_is_named(
    tmp_path: Path, tokenizer: LoadedTokenizer
) -> None:
    held_out = {"mixed": [*PROSE, *CHINESE]}
    counts = artefact(tokenizer, {"mixed": PROSE}, held_out, languages={"en": PROSE, "zh": CHINESE})
    report = cut_token_map(counts, tokenizer, options(tmp_path))
    found = [d for d in report.diagnostics if d.code == "SD439"]
    assert [d.message.split("`")[1] for d in found] == ["zh"]


def test_counts_of_another_tokenizer_are_refused(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    target = write_target(tmp_path / "other")
    text = (target / "tokenizer.json").read_text().replace("<think>", "<thing>")
    (target / "tokenizer.json").write_text(text)
    with pytest.raises(DiagnosticError) as caught:
        cut_token_map(counts, load_tokenizer(target / "tokenizer.json"), options(tmp_path))
    assert [d.code for d in caught.value.diagnostics] == ["SD433"]


def test_counts_without_held_out_text_say_so(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    alone = replace(counts, held_out=CountTable(domains=()))
    report = cut_token_map(alone, tokenizer, options(tmp_path))
    assert "SD427" in [d.code for d in report.diagnostics]
    assert report.measured_on == "the counted text itself"
    empty = replace(counts, counted=CountTable(domains=()))
    with pytest.raises(DiagnosticError) as caught:
        cut_token_map(empty, tokenizer, options(tmp_path))
    assert [d.code for d in caught.value.diagnostics] == ["SD422"]


def test_the_size_follows_what_a_byte_and_a_draft_cost(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    """A slow memory makes the head dear, a high acceptance makes a lost draft dear."""

    def size(bandwidth: float, acceptance: float) -> int:
        cost = CostOptions(bandwidth=bandwidth, acceptance=acceptance)
        wanted = options(tmp_path, sizes=(), cost=cost)
        return cut_token_map(counts, tokenizer, wanted).recommended.size

    assert size(1e6, 0.0) == 128  # nothing is accepted: the smallest head
    assert size(1e6, 0.0) <= size(1e6, 0.9) <= size(1e15, 0.9)
    loss = cut_token_map(counts, tokenizer, options(tmp_path, sizes=(), max_loss=0.9))
    assert (loss.recommended.rule, loss.recommended.size) == ("max loss", 128)


def test_the_counts_of_a_file_give_the_same_map(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact, capsys: Captured
) -> None:
    path = tmp_path / "counts.safetensors"
    write_counts(path, counts)
    direct = cut_token_map(counts, tokenizer, options(tmp_path))
    target = str(tokenizer.path.parent)
    out = tmp_path / "again"
    arguments = ["cut-token-map", str(path), "--tokenizer", target, "--size", "24,32"]
    assert app.run([*arguments, "-o", str(out), "--weight", "code=1"]) == 0
    printed = capsys.readouterr().out
    assert "token map     24 of" in printed
    assert "token map     32 of" in printed
    assert ids_of(out / "24") == ids_of(tmp_path / "map")
    assert (out / "coverage.svg").is_file()
    assert direct.maps[0].size == 24


def test_wrong_options_are_wrong_usage(tmp_path: Path, capsys: Captured) -> None:
    for option, value in (
        ("--size", "32kk"),
        ("--weight", "code"),
        ("--bandwidth", "0"),
        ("--output", " "),
    ):
        assert app.run(["cut-token-map", str(tmp_path / "c"), option, value]) == 2
        assert option in capsys.readouterr().err


def test_a_ranked_list_is_cut_like_counts(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact, capsys: Captured
) -> None:
    ranked = [100, 50, 60, 0, 50, 70, tokenizer.size + 3]  # as FR-Spec: repeats, and ids of padding
    path = tmp_path / "freq_7.json"
    path.write_text(json.dumps(ranked))
    target = tokenizer.path.parent
    report = cut_from_file(path, tokenizer=target, options=options(tmp_path, sizes=(8,)))
    forced = {f.target_id for f in report.forced}
    assert sorted(d.code for d in report.diagnostics) == ["SD402", "SD404"]
    assert {d.severity for d in report.diagnostics} == {"warning"}
    assert ids_of(tmp_path / "map") == {*forced, *[100, 50, 60, 70][: 8 - len(forced)]}
    arguments = ["cut-token-map", str(path), "--tokenizer", str(target)]
    assert app.run([*arguments, "-o", str(tmp_path / "x")]) == 0
    assert ids_of(tmp_path / "x") == forced  # 5 ids of the list are ids of the tokenizer
    printed = capsys.readouterr().out
    assert "not measured" in printed
    assert "by the cost model" not in printed
    good = write_token_map(tmp_path / "g", range(20), target_vocab_size=400, provenance={})[1]
    again = str(tmp_path / "again")
    assert app.run(["cut-token-map", str(good), "--tokenizer", str(target), "-o", again]) == 0


def test_a_corpus_that_never_shows_what_is_written_is_called_small(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    path = tmp_path / "o.jsonl"
    path.write_text(json.dumps({"text": "9876543210"}))
    report = cut_token_map(counts, tokenizer, options(tmp_path, outputs=(str(path),)))
    found = next(d for d in report.diagnostics if d.code == "SD431")
    assert "100.00% of the tokens of the target's own outputs" in found.message
    assert report.coverage_of_seen == 0.0


def test_a_damaged_count_file_is_refused(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact, capsys: Captured
) -> None:
    path = tmp_path / "counts.safetensors"
    write_counts(path, counts)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    arguments = ["cut-token-map", str(path), "--tokenizer", str(tokenizer.path.parent)]
    assert app.run([*arguments, "-o", str(tmp_path / "m")]) == 1
    assert "SD432" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_an_odd_size_is_a_warning(
    tmp_path: Path, tokenizer: LoadedTokenizer, counts: CountArtefact
) -> None:
    report = cut_token_map(counts, tokenizer, options(tmp_path, sizes=(25,)))
    assert "SD407" in [d.code for d in report.diagnostics]
