"""`specctl build-token-map`: an output that cannot be written is wrong usage, no fault of ours."""

from __future__ import annotations

import io
import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from specctl.cli import app
from specctl.cli.commands import build_token_map as command
from tests.tiny_corpus import write_target

TARGET = str(Path(__file__).parents[4] / "fixtures" / "checkpoints" / "hf-llama-clean")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text("the cat\n\nthe dog\n" * 20)
    return str(path)


@pytest.mark.parametrize("inside", ["", "map"])
def test_a_file_in_the_place_of_the_directory_is_refused_before_counting(
    tmp_path: Path, corpus: str, inside: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("counted although nothing can be written")

    monkeypatch.setattr(command, "build", never)
    place = tmp_path / "taken"
    place.write_text("before")
    arguments = ["build-token-map", corpus, "--tokenizer", TARGET, "-o", str(place / inside)]
    assert app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"`{place}` is not a directory" in err
    assert "internal fault" not in err
    assert place.read_text() == "before"


def test_a_refusal_while_writing_names_the_directory_and_the_reason(
    tmp_path: Path, corpus: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specctl.ops.cut_token_map.write_token_map", full)
    place = tmp_path / "map"
    assert app.run(["build-token-map", corpus, "--tokenizer", TARGET, "-o", str(place)]) == 2
    err = capsys.readouterr().err
    assert f"`{place}` cannot be written: No space left on device" in err
    assert "internal fault" not in err


def test_the_answer_names_the_files(tmp_path: Path, corpus: str, capsys: Captured) -> None:
    place = tmp_path / "map"
    assert app.run(["build-token-map", corpus, "--tokenizer", TARGET, "-o", str(place)]) == 0
    out, _ = capsys.readouterr()
    assert f"files in {place}/" in out
    names = sorted(path.name for path in place.iterdir())
    assert re.fullmatch(r"freq_[0-9]+[.]pt", names.pop(1))
    assert names == [
        "coverage.svg",
        "report.json",
        "token_map.html",
        "token_map.json",
        "token_map.provenance.json",
        "token_map.pt",
        "token_map.safetensors",
    ]


def report_of(capsys: Captured, *arguments: str) -> dict[str, Any]:
    """Run the command and return its JSON."""
    assert app.run(["build-token-map", *arguments, "--tokenizer", TARGET, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_directories_are_domains_and_names_can_be_given(tmp_path: Path, capsys: Captured) -> None:
    for name, text in (("prose", "the cat"), ("code", "def add")):
        (tmp_path / "all" / name).mkdir(parents=True)
        for number in range(30):
            (tmp_path / "all" / name / f"{number}.txt").write_text(f"{text} {number}\n")
    out = ("-o", str(tmp_path / "m"), "--size", "24", "--workers", "1")
    report = report_of(capsys, str(tmp_path / "all"), *out, "--weight", "code=3")
    assert report["corpus"]["domains"] == ["code", "prose"]
    assert report["corpus"]["weights"] == {"code": "3"}
    assert {"code", "prose"} <= {part["name"] for part in report["slices"]}
    named = (f"a={tmp_path / 'all' / 'prose'}", f"b={tmp_path / 'all' / 'code'}")
    report = report_of(capsys, *named, *out, "--method", "batch")
    assert report["corpus"]["domains"] == ["a", "b"]
    assert report["corpus"]["method"] == "batch"


def test_held_out_is_a_share_or_a_path(tmp_path: Path, corpus: str, capsys: Captured) -> None:
    held = tmp_path / "held.txt"
    held.write_text("the bird\n")
    out = ("-o", str(tmp_path / "m"), "--size", "24", "--workers", "1")
    report = report_of(capsys, corpus, *out, "--held-out", str(held))
    assert report["corpus"]["num_held_out_documents"] == 1
    assert "held.txt" in report["corpus"]["held_out"]
    report = report_of(capsys, corpus, *out, "--held-out", "0")
    assert report["measured_on"] == "the counted text itself"
    assert "SD427" in [d["code"] for d in report["diagnostics"]]


def test_text_comes_from_standard_input(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.TextIOWrapper(io.BytesIO(b"the cat and the dog\n\nthe fox\n" * 20))
    monkeypatch.setattr("sys.stdin", text)
    report = report_of(capsys, "-", "-o", str(tmp_path / "m"), "--size", "24")
    assert report["corpus"]["domains"] == ["stdin"]
    assert report["corpus"]["num_tokens"] > 0
    lines = b"".join(b'{"text": "the cat %d"}\n' % n for n in range(30))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    report = report_of(capsys, "chat=-", "-o", str(tmp_path / "m"), "--size", "24")
    assert report["corpus"]["domains"] == ["chat"]
    assert report["corpus"]["num_documents"] + report["corpus"]["num_held_out_documents"] == 30
    assert app.run(["build-token-map", "-", "x=-", "--tokenizer", TARGET]) == 2


def test_only_what_assistants_say_is_counted(tmp_path: Path, capsys: Captured) -> None:
    turns = [("user", "0123456789"), ("assistant", "the cat")]
    lines = [
        json.dumps({"messages": [{"role": r, "content": f"{c} {n}"} for r, c in turns]})
        for n in range(20)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines))
    out = ("-o", str(tmp_path / "m"), "--size", "24", "--workers", "1")
    both = report_of(capsys, str(path), *out)
    answers = report_of(capsys, str(path), *out, "--assistant-only")
    assert answers["num_seen"] < both["num_seen"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--held-out", "1.5"), "--held-out"),
        (("--held-out", "0.1", "--held-out", "0.2"), "--held-out"),
        (("--assistant-only", "--role", "user"), "--assistant-only"),
        (("--ray-address", "auto"), "--ray-address"),
        (("--counts", "nowhere/c.st"), "--counts"),
        (("--divisible-by", "0"), "--divisible-by"),
        (("--workers", "0"), "--workers"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(
    corpus: str, arguments: tuple[str, ...], option: str, capsys: Captured
) -> None:
    assert app.run(["build-token-map", corpus, "--tokenizer", TARGET, *arguments]) == 2
    assert option in capsys.readouterr().err


def test_messages_are_rendered_with_the_template_of_the_target(
    tmp_path: Path, capsys: Captured
) -> None:
    target = write_target(tmp_path / "target")
    template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}<think>{{ m['content'] }}<|end|>"
        "{% endfor %}"
    )
    config = {"eos_token": "<|end|>", "bos_token": "<|start|>", "chat_template": template}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    path = tmp_path / "chat.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"the dog {n}"}]} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = []
    for extra in ((), ("--chat-template",)):
        arguments = ["build-token-map", str(path), "--tokenizer", str(target), "--json"]
        assert app.run([*arguments, "--size", "24", "-o", str(tmp_path / "m"), *extra]) == 0
        found.append(json.loads(capsys.readouterr().out)["corpus"]["num_tokens"])
    assert found[1] > found[0]


def test_raw_files_of_token_ids_need_their_type(tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("numpy", reason="numpy (extra tokenmap) is not installed")
    path = tmp_path / "ids.bin"
    path.write_bytes(array("H", [5, 6, 7] * 40).tobytes())
    arguments = [str(path), "--tokenizer", TARGET, "--size", "16", "-o", str(tmp_path / "map")]
    assert app.run(["build-token-map", *arguments]) == 1
    assert "--id-type u16" in capsys.readouterr().err
    assert report_of(capsys, *arguments, "--id-type", "u16")["corpus"]["method"] == "token-ids"
