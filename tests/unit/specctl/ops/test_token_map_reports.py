"""Defects of token maps that people met in the field, by the number of their report.

C035 no map in the file; C037 impossible or repeated values; C039 special tokens missing; C041 stale
counts; C043 mixed id spaces; C045 padded rows; C047 languages and domains. What a draft does with a
map at run time is tested with its reduced heads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.cli import app
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.build_token_map import build_token_map
from specctl.ops.cut_token_map import CutOptions, cut_from_file, cut_token_map
from specctl.ops.token_map_report import TokenMapReport
from specctl.ops.validate import validate
from specctl.tokenmap import read_token_map
from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.counts import write_counts
from tests.tiny_corpus import write_target
from tests.unit.specctl.ops.counts_samples import artefact

FIXTURES = Path(__file__).parents[4] / "fixtures" / "checkpoints"
PROSE = ["the quick brown fox jumps over the lazy dog"]
Captured = pytest.CaptureFixture[str]


def findings(name: str, target: str | None = None) -> list[tuple[str, str, str]]:
    source = str(FIXTURES / name)
    beside = None if target is None else str(FIXTURES / target)
    (result,) = validate([source], target=beside).results
    return [(d.code, d.where, d.message) for d in result.diagnostics]


def build(corpus: Path, target: Path, output: Path, **changes: object) -> TokenMapReport:
    roles = changes.pop("roles", ())
    assert isinstance(roles, tuple)
    return build_token_map(
        CorpusSpec(sources=(str(corpus),), roles=roles),
        tokenizer=target,
        counting=CountOptions(workers=1),
        options=CutOptions(weights={}, output=output, **changes),  # type: ignore[arg-type]
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def tokenizer(target: Path) -> LoadedTokenizer:
    return load_tokenizer(target / "tokenizer.json")


def corpus(tmp_path: Path, *texts: str, name: str = "corpus") -> Path:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_c035_a_reduced_head_without_a_map_is_refused_by_every_command(
    tmp_path: Path, capsys: Captured
) -> None:
    draft, wanted = str(FIXTURES / "speculators-eagle3-map-missing"), "SD401"
    target = str(FIXTURES / "hf-llama-tiny")
    out = str(tmp_path / "out")
    for arguments in (
        ["validate", draft],
        ["inspect", draft],
        ["manifest", target, draft, "--gamma", "3", "-o", str(tmp_path / "m.yaml")],
        ["convert", draft, "--to", "sglang", "--target", target, "-o", out],
        ["normalize", draft, "-o", out],
    ):
        assert app.run(arguments) == 1, arguments
        captured = capsys.readouterr()
        assert wanted in captured.out + captured.err, arguments
        assert "d2t" in captured.out + captured.err
        assert "t2d" in captured.out + captured.err
    assert not Path(out).exists()


def test_c037_each_impossible_value_has_its_code_and_names_the_place() -> None:
    for name, code, word in (
        ("speculators-eagle3-map-negative", "SD402", "entry"),
        ("speculators-eagle3-map-too-large", "SD402", "entry"),
        ("speculators-eagle3-map-duplicate", "SD404", "both"),
    ):
        ((found, where, message),) = findings(name)
        assert found == code
        assert "d2t" in where
        assert any(character.isdigit() for character in message), word


def test_c039_every_end_id_and_the_template_are_in_and_the_displaced_are_named(
    tmp_path: Path, target: Path, tokenizer: LoadedTokenizer
) -> None:
    (target / "config.json").write_text('{"eos_token_id": 257, "vocab_size": 332}')
    (target / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    source = corpus(tmp_path, *PROSE, "the dog")
    report = build(source, target, tmp_path / "map", sizes=(16,))
    ids = set(read_token_map(tmp_path / "map" / "token_map.json"))
    think = tokenizer.size - 1
    assert {257, 258, 0, 1, think} <= ids
    reasons = {f.target_id: f.reasons for f in report.forced}
    assert reasons[258] == ("generation_config.json#/eos_token_id",)
    assert reasons[257] == ("config.json#/eos_token_id", "generation_config.json#/eos_token_id")
    assert report.maps[0].displaced
    assert not set(report.maps[0].displaced) & ids
    with pytest.raises(DiagnosticError, match="a map of 1 ids cannot hold 6 forced ids"):
        build(source, target, tmp_path / "one", sizes=(1,))


def test_c041_another_corpus_is_never_served_from_the_old_map(tmp_path: Path, target: Path) -> None:
    first = build(corpus(tmp_path, *PROSE, "dog"), target, tmp_path / "map", sizes=(16,))
    other = corpus(tmp_path, "def add(left, right): return left", "sit", name="b")
    second = build(other, target, tmp_path / "map", sizes=(18,))
    assert first.corpus.corpus_digest != second.corpus.corpus_digest
    assert len(read_token_map(tmp_path / "map" / "token_map.json")) == 18
    assert not (tmp_path / "map" / "freq_16.pt").exists()
    stored = json.loads((tmp_path / "map" / "token_map.provenance.json").read_text())
    assert stored["corpus_digest"] == second.corpus.corpus_digest


def test_c041_counts_and_maps_of_a_changed_tokenizer_are_refused(
    tmp_path: Path, target: Path, tokenizer: LoadedTokenizer
) -> None:
    counts = tmp_path / "counts.safetensors"
    write_counts(counts, artefact(tokenizer, {"x": PROSE}, {"x": PROSE}))
    options = CutOptions(sizes=(16,), weights={}, output=tmp_path / "map")
    cut_from_file(counts, tokenizer=target, options=options)
    text = (target / "tokenizer.json").read_text().replace('"<think>"', '"<other>"')
    (target / "tokenizer.json").write_text(text)  # only the list of added tokens changes
    with pytest.raises(DiagnosticError) as caught:
        cut_from_file(counts, tokenizer=target, options=options)
    assert [d.code for d in caught.value.diagnostics] == ["SD433"]


def test_c041_a_map_is_compared_with_a_checkpoint(tmp_path: Path) -> None:
    directory = FIXTURES / "hf-llama-clean"
    loaded = load_tokenizer(directory / "tokenizer.json")
    text = [loaded.handle.decode([i]) for i in range(loaded.size)]
    counts = artefact(loaded, {"x": text}, {"x": text})
    options = CutOptions(sizes=(32,), weights={}, output=tmp_path / "map")
    cut_token_map(counts, loaded, options)
    assert validate([str(tmp_path / "map")], target=str(directory)).is_clean
    other = str(FIXTURES / "hf-llama-padded")
    provenance = tmp_path / "map" / "token_map.provenance.json"
    provenance.write_text(provenance.read_text().replace(loaded.digest, "sha256:another"))
    (result, *_) = validate([str(tmp_path / "map")], target=other).results
    assert "SD436" in [d.code for d in result.diagnostics]


def test_c043_swapped_markov_factors_name_the_tensor() -> None:
    found = findings("speculators-dspark-markov-swapped")
    assert {code for code, _, _ in found} == {"SD503"}
    assert all("markov_w" in where for _, where, _ in found)
    assert len(found) == 2


def test_c045_padding_is_a_note_and_a_differing_token_an_error() -> None:
    padded = findings("speculators-eagle3-padded-vocab", "hf-llama-padded")
    assert [code for code, _, _ in padded] == ["SD412"]
    ((code, _, message),) = findings("speculators-eagle3-other-tokenizer", "hf-llama-tiny")
    assert code == "SD419"
    assert any(character.isdigit() for character in message)


def test_c045_a_map_never_holds_rows_above_the_tokenizer(
    tmp_path: Path, target: Path, tokenizer: LoadedTokenizer
) -> None:
    report = build(corpus(tmp_path, *PROSE, "dog"), target, tmp_path / "map", sizes=(321,))
    ids = read_token_map(tmp_path / "map" / "token_map.json")
    assert (max(ids), report.target_vocab_size) == (tokenizer.size - 1, tokenizer.size + 11)
    with pytest.raises(DiagnosticError, match="a map of 330 ids does not fit a tokenizer of 321"):
        build(corpus(tmp_path, *PROSE, "dog"), target, tmp_path / "more", sizes=(330,))


def test_c047_a_language_that_the_map_loses_is_named_and_can_be_forced(
    tmp_path: Path, tokenizer: LoadedTokenizer
) -> None:
    chinese = ["\u4f60\u597d\u4e16\u754c" * 2]
    held_out = {"chat": [*(PROSE * 20), *chinese]}
    counts = artefact(
        tokenizer, {"chat": PROSE * 20}, held_out, languages={"en": PROSE * 20, "zh": chinese}
    )
    options = CutOptions(sizes=(40,), weights={}, output=tmp_path / "map")
    report = cut_token_map(counts, tokenizer, options)
    covered = {part.name: part.at(40) for part in report.slices}
    assert covered["en"] == 1.0
    assert covered["zh"] < 0.95
    warned = [d.message for d in report.diagnostics if d.code == "SD439"]
    assert len(warned) == 1
    assert "`zh`" in warned[0]
    letters = CutOptions(sizes=(80,), weights={}, keep=("U+0041-U+005A",), output=tmp_path / "kept")
    kept = cut_token_map(counts, tokenizer, letters)
    assert {f.token for f in kept.forced} >= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def test_c047_prompts_do_not_count_when_roles_are_given(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "chat.jsonl"
    turns = [
        {"role": "user", "content": "0123456789 0123456789"},
        {"role": "assistant", "content": "the dog sleeps"},
    ]
    lines = [
        json.dumps({"messages": [*turns, {"role": "assistant", "content": word}]})
        for word in ("fox", "lazy", "over", "jumps")
    ]
    path.write_text("\n".join(lines))
    both = build(path, target, tmp_path / "both", sizes=(24,))
    answers = build(path, target, tmp_path / "answers", sizes=(24,), roles=("assistant",))
    assert answers.corpus.num_tokens < both.corpus.num_tokens
    assert answers.num_seen < both.num_seen
