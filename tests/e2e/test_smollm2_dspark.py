"""The real DSpark draft on CPU, float32: the target-only text, the drafts of a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import Overrides
from runtime.engine.llm import LLM
from tests import real_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_greedy_equals_target_only_and_drafts_are_the_references(tmp_path: Path) -> None:
    draft = real_model.shared_draft("smollm2-135m-dspark")
    llm = real_model.load(real_model.write_manifest(tmp_path, draft, gamma=5), speculative=True)
    assert (llm.config.draft_width, llm.config.num_speculative_tokens) == (6, 5)
    prompts, references = real_model.first_eight()
    (done,) = real_model.answer(llm, prompts[:1])
    assert list(done.ids_target) == references[0]
    # tests/reference_block.py with a greedy Markov chain over the same text needs as many rounds
    # and accepts as many drafts, up to those of the last round that lie behind the text.
    assert done.usage.num_rounds == 76
    assert done.usage.num_accepted_drafts == pytest.approx(52, abs=3)


def test_the_wrong_anchor_layout_costs_accept_length_and_no_token(tmp_path: Path) -> None:
    draft = real_model.shared_draft("smollm2-135m-dspark")
    manifest = real_model.write_manifest(tmp_path, draft, gamma=5)
    prompts, references = real_model.first_eight()
    lengths = {}
    for layout in (None, "sampled"):
        llm = LLM.from_manifest(manifest, Overrides(device="cpu", force_anchor_layout=layout))
        done = real_model.answer(llm, prompts[:2], max_tokens=32)
        assert [list(answer.ids_target) for answer in done] == [ids[:32] for ids in references[:2]]
        stats = llm.engine.stats()
        assert stats.num_drafts == 5 * stats.num_rounds
        assert stats.accept_length is not None
        lengths[layout] = stats.accept_length
    assert lengths["sampled"] < 0.9 * lengths[None]


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_accept_length_of_eighty_prompts(tmp_path: Path) -> None:
    """2.031 in plain PyTorch (facts of the draft)."""
    draft = real_model.shared_draft("smollm2-135m-dspark")
    llm = real_model.load(real_model.write_manifest(tmp_path, draft, gamma=5), speculative=True)
    prompts, references = real_model.all_eighty()
    done = real_model.answer(llm, prompts)
    assert [list(answer.ids_target) for answer in done] == references
    stats = llm.engine.stats()
    assert 1 + stats.num_accepted_drafts / stats.num_rounds == pytest.approx(2.031, abs=0.03)
