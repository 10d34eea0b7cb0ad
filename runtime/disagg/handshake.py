"""What a prefill and a decode process must agree on before a byte of KV travels.

Both send their facts by name; the first that differs is named with both values. Facts that may
differ (stages, ranks, addresses) are carried beside and compared with nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest

PROTOCOL_VERSION = 3
RANK_FACTS = frozenset({"target", "dtype", "kv_block_size", "fingerprint", "peer_silence_s"})
"""What every rank knows, with or without a draft, beside its kernels."""

Role = Literal["prefill", "decode"]
CarrierName = Literal["memory", "shared", "nixl", "mooncake"]
FirstProposal = Literal["one_hot", "full"]
"""What stands for the law of a first round's drafts: certainty, or the law itself."""
_UNSTATED = "not stated"


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a side splits target layers and heads; see `runtime.disagg.reshard`."""

    stage_layers: tuple[int, ...]
    tensor_parallel: int
    is_draft_split: bool = True


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first frame of each side.

    Args:
        facts: name -> value, compared in order; one list for both roles.
        layout: may differ.
        transport: name of what carries KV; the sides must name the same one.
        server: name of the server whose process this is, another one at each start.
        session: of the decode side: the attempt to connect that this greeting belongs to; the
            greetings to all ranks of a prefill server have the same one.
        rank: world rank of the process that speaks.
        ranks: of rank 0: `host:port` of the other ranks that write KV, in their order.
    """

    protocol: int
    role: Role
    facts: dict[str, str]
    layout: Layout
    transport: str
    server: str = ""
    session: str = ""
    rank: int = 0
    ranks: tuple[str, ...] = ()


def shared_facts(
    manifest: Manifest,
    *,
    weights: str,
    dtype: str,
    kv_block_size: int,
    kv_heads: tuple[int, ...],
    proposer: str,
    num_speculative_tokens: int,
    verification: str,
    first_proposal: str,
    slot_state: tuple[str, ...],
    kernels: dict[str, str],
) -> dict[str, str]:
    """Return the facts of one side, in the order in which they are compared.

    Args:
        manifest: what is served; named parts come before its fingerprint, so that a difference is
            told by name and not by digest.
        weights: digest of samples of the weights, which no fact of the manifest tells apart.
        dtype: of weights and KV.
        kv_block_size: tokens of a block.
        kv_heads: KV heads of each target layer, then of each draft layer.
        proposer: who drafts; both sides make the draft's KV.
        num_speculative_tokens: drafts per round.
        verification: mode of sampled requests.
        first_proposal: what stands for the first round's draft probabilities.
        slot_state: tensors that the proposer keeps of a request, each `name[shape] dtype`.
        kernels: what makes bits: digest of the kernel table, Triton version, GPU architecture.
    """
    draft, vocabulary = manifest.draft, manifest.vocabulary
    facts = {
        "target": manifest.target.config_digest,
        "draft": "none" if draft is None else draft.algorithm,
        "dtype": dtype,
        "proposer": proposer,
        "num_speculative_tokens": str(num_speculative_tokens),
        "aux_layer_ids": _text(() if draft is None else draft.aux_layer_ids or ()),
        "target_vocab_size": str(vocabulary.target_vocab_size),
        "draft_vocab_size": str(vocabulary.draft_vocab_size),
        "map_digest": vocabulary.map_digest or "none",
        "verification": verification,
        "first_proposal": first_proposal,
        "slot_state": "; ".join(slot_state) or "none",
        "kv_block_size": str(kv_block_size),
        "kv_heads": _text(kv_heads),
    }
    facts |= {f"kernels.{name}": value for name, value in sorted(kernels.items())}
    return facts | {"fingerprint": manifest.fingerprint, "weights": weights}


def rank_facts(facts: dict[str, str]) -> dict[str, str]:
    """Return the facts that a rank without a draft knows as well."""

    def is_known(name: str) -> bool:
        return name in RANK_FACTS or name.startswith("kernels.")

    return {name: value for name, value in facts.items() if is_known(name)}


def of_rank(hello: Hello, rank: int) -> Hello:
    """Return what a decode server says to another rank than the first."""
    return msgspec.structs.replace(hello, rank=rank, facts=rank_facts(hello.facts))


def compare_ranks(first: Hello, other: Hello, rank: int) -> None:
    """Refuse a process that is not rank `rank` of the server whose first rank greeted.

    Raises:
        DiagnosticError: SD870.
    """
    for name, expected, found in (
        ("server", first.server, other.server),
        ("rank", str(rank), str(other.rank)),
        ("layout", str(first.layout), str(other.layout)),
    ):
        if expected != found:
            raise DiagnosticError(
                diagnose(
                    "SD870",
                    where=f"handshake, rank {rank}, {name}",
                    message=f"what answers as rank {rank} of a prefill server is something else",
                    expected=expected,
                    found=found,
                )
            )


def compare(ours: Hello, theirs: Hello) -> None:
    """Refuse a peer that would compute other bits.

    Raises:
        DiagnosticError: SD860, naming the first thing that differs, with both values, and all that
            either side said in its notes.
    """
    if ours.role == theirs.role:
        raise DiagnosticError(_differs("role", ours, theirs))
    mine, other = _everything(ours), _everything(theirs)
    for name in [*mine, *(name for name in other if name not in mine)]:
        if mine.get(name, _UNSTATED) != other.get(name, _UNSTATED):
            raise DiagnosticError(_differs(name, ours, theirs))


def _differs(name: str, ours: Hello, theirs: Hello) -> Diagnostic:
    mine, other = _everything(ours), _everything(theirs)
    expected = ours.role if name == "role" else mine.get(name, _UNSTATED)
    found = theirs.role if name == "role" else other.get(name, _UNSTATED)
    return diagnose(
        "SD860",
        where=f"handshake, {name}",
        message=f"this side has `{name}` {expected}, the {theirs.role} peer has {found}",
        expected=expected,
        found=found,
        notes=(_line("this side", ours.role, mine), _line("the peer", theirs.role, other)),
    )


def _everything(hello: Hello) -> dict[str, str]:
    """Return what is compared, in order."""
    return {"protocol": str(hello.protocol), "transport": hello.transport} | hello.facts


def _line(side: str, role: Role, values: dict[str, str]) -> str:
    return f"{side} ({role}): " + ", ".join(f"{name}={value}" for name, value in values.items())


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or "none"
