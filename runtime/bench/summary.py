"""From raw records to the report, with nothing else: the same records give the same report.

Imports no torch.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from runtime.bench.compare import compare_runs
from runtime.bench.raw import (
    ArmName,
    ChoiceRecord,
    CopyRecord,
    PointSettings,
    RawBench,
    ReferenceRecord,
    RequestRecord,
    RunRecord,
    Settings,
    StepName,
    StepRecord,
)
from runtime.bench.report import (
    REPORT_VERSION,
    Arm,
    BenchReport,
    Copy,
    Identical,
    Point,
    Reference,
    ReferenceDifference,
    Run,
    Spread,
    Step,
)

_ARMS: tuple[ArmName, ...] = ("target-only", "speculative", "contract-off")


def summarise(raw: RawBench) -> BenchReport:
    """Compute the report of a benchmark."""
    copies = [record for record in raw.records if isinstance(record, CopyRecord)]
    copy = _copy(copies[0]) if copies else None
    points = [
        _point(index, settings, raw, None if copy is None else copy.gb_per_s)
        for index, settings in enumerate(raw.settings.points)
    ]
    return BenchReport(
        report_version=REPORT_VERSION,
        unfit_for_quality=_unfit(raw.settings),
        settings=raw.settings,
        points=points,
        identical=_sum_identical([point.identical for point in points]),
        reference=_reference(raw),
        copy=copy,
        environment=raw.environment,
    )


def spread(values: Sequence[float]) -> Spread:
    """Return the median and range of one value or more."""
    return Spread(median=statistics.median(values), min=min(values), max=max(values))


def _unfit(settings: Settings) -> str | None:
    reasons = []
    if settings.forced_accept_length is not None:
        reasons.append("accepted lengths were forced, so drafts stand in the answers unverified")
    if settings.shape is not None:
        reasons.append("the target's weights are random")
    return "; ".join(reasons) or None


def _claims_equality(settings: Settings) -> bool:
    is_law_only = settings.verification == "rejection" and settings.temperature > 0
    return settings.forced_accept_length is None and not is_law_only


class _PointRecords:
    """The records of one point, found by arm and run."""

    def __init__(self, index: int, raw: RawBench) -> None:
        self.runs = [r for r in raw.records if isinstance(r, RunRecord) and r.point == index]
        self.choices = [r for r in raw.records if isinstance(r, ChoiceRecord) and r.point == index]
        self.steps = [r for r in raw.records if isinstance(r, StepRecord) and r.point == index]
        self._requests: dict[int, list[RequestRecord]] = {}
        for record in raw.records:
            if isinstance(record, RequestRecord) and record.point == index:
                self._requests.setdefault(record.run, []).append(record)

    def arm_runs(self, name: ArmName) -> list[RunRecord]:
        """Return the runs of an arm in order."""
        return sorted((run for run in self.runs if run.arm == name), key=lambda run: run.order)

    def requests(self, run: RunRecord) -> list[RequestRecord]:
        """Return the requests of a run, by prompt and turn."""
        found = self._requests.get(run.order, [])
        return sorted(found, key=lambda record: (record.prompt, record.turn))

    def answers(self, name: ArmName) -> list[list[RequestRecord]]:
        """Return the requests of every run of an arm."""
        return [self.requests(run) for run in self.arm_runs(name)]


def _point(index: int, settings: PointSettings, raw: RawBench, copy: float | None) -> Point:
    records = _PointRecords(index, raw)
    arms = [_arm(name, records, raw.settings) for name in _ARMS if records.arm_runs(name)]
    drafted = next((arm for arm in arms if arm.name == "speculative"), None)
    base, *later = records.answers("target-only")
    repeat = compare_runs(base, later) if later else None
    is_repeatable = repeat is not None and repeat.equal == repeat.total
    ratios = _paired_ratios(records)
    has_claim = drafted is not None and _claims_equality(raw.settings)
    steps = [_step(record, settings, copy) for record in records.steps]
    free = records.answers("contract-off")
    return Point(
        concurrency=settings.concurrency,
        prompt_tokens=settings.prompt_tokens,
        arms=arms,
        accept_length=None if drafted is None else drafted.accept_length,
        acceptance_per_position=[] if drafted is None else drafted.acceptance_per_position,
        speedup=statistics.median(ratios) if ratios else None,
        speedup_range=spread(ratios) if ratios else None,
        repeat=repeat,
        identical=(
            compare_runs(base, records.answers("speculative"))
            if has_claim and is_repeatable
            else None
        ),
        contract_off=compare_runs(base, free) if free else None,
        contract_off_choices={record.what: record.chosen for record in records.choices},
        exactness_tax=_tax(arms),
        steps=steps,
        verify_ratio=_verify_ratio(steps),
        other_s=_other(steps),
    )


def _arm(name: ArmName, records: _PointRecords, settings: Settings) -> Arm:
    runs = records.arm_runs(name)
    first, requests = runs[0], records.requests(runs[0])
    everything = [record for run in runs for record in records.requests(run)]
    lines = [_run(run, records.requests(run)) for run in runs]
    decode = [line.decode_tokens_per_s for line in lines if line.decode_tokens_per_s is not None]
    gaps = [gap for record in everything if (gap := _inter_token_time(record)) is not None]
    accepted, has_draft = sum(first.accepted_at), name == "speculative"
    per_round = accepted / first.rounds if has_draft and first.rounds else None
    speeds = spread([line.tokens_per_s for line in lines])
    return Arm(
        name=name,
        proposer=settings.proposer if has_draft else "none",
        num_speculative_tokens=settings.num_speculative_tokens if has_draft else 0,
        tokens=lines[0].tokens,
        seconds=statistics.median(line.seconds for line in lines),
        tokens_per_s=speeds.median,
        tokens_per_s_range=speeds,
        decode_tokens_per_s=spread(decode) if decode else None,
        ttft_s=spread([record.arrivals[0][0] - record.submitted_s for record in everything]),
        itl_s=spread(gaps) if gaps else None,
        rounds=first.rounds,
        device_rounds=first.device_rounds,
        proposed_drafts=first.proposed_drafts,
        accepted_drafts=accepted,
        rounds_by_accepted=_histogram(first) if has_draft else [],
        accept_length=None if per_round is None else 1 + per_round,
        accepted_per_round=per_round,
        acceptance_per_position=(
            [count / first.rounds for count in first.accepted_at] if per_round is not None else []
        ),
        cached_tokens=sum(record.cached_tokens for record in requests),
        graphs=first.graphs,
        capture_s=first.capture_s,
        graph_bytes=first.graph_bytes,
        peak_bytes=first.peak_bytes,
        warm_up_s=sum(run.warm_up_s for run in runs),
        runs=lines,
    )


def _run(run: RunRecord, requests: Sequence[RequestRecord]) -> Run:
    tokens = sum(len(record.ids) for record in requests)
    return Run(
        order=run.order,
        tokens=tokens,
        seconds=run.seconds,
        tokens_per_s=tokens / run.seconds,
        decode_tokens_per_s=_decode_speed(requests),
    )


def _decode_speed(requests: Sequence[RequestRecord]) -> float | None:
    """Return tokens per second once all requests have their first token; None if one was late."""
    started = max(record.arrivals[0][0] for record in requests)
    if any(record.arrivals[-1][0] < started for record in requests):
        return None
    later = [arrival for record in requests for arrival in record.arrivals if arrival[0] > started]
    if not later:
        return None
    return sum(count for _, count in later) / (max(at for at, _ in later) - started)


def _inter_token_time(record: RequestRecord) -> float | None:
    later = sum(count for _, count in record.arrivals[1:])
    if not later:
        return None
    return (record.arrivals[-1][0] - record.arrivals[0][0]) / later


def _histogram(run: RunRecord) -> list[int]:
    """Return the rounds in which exactly 0, 1, ... drafts were accepted."""
    at_least = [run.rounds, *run.accepted_at, 0]
    return [more - fewer for more, fewer in itertools.pairwise(at_least)]


def _paired_ratios(records: _PointRecords) -> list[float]:
    """Return speculative / target-only of run i of both arms: neighbours in A B, B A, ..."""
    pairs = zip(records.arm_runs("target-only"), records.arm_runs("speculative"), strict=False)
    ratios = []
    for plain, drafted in pairs:
        speeds = [_run(run, records.requests(run)).tokens_per_s for run in (plain, drafted)]
        ratios.append(speeds[1] / speeds[0])
    return ratios


def _tax(arms: Sequence[Arm]) -> float | None:
    speeds = {
        arm.name: arm.tokens_per_s
        if arm.decode_tokens_per_s is None
        else arm.decode_tokens_per_s.median
        for arm in arms
    }
    if "contract-off" not in speeds:
        return None
    return 1 - speeds["target-only"] / speeds["contract-off"]


def _step(record: StepRecord, settings: PointSettings, copy: float | None) -> Step:
    seconds = spread(record.samples_s)
    num_bytes = None
    if record.step in ("decode", "verify", "contract-off"):
        cache = settings.concurrency * settings.context * settings.kv_bytes_per_token
        num_bytes = settings.weight_bytes + cache
    rate = None if num_bytes is None else num_bytes / seconds.median / 1e9
    return Step(
        step=record.step,
        width=record.width,
        clock=record.clock,
        seconds=seconds,
        bytes=num_bytes,
        gb_per_s=rate,
        share_of_copy=None if rate is None or copy is None else rate / copy,
    )


def _medians(steps: Iterable[Step]) -> dict[StepName, float]:
    return {step.step: step.seconds.median for step in steps}


def _verify_ratio(steps: Sequence[Step]) -> float | None:
    found = _medians(steps)
    if "decode" not in found or "verify" not in found:
        return None
    return found["verify"] / found["decode"]


def _other(steps: Sequence[Step]) -> float | None:
    found = _medians(steps)
    if not {"round", "verify", "draft"} <= found.keys():
        return None
    return found["round"] - found["verify"] - found["draft"]


def _copy(record: CopyRecord) -> Copy:
    seconds = spread(record.samples_s)
    return Copy(
        bytes=record.num_bytes,
        seconds=seconds,
        gb_per_s=record.num_bytes / seconds.median / 1e9,
    )


def _sum_identical(items: Sequence[Identical | None]) -> Identical | None:
    known = [item for item in items if item is not None]
    if not known or len(known) != len(items):
        return None
    return Identical(
        equal=sum(item.equal for item in known),
        total=sum(item.total for item in known),
        first_divergence=next(
            (item.first_divergence for item in known if item.first_divergence is not None), None
        ),
    )


def _reference(raw: RawBench) -> Reference | None:
    records = [record for record in raw.records if isinstance(record, ReferenceRecord)]
    if not records:
        return None
    differences = [
        ReferenceDifference(
            prompt=record.prompt,
            position=record.position,
            reference_id=record.reference_id,
            found_id=record.found_id,
            top1_id=record.top1_id,
            top2_id=record.top2_id,
            margin=record.margin,
        )
        for record in records
        if record.prompt is not None
    ]
    return Reference(
        file=records[0].file,
        equal=records[0].total - len(differences),
        total=records[0].total,
        differences=differences,
    )
