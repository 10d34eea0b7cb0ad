"""`specctl generate` and `specctl bench` as typed, and what they do without the runtime extra."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from runtime import main
from runtime.bench.report import Divergence, Identical, Speed
from specctl.cli.app import run
from specctl.cli.commands.generate import summary
from specctl.contract.diagnostics import DiagnosticError

PROMPTS = Path(__file__).parents[4] / "fixtures" / "prompts" / "mt_bench_first8.jsonl"


def test_generate_streams_to_stdout_and_compares_on_stderr(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(tiny_pair), "hello", "--device", "cpu", "--max-tokens", "12"]
    assert run([*arguments, "--compare"]) == 0
    first = capsys.readouterr()
    assert "accept length:" in first.err
    assert "with speculation" in first.err
    assert "identical: yes" in first.err
    assert run([*arguments, "--no-speculation"]) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert "accept length" not in second.err
    assert run([*arguments, "--raw"]) == 0
    assert capsys.readouterr().out != first.out


def test_generate_reads_stdin(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--device", "cpu", "--max-tokens", "4"]
    assert run(["generate", str(tiny_pair), "hello", *options]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", StringIO("hello"))
    assert run(["generate", str(tiny_pair), "-", *options]) == 0
    assert capsys.readouterr().out == expected


def test_generate_refuses_what_contradicts_itself(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(tiny_pair), "a", "--no-speculation", "--compare"]) == 2
    assert "--no-speculation" in capsys.readouterr().err
    assert run(["generate", str(tiny_pair), "a" * 500, "--device", "cpu"]) == 1
    assert "SD909" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "m.yaml", "a"], ["bench", "m.yaml"]])
@pytest.mark.parametrize("filters", [["--top-k", "5"], ["--top-p", "0.9"], ["--min-p", "0.1"]])
def test_filters_without_a_temperature_are_refused(
    capsys: pytest.CaptureFixture[str], command: list[str], filters: list[str]
) -> None:
    prompts = [] if command[0] == "generate" else ["--prompts", "p.json"]
    assert run([*command, *prompts, *filters]) == 2
    assert "--temperature" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "m.yaml", "a"], ["bench", "m.yaml"]])
@pytest.mark.parametrize("filters", [["--top-p", "0"], ["--top-p", "nan"], ["--min-p", "nan"]])
def test_filters_that_no_request_may_have_are_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], command: list[str], filters: list[str]
) -> None:
    prompts = [] if command[0] == "generate" else ["--prompts", "p.json"]
    assert run([*command, *prompts, *filters, "--temperature", "1"]) == 2
    assert filters[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_limit_of_other_processes_has_no_effect_in_one(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = ["hello"] if command == "generate" else ["--prompts", str(PROMPTS), "--limit", "1"]
    more += ["--step-samples", "0"] if command == "bench" else []
    options = ["--device", "cpu", "--max-tokens", "4", "--rank-timeout-s", "5"]
    assert run([command, str(tiny_pair), *more, *options]) == 0
    said = " ".join(capsys.readouterr().err.split())  # lines are as wide as the terminal
    assert "SD805" in said
    assert "`rank_timeout_s` has no effect: there is one process" in said


def test_a_difference_is_reported() -> None:
    one = Speed(tokens=10, seconds=2.0, tokens_per_s=5.0)
    report = main.GenerateReport(
        proposer="eagle3",
        num_speculative_tokens=4,
        finish_reason="stop",
        rounds=5,
        accept_length=1.8,
        speed=one,
        comparison=one,
        first_divergence=3,
    )
    assert summary(report)[-1] == "identical: no (first difference at output token 3)"
    drawn = msgspec.structs.replace(report, claims_equality=False)
    assert summary(drawn)[-1].startswith("identical: no (first difference at output token 3); not ")


def test_rejection_mode_claims_no_equality_of_drawn_answers(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--max-tokens", "8", "--verification", "rejection"]
    drawn = ["--temperature", "1.0", "--seed", "3"]
    answer = ["generate", str(tiny_pair), "hello", "--compare", *options]
    assert run([*answer, *drawn]) == 0
    assert "not claimed" in " ".join(capsys.readouterr().err.split())
    assert run(answer) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "identical: yes" in said
    assert "not claimed" not in said
    bench = ["bench", str(tiny_pair), "--prompts", str(PROMPTS), "--limit", "1", *options]
    assert run([*bench, "--step-samples", "0", "--repeats", "1", *drawn]) == 0
    assert "identical: not claimed" in capsys.readouterr().out


def test_bench_prints_a_table_or_json_and_writes_a_directory(
    tiny_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/a/specctl", "bench", "m.yaml"])
    out = tmp_path / "run"
    arguments = ["bench", str(tiny_pair), "--prompts", str(PROMPTS), "--limit", "2"]
    arguments += ["--max-tokens", "6", "--gamma", "3", "--device", "cpu", "--dtype", "float32"]
    arguments += ["--step-samples", "1"]
    assert run([*arguments, "--concurrency", "2", "--output", str(out)]) == 0
    text = capsys.readouterr()
    assert "speculative (eagle3)" in text.out
    assert "identical to target-only: 2/2" in text.out
    assert "verify / decode:" in text.out
    assert str(out) in text.err
    written = (out / "summary.json").read_bytes()
    page = (out / "report.html").read_bytes()
    summary = json.loads(written)
    assert summary["points"][0]["arms"][1]["num_speculative_tokens"] == 3
    assert summary["points"][0]["concurrency"] == 2
    assert summary["environment"]["command"] == "specctl bench m.yaml"
    for name in ("summary.json", "report.html"):
        (out / name).unlink()
    assert run(["bench", "--reanalyze", str(out)]) == 0
    assert "speculative (eagle3)" in capsys.readouterr().out
    assert (out / "summary.json").read_bytes() == written
    assert (out / "report.html").read_bytes() == page
    capsys.readouterr()
    assert run(["bench", str(out), "--reanalyze", str(out)]) == 2
    assert "it runs nothing" in capsys.readouterr().err
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["identical"] == {"equal": 2, "total": 2, "first_divergence": None}


def test_reanalyze_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from runtime import main; main.summarise, main.read_raw, main.report_page; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path)
    assert done.returncode == 0


def test_bench_schema_and_missing_arguments(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == main.bench_json_schema()
    assert run(["bench", str(tiny_pair)]) == 2
    assert "--prompts" in capsys.readouterr().err
    prompts = ["--prompts", str(PROMPTS)]
    for wrong in (
        ["bench", *prompts],
        ["bench", str(tiny_pair), "--shape", "config.json", *prompts],
        ["bench", "--shape", "config.json", *prompts],
        ["bench", str(tiny_pair), *prompts, "--prompt-tokens", "4"],
        ["bench", str(tiny_pair), *prompts, "--batch", "1,0"],
        ["bench", str(tiny_pair), "--context", "many"],
    ):
        assert run(wrong) == 2, wrong


def test_bench_exits_1_when_the_arms_differ(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status is what a nightly job looks at."""
    first = Divergence(prompt=0, turn=1, position=2, target_only_id=5, speculative_id=6)
    different = Identical(equal=0, total=1, first_divergence=first)
    equal = Identical(equal=1, total=1, first_divergence=None)
    results = iter([equal, different])
    monkeypatch.setattr("runtime.bench.summary.compare_runs", lambda *_: next(results))
    arguments = ["bench", str(tiny_pair), "--prompts", str(PROMPTS), "--limit", "1"]
    arguments += ["--max-tokens", "4", "--device", "cpu", "--step-samples", "0"]
    assert run(arguments) == 1
    assert "first difference: prompt 0, token 2, 5 against 6" in capsys.readouterr().out


