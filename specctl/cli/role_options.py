"""Options of `serve` that say which half of the work a server does and how it meets the other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Literal

import typer


class ServeRole(str, Enum):
    """What a server does: prompts, everything after them, or both."""

    both = "both"
    prefill = "prefill"
    decode = "decode"

    value: Literal["both", "prefill", "decode"]


class Transport(str, Enum):
    """What carries KV from a prefill to a decode server."""

    memory = "memory"
    shared = "shared"
    nixl = "nixl"
    mooncake = "mooncake"

    value: Literal["memory", "shared", "nixl", "mooncake"]


class FirstProposal(str, Enum):
    """What stands for the law of a first round's drafts in rejection mode."""

    one_hot = "one_hot"
    full = "full"

    value: Literal["one_hot", "full"]


RoleOption = Annotated[
    ServeRole | None,
    typer.Option(
        "--role",
        help="`prefill` computes prompts for decode servers; `decode` answers clients and has "
        "prompts computed by the servers of --peer; default both.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen", metavar="HOST:PORT", help="Where a prefill server meets decode servers."
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(
        "--peer", metavar="HOST:PORT,...", help="What prefill servers listen on; they take turns."
    ),
]
TransportOption = Annotated[
    Transport | None,
    typer.Option(
        "--transport",
        help="What carries KV: `shared` (default) within one machine, `nixl` or `mooncake` between "
        "machines; `memory` joins roles of one process, for tests.",
    ),
]
TransportHost = Annotated[
    str | None,
    typer.Option(
        "--transport-host",
        help="Address of this machine that `mooncake` gives to peers; default 127.0.0.1.",
    ),
]
FirstProposalOption = Annotated[
    FirstProposal | None,
    typer.Option(
        "--first-proposal",
        help="Rejection mode: `one_hot` (default) sends nothing for the first round's drafts, "
        "`full` their whole distribution.",
    ),
]
PrefillTimeout = Annotated[
    float | None,
    typer.Option(
        "--prefill-timeout-s", min=0, help="Seconds that a request waits for its KV; default 120."
    ),
]
ReleaseTimeout = Annotated[
    float | None,
    typer.Option(
        "--release-timeout-s",
        min=0,
        help="Seconds for a prefill server to acknowledge that a request was dropped; default 30.",
    ),
]
TransferTimeout = Annotated[
    float | None,
    typer.Option(
        "--transfer-timeout-s", min=0, help="Seconds for the last write of a prompt; default 30."
    ),
]
PeerWait = Annotated[
    float | None,
    typer.Option(
        "--peer-wait-s",
        min=0,
        help="Seconds that a request waits while no prefill server is connected; default 5.",
    ),
]
PeerSilence = Annotated[
    float | None,
    typer.Option(
        "--peer-silence-s",
        min=0.2,
        help="Seconds without a word after which a peer counts as lost; the same on both sides; "
        "default 10.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleFlags:
    """These options as given; None: not given."""

    role: ServeRole | None
    listen: str | None
    peer: str | None
    transport: Transport | None
    transport_host: str | None
    first_proposal: FirstProposal | None
    prefill_timeout_s: float | None
    release_timeout_s: float | None
    transfer_timeout_s: float | None
    peer_wait_s: float | None
    peer_silence_s: float | None


_OF_DECODE = ("peer", "prefill_timeout_s", "release_timeout_s", "peer_wait_s")
_OF_PREFILL = ("listen", "transfer_timeout_s")


def check_role(given: RoleFlags) -> None:
    """Refuse options that the role needs and lacks, and those that would do nothing.

    Raises:
        typer.BadParameter: wrong usage.
    """
    role = "both" if given.role is None else given.role.value
    useless: tuple[str, ...] = ()
    if role == "both":
        useless = tuple(item.name for item in fields(given) if item.name != "role")
    elif role == "prefill":
        useless = _OF_DECODE
    else:
        useless = _OF_PREFILL
    for name in useless:
        if getattr(given, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"has no effect with role {role}", param_hint=option)
    if role == "prefill" and given.listen is None:
        raise typer.BadParameter("a prefill server needs an address", param_hint="--listen")
    if role == "decode" and given.peer is None:
        raise typer.BadParameter("a decode server needs prefill servers", param_hint="--peer")
