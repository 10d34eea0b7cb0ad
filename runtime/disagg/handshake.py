"""What a prefill and a decode process must agree on before a byte of KV travels.

Both send their facts by name; the first that differs is named with both values. Facts that may
differ (stages, ranks, addresses) are carried beside and compared with nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest

PROTOCOL_VERSION = 1

Role = Literal["prefill", "decode"]
CarrierName = Literal["memory", "shared", "nixl", "mooncake"]
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
    """

    protocol: int
    role: Role
    facts: dict[str, str]
    layout: Layout
    transport: str


def shared_facts(
    manifest: Manifest,
    *,
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
        "proposer": proposer,
        "num_speculative_tokens": str(num_speculative_tokens),
        "aux_layer_ids": _text(() if draft is None else draft.aux_layer_ids or ()),
        "target_vocab_size": str(vocabulary.target_vocab_size),
        "draft_vocab_size": str(vocabulary.draft_vocab_size),
        "map_digest": vocabulary.map_digest or "none",
        "verification": verification,
        "first_proposal": first_proposal,
        "slot_state": "; ".join(slot_state) or "none",
        "dtype": dtype,
        "kv_block_size": str(kv_block_size),
        "kv_heads": _text(kv_heads),
    }
    facts |= {f"kernels.{name}": value for name, value in sorted(kernels.items())}
    facts["fingerprint"] = manifest.fingerprint
    return facts


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