def test_a_reference_that_differs_shows_the_margin_and_exits_0(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A near-tie against foreign arithmetic is for a person to judge."""
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"a": [[3, 3, 3, 3]], "b": [[4]]}))
    arguments = ["bench", str(tiny_pair), "--prompts", str(PROMPTS), "--limit", "1"]
    arguments += ["--max-tokens", "4", "--device", "cpu", "--reference", str(path)]
    arguments += ["--repeats", "1", "--step-samples", "0"]
    assert run([*arguments, "--reference-set", "a"]) == 0
    text = capsys.readouterr().out
    assert "equal to reference.json: 0/1" in text
    assert "two likeliest there are" in text
    assert run(arguments) == 1
    assert "SD921" in capsys.readouterr().err


def test_a_prompt_file_that_is_not_there_is_told_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "bench",
        str(tmp_path / "absent.yaml"),
        "--prompts",
        str(tmp_path / "absent.jsonl"),
    ]
    assert run(arguments) == 1
    assert "SD920" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "fastapi"])
def test_a_missing_package_is_a_code_with_the_command(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("runtime.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DiagnosticError) as caught:
        main.serve(
            tiny_pair, main.EngineOptions(), main.ServeOptions(), on_diagnostic=lambda _: None
        )
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SD834"
    assert package in diagnostic.message
    assert diagnostic.help == "Run pip install '.[runtime]' in a clone of the repository"


def test_doctor_facts_are_flat() -> None:
    facts = main.doctor_facts()
    assert facts["torch"]
    assert facts["default device"]
    assert all(isinstance(value, (str, int, float, bool)) for value in facts.values())
