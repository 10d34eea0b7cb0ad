"""Options that several commands share: one spelling, range and help for each.

What only `convert` and `normalize` have is in `write_options`.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NamedTuple

import typer

Json = Annotated[bool, typer.Option("--json", help="Write one JSON document.")]

# How a source is read.
Offline = Annotated[
    bool,
    typer.Option(
        "--offline", help="Open no connection: hub sources are read from the hub's local cache."
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Pass over objects of unknown classes in a .bin file (SD150) instead of refusing it "
        "(SD103). Nothing in it is run.",
    ),
]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="Read all weights: NaN, zeros, rows that were never trained."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Config fields that are not known are errors (SD211)."),
]


# Facts that the user states in place of the files.
class Numbering(str, Enum):
    """What captured-layer ids count."""

    output = "output"
    boundary = "boundary"


class VerificationMode(str, Enum):
    """How drafts of sampled requests are decided about."""

    seeded = "seeded"
    rejection = "rejection"


class GraphsMode(str, Enum):
    """What is captured as CUDA graphs."""

    auto = "auto"
    rounds = "rounds"
    off = "off"


class AnchorLayout(str, Enum):
    """What slot 0 of a draft block is: a prediction, or the known token only."""

    sampled = "sampled"
    conditioning = "conditioning"


class LengthMode(str, Enum):
    """How many drafts requests get."""

    static = "static"
    cap_accept = "cap-accept"
    compact = "compact"


DraftTokens = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "--gamma", min=1, help="Draft tokens for each round."),
]
AuxLayerIds = Annotated[
    str | None,
    typer.Option(
        "--aux-layer-ids",
        metavar="I,J,K",
        help="Captured layers, 0-based, output of that layer, -1 = embedding.",
    ),
]
AuxNumbering = Annotated[
    Numbering | None,
    typer.Option(
        "--aux-numbering",
        help="What captured-layer ids count: output (of layers) or boundary (between them).",
    ),
]

# How the runtime decodes.
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:<index>.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
PipelineParallel = Annotated[
    int | None,
    typer.Option("--pp", min=1, help="Pipeline stages that the target's layers are spread over."),
]
TensorParallel = Annotated[
    int | None,
    typer.Option("--tp", min=1, help="Tensor-parallel ranks that each stage is split over."),
]
DraftTensorParallel = Annotated[
    int | None,
    typer.Option(
        "--draft-tp", min=1, help="Ranks of the draft: as many as the target's (default), or 1."
    ),
]
StageLayers = Annotated[
    str | None,
    typer.Option(
        "--stage-layers",
        metavar="A,B,C",
        help="Layers of each stage; default: as `specctl plan` balances them.",
    ),
]
StagesInProcess = Annotated[
    bool | None,
    typer.Option(
        "--pp-in-process/--pp-processes",
        help="Where stages run; default: in one process where they share one GPU.",
    ),
]
RankTimeout = Annotated[
    float | None,
    typer.Option(
        "--rank-timeout-s",
        min=0.5,
        help="Seconds without a word after which a stage or rank counts as lost; default 120.",
    ),
]
LoadFormat = Annotated[
    str | None,
    typer.Option("--load-format", help="auto, safetensors, or dummy (made-up weights)."),
]
Proposer = Annotated[
    str | None,
    typer.Option(
        "--proposer", help="eagle, eagle3, peagle, mtp, dflash, dflash2, dspark, ngram or none."
    ),
]
BenchProposer = Annotated[
    str | None,
    typer.Option(
        "--proposer",
        help="eagle, eagle3, peagle, mtp, dflash, dflash2, dspark, ngram or none; or oracle: what "
        "target-only answered.",
    ),
]
MaxNgram = Annotated[
    int | None,
    typer.Option(
        "--max-ngram",
        help="With --proposer ngram: newest tokens that are looked up at most, 1 to 32; default 4.",
    ),
]
NumSpeculativeTokens = Annotated[
    str | None,
    typer.Option(
        "--num-speculative-tokens",
        "--gamma",
        metavar="N|auto",
        help="Drafts in each round; auto: as many as pay for each request, up to the manifest's.",
    ),
]
LengthModeOption = Annotated[
    LengthMode | None,
    typer.Option(
        "--length-mode",
        help="static: every request gets N drafts; compact: as many as pay, rows packed; "
        "cap-accept: chosen alike, drafted and verified in full.",
    ),
]
CostTable = Annotated[
    str | None,
    typer.Option(
        "--cost-table",
        metavar="FILE",
        help="Measured costs of rounds; default: next to the manifest. Measured if missing.",
    ),
]
Graphs = Annotated[
    GraphsMode | None,
    typer.Option(
        "--graphs",
        help="auto: decoding rounds and prompts as CUDA graphs; rounds: no prompts; "
        "off: kernel by kernel.",
    ),
]
BatchBuckets = Annotated[
    str | None,
    typer.Option(
        "--batch-buckets",
        metavar="A,B,C",
        help="Requests of a round that have graphs of their own; default: the manifest's.",
    ),
]
PrefillBuckets = Annotated[
    str | None,
    typer.Option(
        "--prefill-buckets",
        metavar="A,B,C",
        help="Rows of prompts that have graphs of their own; default: 32 to 4096.",
    ),
]
Verification = Annotated[
    VerificationMode | None,
    typer.Option(
        "--verification",
        help="Sampled requests: seeded keeps the tokens of target-only decoding, "
        "rejection their distribution.",
    ),
]
DynamicRows = Annotated[
    int | None,
    typer.Option(
        "--dynamic-rows",
        min=0,
        help="With a token map: ids of the request's own text outside it that are drafted, too.",
    ),
]
DynamicRank = Annotated[
    int | None,
    typer.Option(
        "--dynamic-rank",
        min=0,
        help="With a token map: rank of a projection that finds further ids outside it.",
    ),
]
ForceAnchorLayout = Annotated[
    AnchorLayout | None,
    typer.Option(
        "--force-anchor-layout",
        help="For diagnosis: read slot 0 of a block draft as this, against the manifest (SD840).",
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, help="0 takes the likeliest token.")
]
TopK = Annotated[
    int, typer.Option("--top-k", min=0, help="Draw from so many likeliest ids; 0: from all.")
]
TopP = Annotated[
    float,
    typer.Option("--top-p", min=0, max=1, help="Draw from the likeliest ids of this mass."),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", min=0, max=1, help="Drop ids less likely than this share of the likeliest."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Noise of a temperature above 0.")]


def check_filters(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Refuse filters of a draw where nothing is drawn, and those that no request may have."""
    if not 0 < top_p <= 1:  # option ranges are closed, and a NaN is in all of them
        raise typer.BadParameter(f"{top_p} is not above 0 and at most 1", param_hint="--top-p")
    if not 0 <= min_p <= 1:
        raise typer.BadParameter(f"{min_p} is not 0 to 1", param_hint="--min-p")
    if temperature == 0 and (top_k > 0 or top_p < 1 or min_p > 0):
        raise typer.BadParameter(
            "the likeliest token is taken at temperature 0: give --temperature, too",
            param_hint="--top-k, --top-p, --min-p",
        )


