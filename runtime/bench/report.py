"""The benchmark report: its types are the published JSON Schema. Imports no torch.

Definitions: accept length = 1 + accepted drafts / verify rounds, drafts counted before any stop or
length cut, the token that a prefill yields in no round; acceptance at position j = rounds whose
draft j was accepted / all rounds; seconds = wall time of all requests of a run, prefill included,
loading and warm-up not; decode tokens/s = tokens after every request has its first one, by the time
from then to the last; inter-token time of a request = (last arrival - first) / (tokens - 1).
`runtime.bench.bandwidth` says which bytes a step is held against.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.bench.raw import ArmName, Environment, Settings, StepName

REPORT_VERSION = 2


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A median and the range around it."""

    median: float
    min: float
    max: float


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of one arm over all requests.

    Args:
        order: place among all runs of the point, from 0.
        decode_tokens_per_s: None when requests waited for others, so that no moment separates
            prefill from decoding.
    """

    order: int
    tokens: int
    seconds: float
    tokens_per_s: float
    decode_tokens_per_s: float | None


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm; counts are those of its first run (all runs have the same), times of all.

    Args:
        tokens: output tokens kept in one run, end tokens included.
        seconds: median over the runs.
        tokens_per_s: median over the runs, prefill included.
        tokens_per_s_range: the same with its range.
        decode_tokens_per_s: None where requests waited for others.
        ttft_s: time to first token, over all requests of all runs.
        itl_s: inter-token time, over all requests with two tokens or more; None without one.
        rounds_by_accepted: rounds in which exactly 0, 1, ... drafts were accepted.
        accept_length: with the bonus token; None without a draft or a round.
        accepted_per_round: without it.
        acceptance_per_position: draft j of a round accepted / all rounds, first draft first.
        cached_tokens: prompt tokens of one run that came from the prefix cache.
        warm_up_s: seconds of untimed requests before all of its runs.
    """

    name: ArmName
    proposer: str
    num_speculative_tokens: int
    tokens: int
    seconds: float
    tokens_per_s: float
    tokens_per_s_range: Spread
    decode_tokens_per_s: Spread | None
    ttft_s: Spread
    itl_s: Spread | None
    rounds: int
    device_rounds: int
    proposed_drafts: int
    accepted_drafts: int
    rounds_by_accepted: list[int]
    accept_length: float | None
    accepted_per_round: float | None
    acceptance_per_position: list[float]
    cached_tokens: int
    graphs: int
    capture_s: float
    graph_bytes: int
    peak_bytes: int | None
    warm_up_s: float
    runs: list[Run]


class Divergence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first position where the arms differ; an id is None where an answer has ended.

    Args:
        prompt: index of the prompt in the file.
        turn: 1, or 2 for the second question of a conversation.
        position: index of the output token.
    """

    prompt: int
    turn: int
    position: int
    target_only_id: int | None
    speculative_id: int | None


class Identical(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers that are equal to those of the first target-only run in every run, token for token.

    A second turn is another prompt where the first answer differs, and then counts as different.
    """

    equal: int
    total: int
    first_divergence: Divergence | None


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of one kind of step, all requests of the point in it.

    Args:
        step: `decode` (one target row a request), `verify` (width rows), `draft` (width drafts and
            the observation of the last round), `round` (all of it, one captured graph on CUDA),
            `contract-off` (as `decode`, in the arm of that name).
        bytes: that the step has to read from memory at least; None where that is not known.
        gb_per_s: these bytes by the median time, 10^9 bytes a second.
        share_of_copy: this rate by that of the copy.
    """

    step: StepName
    width: int
    clock: str
    seconds: Spread
    bytes: int | None
    gb_per_s: float | None
    share_of_copy: float | None


class Copy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A copy on the same device in the same process; read and written bytes count."""

    bytes: int
    seconds: Spread
    gb_per_s: float


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a sweep.

    Args:
        arms: target-only first.
        repeat: later target-only runs against the first; None with one run of it.
        identical: every run of the speculative arm against the first target-only run; None without
            that arm, where no equality is claimed (forced lengths, rejection sampling), and where
            target-only does not even equal itself.
        contract_off: the arm without the contract against target-only: what it changes.
        speedup: median over pairs of neighbouring runs, speculative / target-only tokens per
            second; None without both.
        speedup_range: the same with its range.
        contract_off_choices: what that arm computes each product and attention with.
        exactness_tax: 1 - target-only / contract-off tokens per second, median over the runs.
        steps: what was measured apart from the runs.
        verify_ratio: verify / decode, medians.
        other_s: round - verify - draft, medians: acceptance, commit, launches.
    """

    concurrency: int
    prompt_tokens: int | None
    arms: list[Arm]
    accept_length: float | None
    acceptance_per_position: list[float]
    speedup: float | None
    speedup_range: Spread | None
    repeat: Identical | None
    identical: Identical | None
    contract_off: Identical | None
    contract_off_choices: dict[str, str]
    exactness_tax: float | None
    steps: list[Step]
    verify_ratio: float | None
    other_s: float | None

    def arm(self, name: ArmName) -> Arm | None:
        """Return an arm by name."""
        return next((arm for arm in self.arms if arm.name == name), None)


class ReferenceDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an answer leaves its reference, and how near the target's choice was there.

    Args:
        top1_id: the target's likeliest id at the position, given the reference up to it.
        margin: top-1 logit minus top-2 logit, float32; a small one is a near-tie.
    """

    prompt: int
    position: int
    reference_id: int | None
    found_id: int | None
    top1_id: int
    top2_id: int
    margin: float


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first target-only answers against reference continuations."""

    file: str
    equal: int
    total: int
    differences: list[ReferenceDifference]


class BenchReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole report; `runtime.bench.summary` computes it from raw records.

    Args:
        unfit_for_quality: why the answers say nothing about the models' quality; None when they do.
        identical: over all points; None where a point has none.
        reference: None when no reference was given.
        copy: None when no steps were measured.
    """

    report_version: int
    unfit_for_quality: str | None
    settings: Settings
    points: list[Point]
    identical: Identical | None
    reference: Reference | None
    copy: Copy | None
    environment: Environment

    @property
    def is_equal(self) -> bool:
        """Whether no run differs from target-only where equality is claimed."""
        claimed = [item for point in self.points for item in (point.repeat, point.identical)]
        return all(item.equal == item.total for item in claimed if item is not None)


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of one answer: wall time, prefill included."""

    tokens: int
    seconds: float
    tokens_per_s: float


class GenerateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one answer took.

    Args:
        accept_length: None without a round.
        comparison: the run without a draft, when one was asked for.
        first_divergence: position of the first output token that differs; None: none does.
        claims_equality: whether the comparison must be equal; rejection mode keeps the law of
            sampled answers, not their tokens.
    """

    proposer: str
    num_speculative_tokens: int
    finish_reason: str
    rounds: int
    accept_length: float | None
    speed: Speed
    comparison: Speed | None
    first_divergence: int | None
    claims_equality: bool = True


def bench_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of `bench --json`."""
    schema = msgspec.json.schema(BenchReport)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"specctl bench report, version {REPORT_VERSION}",
        **schema,
    }
