"""Every fixture gives exactly its codes, and every code has a fixture; recipes make the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl import formats
from specctl.checkpoint import open_checkpoint
from specctl.contract.codes import CODES
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.ops.deep import deep_findings
from specctl.ops.load import fit, load

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load(
    (FIXTURES / "expected.yaml").read_text("utf-8")
)
MAX_TOTAL_BYTES = 9 << 18  # checkpoints up to 2 MiB, and manifests, prompts and requests
# Codes of families 1 to 5 that no checkpoint directory can show, and where they are tested.
NOT_A_CHECKPOINT = {
    **dict.fromkeys(("SD212", "SD213"), "asked for by name: tests/unit/specctl/verdicts"),
    "SD120": "a hub id is no directory: tests/unit/specctl/checkpoint",
    "SD150": "needs --allow-pickle: tests/unit/specctl/checkpoint",
    **{
        code: "answers of hubs: tests/unit/specctl/checkpoint"
        for code in CODES
        if "SD136" <= code <= "SD149" and code != "SD148"
    },
    **{
        code: "token maps and corpora: tests/unit/specctl/tokenmap"
        for code in CODES
        if "SD420" <= code <= "SD499"
    },
}


def findings(name: str) -> tuple[Diagnostic, ...]:
    target = EXPECTED[name].get("target")
    try:
        loaded = load(str(FIXTURES / name))
        found, other = loaded.diagnostics, None
        if target is not None:
            other = load(str(FIXTURES / target))
            pair = fit(loaded, other)
            loaded, found = pair.draft, (*pair.diagnostics, *other.diagnostics)
        if EXPECTED[name].get("deep"):
            found = (*found, *deep_findings(loaded, other, lambda file, done, total: None))
    except DiagnosticError as error:
        return error.diagnostics
    return found


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_fixture_gives_exactly_its_codes(name: str) -> None:
    found = findings(name)
    shown = [d.oneline() for d in found]
    assert sorted({d.code for d in found}) == sorted(EXPECTED[name]["codes"]), shown


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_finding_names_a_place_and_a_next_step(name: str) -> None:
    for found in findings(name):
        assert found.where
        assert found.help
        assert "\n" not in found.message
        assert not found.message.endswith(".")
        if found.severity == "error" and found.code[2] in "2345":
            assert found.expected is not None, found
            assert found.found is not None, found


def test_every_code_of_a_checkpoint_has_a_fixture() -> None:
    shown = {code for entry in EXPECTED.values() for code in entry["codes"]}
    wanted = {code for code in CODES if code[2] in "12345"} - NOT_A_CHECKPOINT.keys()
    assert sorted(wanted - shown) == []
    assert sorted(shown & NOT_A_CHECKPOINT.keys()) == []


def test_every_checkpoint_is_in_the_list_and_the_readme() -> None:
    there = {p.name for p in (FIXTURES / "checkpoints").iterdir()}
    listed = {name.partition("/")[2] for name in EXPECTED if name.startswith("checkpoints/")}
    assert there == listed
    readme = (FIXTURES / "README.md").read_text("utf-8")
    assert [name for name in there if f"| {name} |" not in readme] == []


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_detection_gives_one_format_or_one_reason(name: str) -> None:
    try:
        checkpoint = open_checkpoint(FIXTURES / name)
    except DiagnosticError:
        assert EXPECTED[name]["codes"] == ["SD119"]
        return
    found = formats.detect(checkpoint)
    assert (found.format is None) == (found.role is None)
    assert len(found.diagnostics) == (1 if found.format is None else 0)
    assert found.evidence
    if found.format is not None and not name.startswith("checkpoints/container"):
        prefix = "hf" if found.role == "target" else found.format
        assert Path(name).name.startswith((prefix, "smollm2"))


def test_fixtures_stay_small() -> None:
    # Data only: recipes are source, and the real draft has its own allowance.
    sizes = [
        path.stat().st_size
        for path in FIXTURES.rglob("*")
        if path.is_file()
        and not {"drafts", "recipes", "__pycache__"} & set(path.parts)
        and path.parent != FIXTURES
    ]
    assert sum(sizes) < MAX_TOTAL_BYTES


def test_the_recipes_make_the_same_bytes() -> None:
    script = FIXTURES / "make_fixtures.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_clean_pair_fits_and_is_complete() -> None:
    pair = fit(
        load(str(FIXTURES / "checkpoints/speculators-eagle3-clean")),
        load(str(FIXTURES / "checkpoints/hf-llama-clean")),
    )
    assert pair.diagnostics == ()
    assert pair.draft.draft is not None
    assert pair.target.target is not None
    draft = pair.draft.draft.to_draft(source="draft", revision=None)
    target = pair.target.target.to_target(source="target", revision=None)
    assert draft is not None
    assert target is not None
    assert (target.decoder.num_layers, target.vocab_size) == (8, 64)
    assert target.decoder.num_attention_heads * target.decoder.head_dim != 16
    assert draft.aux_layer_ids == (1, 3, 4)
    assert pair.draft.draft.draft_vocab_size == 24
    assert target.eos_token_ids == (1,)
