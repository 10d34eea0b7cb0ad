"""`validate` and `inspect` read every form of a map back, and name each thing that is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specctl.checkpoint import write_safetensors
from specctl.cli import app
from specctl.ops.inspect import inspect_with_map
from specctl.ops.token_map_check import is_token_map, map_files
from specctl.ops.validate import validate
from specctl.tokenmap.pt_file import stream_pt_ints
from specctl.tokenmap.writing import write_token_map

TARGET = str(Path(__file__).parents[4] / "fixtures" / "checkpoints" / "hf-llama-padded")
Captured = pytest.CaptureFixture[str]


def codes(source: Path | str, target: str | None = TARGET) -> list[str]:
    return [
        finding.code
        for result in validate([str(source)], target=target).results
        for finding in result.diagnostics
    ]


@pytest.fixture(scope="module")
def facts() -> tuple[int, int, str, tuple[int, ...]]:
    """Return rows, tokenizer size, tokenizer digest and end ids of the target."""
    from specctl.ops.load import load

    target = load(TARGET).target
    assert target is not None
    assert target.vocab_size is not None
    assert target.tokenizer_size is not None
    assert target.tokenizer_digest is not None
    assert target.vocab_size > target.tokenizer_size
    return target.vocab_size, target.tokenizer_size, target.tokenizer_digest, target.eos_token_ids


def write(directory: Path, ids: list[int], facts: tuple[int, int, str, tuple[int, ...]]) -> Path:
    rows, size, digest, _ = facts
    write_token_map(
        directory,
        ids,
        ids_by_rank=ids[::-1],
        target_vocab_size=rows,
        provenance={
            "tokenizer_digest": digest,
            "tokenizer_size": size,
            "target_vocab_size": rows,
        },
    )
    return directory


@pytest.fixture
def built(tmp_path: Path, facts: tuple[int, int, str, tuple[int, ...]]) -> Path:
    return write(tmp_path / "map", [1, 3, 5, 7], facts)


def test_every_file_of_a_map_is_clean(built: Path, tmp_path: Path) -> None:
    report = validate([str(built)], target=TARGET)
    names = {Path(result.source).name for result in report.results}
    assert names == {p.name for p in built.iterdir() if "provenance" not in p.name}
    assert {result.kind for result in report.results} == {"token_map"}
    assert report.is_clean
    assert validate([str(tmp_path)], target=TARGET).is_clean  # found below a directory as well
    assert validate([str(built / "*.json")], target=TARGET).results[0].kind == "token_map"


def test_each_defect_has_its_code(
    tmp_path: Path, facts: tuple[int, int, str, tuple[int, ...]]
) -> None:
    rows, size, _, end_ids = facts
    assert end_ids == (1,)
    good = [1, 3]

    def listed(*ids: int) -> Path:
        path = tmp_path / "m.json"
        path.write_text(json.dumps(ids))
        return path

    assert codes(listed(*good)) == []
    assert codes(listed(*good, rows)) == ["SD402"]
    assert codes(listed(*good, good[-1])) == ["SD404"]
    assert codes(listed(3, 5)) == ["SD406"]
    assert codes(listed(*good[::-1])) == ["SD441"]
    assert codes(listed(*good, size)) == ["SD438"]
    assert codes(listed()) == ["SD420", "SD406"]
    (tmp_path / "m.json").write_text("[1, oops]")
    assert codes(tmp_path / "m.json") == ["SD420"]


def test_the_file_says_what_it_was_made_for(
    built: Path, facts: tuple[int, int, str, tuple[int, ...]]
) -> None:
    path = built / "token_map.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), 9]))
    assert codes(path) == ["SD437"]
    assert codes(built / "token_map.pt") == ["SD437"]  # differs from the list beside it
    other = write(built.parent / "other", [*facts[3]], (*facts[:2], "sha256:other", facts[3]))
    assert codes(other / "token_map.json") == ["SD436"]
    assert codes(other / "token_map.json", target=None) == []
    alone = built.parent / "alone.safetensors"
    (other / "token_map.safetensors").rename(alone)
    assert codes(alone) == ["SD436"]  # its own metadata says so


def test_repeats_are_an_error_where_rows_follow_the_map(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"d2t": ("I64", (2,), (1).to_bytes(8, "little") + bytes(8))})
    (result,) = validate([str(path)]).results
    assert [(d.code, d.severity) for d in result.diagnostics] == [("SD404", "error")]
    with (tmp_path / "freq_3.pt").open("wb") as stream:
        stream_pt_ints(stream, (4, 2, 4))
    (result,) = validate([str(tmp_path / "freq_3.pt")]).results
    assert [(d.code, d.severity) for d in result.diagnostics] == [("SD404", "warning")]


def test_what_counts_as_a_map(built: Path, tmp_path: Path) -> None:
    draft = Path(TARGET).parent / "speculators-eagle3-clean"
    assert map_files(draft) == ()
    assert not any(is_token_map(path) for path in draft.iterdir())
    assert not is_token_map(built / "token_map.provenance.json")
    assert is_token_map(built / "token_map.safetensors")
    (tmp_path / "manifest.json").write_text('{"schema_version": 1}')
    assert not is_token_map(tmp_path / "manifest.json")


def test_maps_of_an_earlier_run_with_several_sizes_are_checked_too(
    built: Path, tmp_path: Path
) -> None:
    """A later run with one size leaves their directories where they were."""
    earlier = built / "16"
    shutil.copytree(built, tmp_path / "16")
    shutil.move(tmp_path / "16", earlier)
    assert codes(built, target=None) == []
    (earlier / "token_map.json").write_text("[3, 3]")
    assert codes(built, target=None) == codes(earlier, target=None) != []


def test_inspect_shows_the_map_and_its_picture(
    built: Path, facts: tuple[int, int, str, tuple[int, ...]], capsys: Captured
) -> None:
    path = built / "freq_4.pt"
    found = inspect_with_map(str(path), TARGET)
    assert found.report.format == "token-map"
    assert found.draft_to_target is not None
    assert found.report.vocabulary.draft_vocab_size == len(found.draft_to_target)
    assert found.report.vocabulary.target_vocab_size == facts[0]
    assert found.report.details["tokenizer_digest"] == facts[2]
    page = built.parent / "page.html"
    assert app.run(["inspect", str(path), "--target", TARGET, "--html", str(page)]) == 0
    assert "target ids" in page.read_text()
    assert app.run(["inspect", str(path)]) == 0
    assert "map reduced" in capsys.readouterr().out
