"""Drafts with other rows of padding than their target's draft what they draft with the same rows.

Prompts hold ids of the target's padding, for which such a draft may have no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.engine.llm import Completion
from runtime.engine.request import RequestInput
from tests.engine_harness import World, prompt_of, reference_ids
from tests.fake_graph import ids_of, make_llm
from tests.tiny import VOCAB_SIZE
from tests.tiny_padding import DRAFTS, FEWER, MORE, padded_world


def _requests(*first: int) -> tuple[RequestInput, ...]:
    return tuple(
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=(*first, *prompt_of(70 + index, 3 + 8 * index)),
            max_tokens=12,
            ignore_eos=True,
        )
        for index in range(3)
    )


PLAIN, PADDED = _requests(), _requests(VOCAB_SIZE - 1, VOCAB_SIZE - 2)


def _answers(
    world: World, requests: Sequence[RequestInput], *, is_eager: bool
) -> Sequence[Completion]:
    assert world.manifest.draft is not None
    llm, _ = make_llm(world, is_eager=is_eager, proposer=world.manifest.draft.algorithm)
    return llm.generate(requests)


def _accepted(answers: Sequence[Completion]) -> list[int]:
    return [answer.usage.num_accepted_drafts for answer in answers]


@pytest.mark.parametrize("num_rows", [FEWER, MORE])
@pytest.mark.parametrize("name", DRAFTS)
def test_padding_changes_neither_text_nor_drafts(name: str, num_rows: int, tmp_path: Path) -> None:
    same = padded_world(tmp_path / "same", name, VOCAB_SIZE)
    other = padded_world(tmp_path / "other", name, num_rows)
    for requests in (PLAIN, PADDED):
        expected = {request.request_id: reference_ids(same, request) for request in requests}
        eager = _answers(other, requests, is_eager=True)
        ahead = _answers(other, requests, is_eager=False)
        assert ids_of(eager) == ids_of(ahead) == expected
        assert _accepted(eager) == _accepted(ahead)
        if requests is PLAIN or num_rows == MORE:
            assert _accepted(eager) == _accepted(_answers(same, requests, is_eager=True))
