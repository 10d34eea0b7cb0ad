"""The real MTP draft with token maps on CPU, float32: the target's text, and what a map costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from specctl.contract.codec import dump_manifest
from specctl.ops.emit_manifest import emit_manifest
from tests import real_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ISSUE_20 = {"full": 1.633, "map-8192": 1.620}
"""Accept lengths of the first 20 prompts in plain PyTorch, float32, k = 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """What one head made of the prompts.

    Args:
        accepted_ids: drafts that the target accepted, of all prompts.
    """

    ids_target: list[list[int]]
    rounds: list[int]
    accepted: list[int]
    accepted_ids: list[int]

    def per_round(self, limit: int | None = None) -> float:
        """Return accepted drafts per round of the first prompts."""
        return sum(self.accepted[:limit]) / sum(self.rounds[:limit])


def run(
    directory: Path,
    prompts: list[list[int]],
    *,
    token_map: Path | None,
    max_tokens: int = 128,
    **dynamic: int,
) -> Arm:
    manifest = emit_manifest(
        str(real_model.target()),
        str(real_model.shared_draft("smollm2-135m-mtp")),
        manifest_dir=directory,
        num_speculative_tokens=3,
        token_map=None if token_map is None else str(token_map),
    )
    path = directory / "manifest.yaml"
    path.write_text(dump_manifest(manifest), encoding="utf-8")
    llm = LLM.from_manifest(path, Overrides(device="cpu", max_num_requests=8, **dynamic))  # type: ignore[arg-type]
    accepted_ids: list[int] = []
    done = llm.generate(
        [
            RequestInput(
                request_id=str(number), prompt_ids_target=tuple(ids), max_tokens=max_tokens
            )
            for number, ids in enumerate(prompts)
        ],
        # The last token of a round is the target's own.
        on_delta=lambda delta: accepted_ids.extend(delta.ids_target[:-1]),
    )
    return Arm(
        ids_target=[list(answer.ids_target) for answer in done],
        rounds=[answer.usage.num_rounds for answer in done],
        accepted=[answer.usage.num_accepted_drafts for answer in done],
        accepted_ids=accepted_ids,
    )


@pytest.mark.parametrize("dynamic", [{}, {"dynamic_rows": 32, "dynamic_rank": 32}], ids=str)
def test_two_prompts_with_the_drafts_map(tmp_path: Path, dynamic: dict[str, int]) -> None:
    draft = real_model.shared_draft("smollm2-135m-mtp")
    prompts, references = real_model.first_eight()
    arm = run(
        tmp_path, prompts[:2], token_map=draft / "token_map_8192.json", max_tokens=16, **dynamic
    )
    assert arm.ids_target == [reference[:16] for reference in references[:2]]
    assert 0 < arm.per_round() < 3


@pytest.mark.slow
@pytest.mark.timeout(14_400)
def test_what_maps_cost_on_eighty_prompts(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Assert equal texts and accept lengths; report what each map loses beside what it leaves out.

    The criterion "the relative loss of accepted drafts per round is within two percentage points
    of 1 - coverage on the target's outputs" is a figure here, `is_within_two_points`, and does not
    hold for the map of 8,192 ids: docs/explanation/vocab-maps.md says why.
    """
    draft = real_model.shared_draft("smollm2-135m-mtp")
    maps = {
        "full": None,
        "map-8192": draft / "token_map_8192.json",
        "map-16384": build_map(tmp_path, size=16_384),
    }
    prompts, references = real_model.all_eighty()
    arms = {name: run(tmp_path, prompts, token_map=path) for name, path in maps.items()}
    figures = {name: reported(arm, arms["full"], maps[name]) for name, arm in arms.items()}
    folder = real_model.figures_folder(tmp_path)
    (folder / "smollm2_reduced.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")
    record_property("figures", figures)
    for name, arm in arms.items():
        assert arm.ids_target == references, name
    assert 1 + arms["full"].per_round() == pytest.approx(1.632, abs=0.03)
    for name, expected in ISSUE_20.items():
        assert 1 + arms[name].per_round(20) == pytest.approx(expected, abs=0.03)


def reported(arm: Arm, full: Arm, token_map: Path | None) -> dict[str, float | bool]:
    """Return the figures of one head, those of its map included.

    `left_out_of_outputs` is 1 - coverage of the target's answers, `left_out_of_accepted` the same
    of the drafts that the full head had right.
    """
    figures: dict[str, float | bool] = {"accept_length": 1 + arm.per_round()}
    if token_map is None:
        return figures
    kept = json.loads(token_map.read_text(encoding="utf-8"))
    loss = 1 - arm.per_round() / full.per_round()
    left_out = 1 - coverage(kept, arm.ids_target)
    return figures | {
        "loss": loss,
        "left_out_of_outputs": left_out,
        "left_out_of_accepted": 1 - coverage(kept, [full.accepted_ids]),
        "is_within_two_points": abs(loss - left_out) <= 0.02,
    }


def coverage(kept: Sequence[int], texts: Sequence[Sequence[int]]) -> float:
    """Return the share of the texts' tokens that a map holds."""
    held = frozenset(kept)
    tokens = [token for text in texts for token in text]
    return sum(token in held for token in tokens) / len(tokens)


def build_map(directory: Path, *, size: int) -> Path:
    """Build a map from the standard library's sources and the documentation of this project."""
    corpus = directory / "corpus"
    corpus.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for number, source in enumerate(sorted(library.glob("*.py"))):
        shutil.copyfile(source, corpus / f"{number}.py.txt")
    for number, page in enumerate(sorted((real_model.ROOT / "docs").rglob("*.md"))):
        shutil.copyfile(page, corpus / f"{number}.md")
    out = directory / "map"
    command = ["build-token-map", str(corpus), "--tokenizer", str(real_model.target())]
    subprocess.run(
        [sys.executable, "-m", "specctl", *command, "--size", str(size), "-o", str(out)],
        check=True,
        capture_output=True,
    )
    return out / "token_map.json"
