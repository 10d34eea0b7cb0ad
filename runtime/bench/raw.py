"""Raw records of a benchmark and the directory that holds them. Imports no torch.

A report is computed from these records alone (`runtime.bench.summary`), the same bytes each time.

    settings.json     what was run
    environment.json  where, and on which sources
    records.jsonl     one run, request, step or copy measurement a line, in the order they were made
    summary.json      the report
    report.html       the report as a page
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from specctl.contract.diagnostics import DiagnosticError, diagnose

ArmName = Literal["target-only", "speculative", "contract-off"]
StepName = Literal["decode", "verify", "draft", "round", "contract-off"]
Clock = Literal["cuda-events", "wall"]

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Samples = Annotated[list[Seconds], msgspec.Meta(min_length=1)]

SETTINGS_FILE = "settings.json"
ENVIRONMENT_FILE = "environment.json"
RECORDS_FILE = "records.jsonl"


class PointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a sweep.

    Args:
        concurrency: requests that run at once.
        prompt_tokens: length of its random prompts; None with a prompt file.
        num_requests: requests of one run, second turns included.
        context: tokens of a request at which steps are measured.
        order: arms in the order in which they ran.
        weight_bytes: of the target that one step reads: layers and head.
        kv_bytes_per_token: of the target's cache, all layers.
    """

    concurrency: int
    prompt_tokens: int | None
    num_requests: int
    context: int
    order: list[ArmName]
    weight_bytes: int
    kv_bytes_per_token: int


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was run.

    Args:
        manifest: file name; None with random weights.
        shape: file name of the config that random weights were made for.
        prompts: file name; None with random prompts.
        num_prompts: of the file, or of the largest point.
        turns: `both`: the second question follows the first answer.
        forced_accept_length: that a schedule enforced; None: the target decided.
        oracle_accept_length: that the oracle's drafts aimed at; None for other proposers.
        proposer: of the speculative arm; `none` without one.
        verification: `seeded`, or `rejection`, which claims no equality where it samples.
        layout: stages and ranks, where they run and how tensors travel between them.
        warm_up: what was run untimed; the default is what earlier versions ran.
        filters: `top_k`, `top_p` and `min_p` where they may cut a sampled law.
        draft_vocab_size: rows of the draft's head where a map reduces it.
    """

    manifest: str | None
    shape: str | None
    fingerprint: str
    prompts: str | None
    prompt_set: str | None
    turns: str
    num_prompts: int
    max_tokens: int
    temperature: float
    seed: int
    repeats: int
    ignore_eos: bool
    device: str
    dtype: str
    proposer: str
    num_speculative_tokens: int
    verification: str
    forced_accept_length: float | None
    oracle_accept_length: float | None
    points: list[PointSettings]
    layout: str = "one stage"
    warm_up: str = "8 tokens of the first requests before each run"
    filters: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    draft_vocab_size: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def law(self) -> str:
        """What tokens are drawn from, in words."""
        filters = self.filters or {}
        cuts = (f", {name.replace('_', '-')} {value:g}" for name, value in filters.items())
        return f"temperature {self.temperature:g}{''.join(cuts)}"


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it ran.

    Args:
        command: as typed.
        gemm_table: digest of the pinned tiles of products on CUDA and of attention's segments.
        sources: package of the runtime -> digest of its source files.
        sources_digest: of all of these.
        started: UTC, ISO 8601.
    """

    command: str
    started: str
    specctl: str
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    device_name: str
    device_memory_bytes: int | None
    platform: str
    cpus: int
    torch_threads: int
    gemm_table: str
    sources: dict[str, str]
    sources_digest: str


class RunRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="run",
    tag_field="kind",
):
    """One run of one arm over all requests of a point.

    Args:
        point: index of the point.
        order: place among the runs of the point, from 0.
        seconds: wall time, prefill included, loading and warm-up not.
        accepted_at: per draft position, rounds in which that draft was accepted.
        device_rounds: steps that ran on the device without host reads.
        graphs: captured by this arm's engine; the same in all of its runs.
        capture_s: seconds that capturing took.
        graph_bytes: device memory that graphs took.
        peak_bytes: most device memory allocated so far in the process; None on a CPU.
        warm_up_s: seconds of the untimed requests before it; 0 where they were not measured.
    """

    point: int
    arm: ArmName
    order: int
    seconds: Seconds
    steps: int
    rounds: int
    proposed_drafts: int
    accepted_at: list[int]
    device_rounds: int
    graphs: int
    capture_s: float
    graph_bytes: int
    peak_bytes: int | None
    warm_up_s: float = 0.0


class RequestRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="request",
    tag_field="kind",
):
    """One request of one run, as it came back.

    Args:
        run: `order` of its run.
        prompt: index of the prompt.
        turn: 1, or 2 for the second question of a conversation.
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        ids: output target ids.
        submitted_s: when the engine took it, seconds since the start of the run.
        arrivals: (seconds since the start of the run, tokens that came with it).
    """

    point: int
    arm: ArmName
    run: int
    prompt: int
    turn: int
    name: str
    prompt_tokens: int
    cached_tokens: int
    ids: list[int]
    finish_reason: str
    rounds: int
    proposed_drafts: int
    accepted_drafts: int
    submitted_s: float
    arrivals: Annotated[list[tuple[float, int]], msgspec.Meta(min_length=1)]


class StepRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="step",
    tag_field="kind",
):
    """Times of one kind of step at one point, all requests in it.

    Args:
        width: target rows of each request; of a draft, tokens drafted.
    """

    point: int
    step: StepName
    width: int
    clock: Clock
    samples_s: Samples


class CopyRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="copy",
    tag_field="kind",
):
    """A copy from device memory to device memory, measured in the same process.

    Args:
        num_bytes: read plus written.
    """

    num_bytes: int
    clock: Clock
    samples_s: Samples


class ReferenceRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="reference",
    tag_field="kind",
):
    """Where an answer leaves its reference, and how near the target's choice was there.

    Args:
        file: of the references.
        prompt: index of the prompt; the one record with None says that the comparison was made.
        top1_id: the target's likeliest id at the position, given the reference up to it.
        margin: top-1 logit minus top-2 logit, float32; a small one is a near-tie.
    """

    file: str
    total: int
    prompt: int | None
    position: int = 0
    reference_id: int | None = None
    found_id: int | None = None
    top1_id: int = 0
    top2_id: int = 0
    margin: float = 0.0


class ChoiceRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="choice",
    tag_field="kind",
):
    """What the arm without the contract computes something with.

    Args:
        what: a product with its output and input features, or `attention`.
        chosen: `library`, `pinned`, a tile, or keys of a segment.
    """

    point: int
    what: str
    chosen: str


Record = ChoiceRecord | RunRecord | RequestRecord | StepRecord | CopyRecord | ReferenceRecord


class RawBench(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured."""

    settings: Settings
    environment: Environment
    records: list[Record]


def write_raw(directory: Path, raw: RawBench) -> None:
    """Write settings, environment and records to an existing directory.

    Each file is there whole or as it was; records come first, so that settings never name a point
    that has none: what a benchmark wrote when a point ended can be read whenever it was cut.
    """
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in raw.records)
    _write_whole(directory / RECORDS_FILE, lines)
    _write_whole(directory / ENVIRONMENT_FILE, _pretty(raw.environment))
    _write_whole(directory / SETTINGS_FILE, _pretty(raw.settings))


def read_raw(directory: Path) -> RawBench:
    """Read what `write_raw` wrote.

    Raises:
        DiagnosticError: SD925, a file is missing or has another form, or records do not belong
            together.
    """
    path = directory / RECORDS_FILE
    decoder = msgspec.json.Decoder(Record)
    records: list[Record] = []
    for number, line in enumerate(_bytes(path).splitlines(), start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise _broken(f"{path}:{number}", str(error)) from error
    raw = RawBench(
        settings=_decoded(directory / SETTINGS_FILE, Settings),
        environment=_decoded(directory / ENVIRONMENT_FILE, Environment),
        records=records,
    )
    problem = _mismatch(raw)
    if problem is not None:
        raise _broken(str(path), problem)
    return raw


def _mismatch(raw: RawBench) -> str | None:
    """Return what keeps records from being those of their settings, None: nothing."""
    runs = [record for record in raw.records if isinstance(record, RunRecord)]
    requests = [record for record in raw.records if isinstance(record, RequestRecord)]
    found = [(record.point, record.order) for record in runs]
    answered = [(record.point, record.run, record.prompt, record.turn) for record in requests]
    if len({*found}) < len(found) or len({*answered}) < len(answered):
        return "a run or a request stands in it twice"
    if {*found} != {(point, run) for point, run, _, _ in answered}:
        return "runs and requests do not belong together"
    for index, point in enumerate(raw.settings.points):
        arms = [run.arm for run in sorted(runs, key=lambda run: run.order) if run.point == index]
        if arms != point.order or "target-only" not in arms:
            return f"point {index} has the runs {arms}, the settings name {point.order}"
    return None


_Facts = TypeVar("_Facts", Settings, Environment)


def _write_whole(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _pretty(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _decoded(path: Path, kind: type[_Facts]) -> _Facts:
    try:
        return msgspec.json.decode(_bytes(path), type=kind)
    except msgspec.DecodeError as error:
        raise _broken(str(path), str(error)) from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _broken(str(path), error.strerror or "it cannot be read") from error


def _broken(where: str, reason: str) -> DiagnosticError:
    return DiagnosticError(
        diagnose(
            "SD925",
            where=where,
            message=f"these are no records of a benchmark: {reason}",
            expected=f"{SETTINGS_FILE}, {ENVIRONMENT_FILE} and {RECORDS_FILE} of this version",
        )
    )
