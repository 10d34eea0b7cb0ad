"""The benchmark report: its types are the published JSON Schema. Imports no torch.

Definitions: accept length = 1 + accepted drafts / verify rounds, drafts counted before any stop or
length cut, the token that a prefill yields in no round; acceptance at position j = rounds whose
draft j was accepted / all rounds; seconds = wall time of all prompts of a run, prefill included,
loading and warm-up not.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

REPORT_VERSION = 1

ArmName = Literal["target-only", "speculative"]


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of one arm over all prompts.

    Args:
        order: place among all runs, from 0.
    """

    order: int
    tokens: int
    seconds: float
    tokens_per_s: float


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm: sums over its runs, round counts of one run (all runs have the same).

    Args:
        tokens: output tokens kept, end tokens included.
        accept_length: None without a round.
    """

    name: ArmName
    proposer: str
    num_speculative_tokens: int
    tokens: int
    seconds: float
    tokens_per_s: float
    rounds: int
    proposed_drafts: int
    accepted_drafts: int
    accept_length: float | None
    runs: list[Run]


class Divergence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first position where the arms differ; an id is None where an answer has ended.

    Args:
        prompt: index of the prompt in the file.
        position: index of the output token.
    """

    prompt: int
    position: int
    target_only_id: int | None
    speculative_id: int | None


class Identical(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers that are equal in both arms and in every run, token for token."""

    equal: int
    total: int
    first_divergence: Divergence | None


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
    """The target-only answers against reference continuations."""

    file: str
    equal: int
    total: int
    differences: list[ReferenceDifference]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of one run, as it came back."""

    arm: ArmName
    run: int
    prompt: int
    name: str
    prompt_tokens: int
    cached_tokens: int
    ids: list[int]
    finish_reason: str
    rounds: int
    proposed_drafts: int
    accepted_drafts: int


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was run.

    Args:
        order: arms in the order in which they ran.
    """

    manifest: str
    fingerprint: str
    prompts: str
    prompt_set: str | None
    num_prompts: int
    prompt_tokens: int
    max_tokens: int
    temperature: float
    seed: int
    concurrency: int
    repeats: int
    ignore_eos: bool
    device: str
    dtype: str
    order: list[ArmName]


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it ran.

    Args:
        gemm_table: digest of the pinned tiles of dense products on CUDA.
    """

    specctl: str
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    device_name: str
    platform: str
    cpus: int
    torch_threads: int
    gemm_table: str


class BenchReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole report.

    Args:
        accept_length: the speculative arm's; None without one or without a round.
        acceptance_per_position: draft j of a round accepted / all rounds, first draft first.
        speedup: tokens per second of the speculative arm / target-only; None without both.
        identical: None when only one arm ran.
        reference: None when no reference was given.
    """

    report_version: int
    settings: Settings
    arms: list[Arm]
    accept_length: float | None
    acceptance_per_position: list[float]
    speedup: float | None
    identical: Identical | None
    reference: Reference | None
    environment: Environment
    requests: list[RequestRecord]

    def arm(self, name: ArmName) -> Arm | None:
        """Return an arm by name."""
        return next((arm for arm in self.arms if arm.name == name), None)


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
    """

    proposer: str
    num_speculative_tokens: int
    finish_reason: str
    rounds: int
    accept_length: float | None
    speed: Speed
    comparison: Speed | None
    first_divergence: int | None


def bench_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of `bench --json`."""
    schema = msgspec.json.schema(BenchReport)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"specctl bench report, version {REPORT_VERSION}",
        **schema,
    }
