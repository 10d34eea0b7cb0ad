"""How many drafts each request of a round gets: what maximises committed tokens per second.

Draft j of a request is accepted with some chance a_j given that those before it were; its survival
is the product a_0 ... a_j. A round that verifies the best K drafts of its batch commits one token a
request plus their survivals, and takes the seconds that the cost table has for its size. Survival
never grows along a request, so the best K are always leading drafts of each request, and going
through the sizes finds the best choice of all.

a_j comes from the request's own rounds, with those of the whole engine as prior, or from a draft's
confidence head, scaled by what the engine saw such confidences come to. Either is known from rounds
that ended before: nothing waits for the round to come. The choice depends on that history alone,
so equal histories give equal choices; it never reaches a token, because any number of drafts yields
the target's own tokens.

*Source:* arXiv 2607.05147 (DSpark), confidence-scheduled verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import msgspec

from runtime.config.cost_table import CostTable
from runtime.config.round_sizes import RoundMenu, RoundSize

_FIRST_GUESS = 0.7  # chance of the first draft before anything was seen
_OWN_DECAY = 0.9  # of a request's counts per observed draft position
_ENGINE_DECAY = 0.998
_OWN_PRIOR = 4.0  # observations that the engine's rate counts for
_ENGINE_PRIOR = 2.0
_LEAST, _MOST = 0.01, 0.99
ROUNDS_BETWEEN_TRIALS = 32
"""Rounds that a request goes without drafts before one is tried again: without drafts nothing is
seen, and its text may have become predictable."""


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """What rounds have shown, of one request or of an engine; old rounds fade.

    Args:
        hits: per draft position, decayed count of accepted drafts.
        trials: per draft position, decayed count of drafts whose predecessors were accepted.
        confidence: the newest known block's chances, from a confidence head; empty without one.
        rounds_without: rounds without drafts since the last one that had some.
    """

    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)
    confidence: tuple[float, ...] = ()
    rounds_without: int = 0

    def count(self, num_drafts: int, num_accepted: int, decay: float) -> None:
        """Take in a round; drafts after the first rejected one were not tried."""
        for j in range(min(num_accepted + 1, num_drafts)):
            if j == len(self.trials):
                self.hits.append(0.0)
                self.trials.append(0.0)
            self.hits[j] = self.hits[j] * decay + (j < num_accepted)
            self.trials[j] = self.trials[j] * decay + 1.0

    def at(self, j: int) -> tuple[float, float]:
        """Return hits and trials of position j."""
        return (self.hits[j], self.trials[j]) if j < len(self.trials) else (0.0, 0.0)


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request of the round to come; a struct, because every round makes one for each request.

    Args:
        acceptance: its history.
        limit: drafts that it may have at most: its own wish, its context, its draft.
    """

    acceptance: Acceptance
    limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a round is to be.

    Args:
        num_drafts: per request, 0 to its limit.
        size: the size for which the drafts were chosen; None: the smallest that holds them.
    """

    num_drafts: tuple[int, ...]
    size: RoundSize | None = None


class DraftLengths(Protocol):
    """Chooses draft counts and learns from rounds."""

    def choose(self, requests: Sequence[Candidate]) -> Choice:
        """Return the drafts of each request."""

    def observe(
        self,
        acceptance: Acceptance,
        *,
        num_drafts: int,
        num_accepted: int,
        confidence: tuple[float, ...],
    ) -> None:
        """Learn from a round of the request with that history.

        Args:
            acceptance: its history, which grows.
            num_drafts: drafts that counted.
            num_accepted: of them, accepted.
            confidence: the draft's chances for this round's drafts; empty if it has none.
        """


class StaticLengths:
    """Every request gets its limit."""

    def choose(self, requests: Sequence[Candidate]) -> Choice:
        """Return the limits."""
        return Choice(num_drafts=tuple(request.limit for request in requests))

    def observe(
        self,
        acceptance: Acceptance,
        *,
        num_drafts: int,
        num_accepted: int,
        confidence: tuple[float, ...],
    ) -> None:
        """Nothing to learn."""


class AdaptiveLengths:
    """Chooses what maximises expected committed tokens per second under a cost table."""

    def __init__(self, costs: CostTable, menu: RoundMenu) -> None:
        """Start with nothing seen.

        Args:
            costs: measured on this engine's rounds.
            menu: the sizes among which to choose.
        """
        self._menu = menu
        self._costs = costs
        self._priced: dict[int, tuple[tuple[RoundSize, float], ...]] = {}  # by requests
        self._engine = Acceptance()
        self._confident = Acceptance()  # trials: sums of confidences in place of counts

    def choose(self, requests: Sequence[Candidate]) -> Choice:
        """Return the drafts of each request; see the module's docstring.

        Equal rates go to fewer drafts and rows; equal survivals to the earlier request.
        """
        if not any(request.limit for request in requests):
            return Choice(num_drafts=(0,) * len(requests))
        pool: list[tuple[float, int, int]] = []  # (-survival, draft index, request)
        for index, request in enumerate(requests):
            pool.extend((-survival, j, index) for j, survival in enumerate(self.survivals(request)))
        pool.sort()
        priced = self._sizes(len(requests))
        best_rate, best_room, best = 0.0, 0, priced[0][0]
        gains = {count: _gains(pool, count) for count in self._menu.draft_counts}
        for size, seconds in priced:
            gain_K = gains[size.num_drafts]
            room = min(size.num_rows - len(requests), len(gain_K) - 1)
            rate = (len(requests) + gain_K[room]) / seconds
            if rate > best_rate:
                best_rate, best_room, best = rate, room, size
        chosen = [0] * len(requests)
        for _, j, index in [item for item in pool if item[1] < best.num_drafts][:best_room]:
            chosen[index] = j + 1
        due = [
            index
            for index, request in enumerate(requests)
            if not chosen[index] and request.limit and _is_due(request.acceptance)
        ]
        for index in due:
            chosen[index] = 1
        return Choice(num_drafts=tuple(chosen), size=None if due else best)

    def survivals(self, request: Candidate) -> list[float]:
        """Return the chance that each draft is accepted, those before it included."""
        found: list[float] = []
        guess, survival = _FIRST_GUESS, 1.0
        own, confidence = request.acceptance, request.acceptance.confidence
        for j in range(request.limit):
            hits, trials = self._engine.at(j)
            guess = (hits + _ENGINE_PRIOR * guess) / (trials + _ENGINE_PRIOR)
            if j < len(confidence):
                hits, predicted = self._confident.at(j)
                scale = (hits + _ENGINE_PRIOR) / (predicted + _ENGINE_PRIOR)
                chance = confidence[j] * scale
            else:
                hits, trials = own.at(j)
                chance = (hits + _OWN_PRIOR * guess) / (trials + _OWN_PRIOR)
            survival *= min(max(chance, _LEAST), _MOST)
            found.append(survival)
        return found

    def observe(
        self,
        acceptance: Acceptance,
        *,
        num_drafts: int,
        num_accepted: int,
        confidence: tuple[float, ...],
    ) -> None:
        """Learn from a round; see `DraftLengths`."""
        acceptance.rounds_without = 0 if num_drafts else acceptance.rounds_without + 1
        acceptance.count(num_drafts, num_accepted, _OWN_DECAY)
        self._engine.count(num_drafts, num_accepted, _ENGINE_DECAY)
        if num_drafts and confidence:
            acceptance.confidence = confidence[:num_drafts]
            self._calibrate(acceptance.confidence, num_accepted)

    def _calibrate(self, confidence: tuple[float, ...], num_accepted: int) -> None:
        seen = self._confident
        for j, chance in enumerate(confidence[: num_accepted + 1]):
            if j == len(seen.trials):
                seen.hits.append(0.0)
                seen.trials.append(0.0)
            seen.hits[j] = seen.hits[j] * _ENGINE_DECAY + (j < num_accepted)
            seen.trials[j] = seen.trials[j] * _ENGINE_DECAY + chance

    def _sizes(self, num_requests: int) -> tuple[tuple[RoundSize, float], ...]:
        """Return the sizes for that many requests with their seconds."""
        known = self._priced.get(num_requests)
        if known is None:
            known = self._priced[num_requests] = tuple(
                (size, self._costs.round_s(size.batch, size.num_drafts, size.num_rows))
                for size in self._menu.sizes(num_requests)
            )
        return known


def _is_due(acceptance: Acceptance) -> bool:
    return acceptance.rounds_without >= ROUNDS_BETWEEN_TRIALS


def _gains(pool: Sequence[tuple[float, int, int]], num_drafts: int) -> list[float]:
    """Return the survivors to expect of the best 0, 1, 2, ... drafts below a draft index."""
    return [0.0, *accumulate(-cost for cost, j, _ in pool if j < num_drafts)]