def parse_layer_ids(text: str | None) -> tuple[int, ...] | None:
    """Return `1,14,26` as numbers; another text is wrong usage."""
    return optional_integers(text, "--aux-layer-ids")


def parse_integers(text: str, option: str) -> tuple[int, ...]:
    """Return `12,10,8` as numbers; another text is wrong usage of `option`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"`{text}` is not a list of integers such as 1,14,26", param_hint=option
        ) from None


def optional_integers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Return `12,10,8` as numbers, None when `option` is not given; see `parse_integers`."""
    return None if text is None else parse_integers(text, option)


def split_addresses(text: str, option: str) -> tuple[str, ...]:
    """Return `a:1,b:2` as two addresses; an empty one is wrong usage of `option`."""
    parts = tuple(part.strip() for part in text.split(","))
    if all(parts):
        return parts
    raise typer.BadParameter(f"`{text}` is not a list such as a:9000,b:9000", param_hint=option)


def value_of(choice: Enum | None) -> str | None:
    """Return the word of an option that has a closed set of them; None: not given."""
    return None if choice is None else str(choice.value)


class LogLevel(str, Enum):
    """How much a server logs to stderr."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class DraftCounts(NamedTuple):
    """What `--gamma` and `--length-mode` say together; None: not given."""

    num_speculative_tokens: int | None
    length_mode: str | None


def parse_draft_counts(text: str | None, mode: LengthMode | None) -> DraftCounts:
    """Return `7` as a number and `auto` as the mode that chooses; another text is wrong usage."""
    length_mode = value_of(mode)
    if text is None:
        return DraftCounts(None, length_mode)
    if text == "auto":
        if mode is LengthMode.static:
            raise typer.BadParameter("auto chooses, static does not", param_hint="--length-mode")
        return DraftCounts(None, length_mode or LengthMode.compact.value)
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(
            f"`{text}` is neither a number, 0 or more, nor auto",
            param_hint="--num-speculative-tokens",
        )
    return DraftCounts(int(text), length_mode)
