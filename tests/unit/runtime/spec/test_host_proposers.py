"""Lookup, scripted and empty proposers, and the factory."""

from __future__ import annotations

import pytest

from runtime.spec.factory import make_proposer
from runtime.spec.ngram import NgramProposer, lookup
from runtime.spec.none import NoProposer
from runtime.spec.oracle import OracleProposer, OracleScript
from runtime.spec.types import Proposal, RequestView, SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.unit.runtime.spec.stub_model import CPU, advance, make_view

PROMPT = (3, 1, 4)
ANSWER = (1, 5, 9, 2, 6, 5, 3)


def view_of(num_drafts: int, *, slot: int = 0, request_id: str = "r") -> RequestView:
    return make_view(
        PROMPT,
        SamplingParams(),
        num_prompt_tokens=3,
        num_drafts=num_drafts,
        slot=slot,
        request_id=request_id,
    )


def drafts_of(proposal: Proposal) -> list[list[int]]:
    rows = proposal.ids_target_BG.tolist()
    assert all(not any(row[n:]) for row, n in zip(rows, proposal.num_drafts, strict=True))
    return [row[:n] for row, n in zip(rows, proposal.num_drafts, strict=True)]


@pytest.mark.parametrize(
    ("ids", "max_ngram", "num_drafts", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, 2, [9, 1]),
        # The longer match wins over the more recent one.
        ([7, 1, 2, 5, 5, 2, 6, 1, 2], 3, 3, [5, 5, 2]),
        # Among equal lengths the most recent occurrence wins.
        ([2, 8, 2, 9, 2], 3, 1, [9]),
        # A limit of one token takes the most recent occurrence of it.
        ([7, 1, 2, 5, 5, 2, 6, 1, 2], 1, 3, [6, 1, 2]),
        ([1, 2, 3], 3, 4, []),
        ([5], 3, 4, []),
        # The sequence ends before the drafts do.
        ([4, 4], 3, 4, [4]),
        ([1, 2, 1, 2], 4, 0, []),
    ],
)
def test_lookup(ids: list[int], max_ngram: int, num_drafts: int, expected: list[int]) -> None:
    assert lookup(ids, max_ngram=max_ngram, num_drafts=num_drafts) == expected


def test_ngram_proposer_drafts_per_view() -> None:
    proposer = NgramProposer(device=CPU, max_ngram=2)
    looping = make_view([8, 9, 8], SamplingParams(), num_prompt_tokens=1, num_drafts=5)
    assert proposer.max_drafts(looping) == 5
    assert drafts_of(proposer.propose([looping, view_of(5)])) == [[9, 8], []]


def test_no_proposer() -> None:
    proposer = NoProposer(device=CPU)
    assert proposer.max_drafts(view_of(4)) == 0
    proposal = proposer.propose([view_of(4), view_of(4)])
    assert proposal.num_drafts == (0, 0)
    assert tuple(proposal.ids_target_BG.shape) == (2, 0)


def test_oracle_follows_the_continuation() -> None:
    proposer = OracleProposer(OracleScript(continuations={PROMPT: ANSWER}), device=CPU)
    view = view_of(3)
    assert drafts_of(proposer.propose([view])) == [[1, 5, 9]]
    later = advance(view, ANSWER[:5])
    assert proposer.max_drafts(later) == 2
    assert drafts_of(proposer.propose([later])) == [[5, 3]]
    assert drafts_of(proposer.propose([advance(view, ANSWER)])) == [[]]


def test_oracle_has_nothing_for_other_prompts() -> None:
    proposer = OracleProposer(OracleScript(continuations={(9,): ANSWER}), device=CPU)
    assert proposer.max_drafts(view_of(3)) == 0
    assert drafts_of(proposer.propose([view_of(3)])) == [[]]


def test_oracle_knows_requests_by_id_first() -> None:
    script = OracleScript(continuations={PROMPT: (1, 1), "special": (2, 2)})
    proposer = OracleProposer(script, device=CPU)
    views = [view_of(2), view_of(2, slot=1, request_id="special")]
    assert drafts_of(proposer.propose(views)) == [[1, 1], [2, 2]]


def test_oracle_counts_rounds_per_slot_and_forgets_on_release() -> None:
    script = OracleScript(continuations={PROMPT: ANSWER}, accept_counts=(1, 0, 3))
    proposer = OracleProposer(script, device=CPU)
    first = [drafts_of(proposer.propose([view_of(3)]))[0] for _ in range(4)]
    assert first == [[1, 4, 9], [0, 5, 9], [1, 5, 9], [1, 4, 9]]
    assert drafts_of(proposer.propose([view_of(3, slot=1)])) == [[1, 4, 9]]
    proposer.release(0)
    assert drafts_of(proposer.propose([view_of(3)])) == [[1, 4, 9]]


def test_oracle_rounds_verbatim() -> None:
    script = OracleScript(rounds={PROMPT: ((7, 7, 7), (8,))})
    proposer = OracleProposer(script, device=CPU)
    assert proposer.max_drafts(view_of(2)) == 2
    wishes = (2, 0, 2, 2)
    found = [drafts_of(proposer.propose([view_of(count)]))[0] for count in wishes]
    assert found == [[7, 7], [], [8], []]
    with pytest.raises(AssertionError, match="round without drafts"):
        OracleProposer(OracleScript(rounds={PROMPT: ((7,), ())}), device=CPU)


def test_oracle_corrupts_at_the_given_rates() -> None:
    answer = tuple([5] * 4_000)
    script = OracleScript(
        continuations={PROMPT: answer}, corruption_rates=(0.0, 0.25, 0.75), seed=3
    )
    proposer = OracleProposer(script, device=CPU)
    wrong = [0, 0, 0, 0]
    for done in range(1_000):
        view = advance(view_of(4), answer[:done])
        drafts = drafts_of(proposer.propose([view]))[0]
        assert set(drafts) <= {4, 5}
        wrong = [w + (draft == 4) for w, draft in zip(wrong, drafts, strict=True)]
    assert wrong[0] == 0
    # Five standard deviations of 1,000 draws; the draws are fixed.
    assert abs(wrong[1] - 250) < 69
    assert abs(wrong[2] - 750) < 69
    assert abs(wrong[3] - 750) < 69


def test_oracle_corruption_ignores_slot_batch_and_round() -> None:
    script = OracleScript(continuations={PROMPT: ANSWER}, corruption_rates=(0.5,), seed=9)
    expected = drafts_of(OracleProposer(script, device=CPU).propose([view_of(7)]))[0]
    proposer = OracleProposer(script, device=CPU)
    proposer.propose([view_of(7, slot=4)])
    views = [view_of(2, slot=1), view_of(7, slot=4, request_id="x")]
    assert drafts_of(proposer.propose(views)) == [expected[:2], expected]
    assert expected != list(ANSWER)


def test_factory_makes_each_proposer() -> None:
    assert make_proposer("none", device=CPU).name == "none"
    assert make_proposer("ngram", device=CPU, max_ngram=2).name == "ngram"
    assert make_proposer("oracle", device=CPU, script=OracleScript()).name == "oracle"


@pytest.mark.parametrize("name", ["eagle3", "oracle"])
def test_factory_names_what_is_missing(name: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        make_proposer(name, device=CPU)  # type: ignore[arg-type]
    (diagnostic,) = raised.value.diagnostics
    assert (diagnostic.code, diagnostic.where) == ("SD807", "--proposer")
