"""What a reader's details of a block draft become in a manifest, and which of them cannot."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.contract.manifest import BlockDraft, CandidateSelector, LocalConvolution

_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def block_facts(details: Mapping[str, object]) -> BlockDraft | None:
    """Return the section of a block draft, None when the details state none of its fields."""
    causal = details.get("causal")
    taps, group, rank, top_k = (_integer(details, name) for name in _DFLASH2)
    facts = BlockDraft(
        is_causal=causal if isinstance(causal, bool) else None,
        convolution=LocalConvolution(kernel_size=taps, group_size=group)
        if taps and group
        else None,
        selector=CandidateSelector(rank=rank, top_k=top_k) if rank and top_k else None,
    )
    return None if facts == BlockDraft() else facts


def foreign_details(algorithm: str, details: Mapping[str, object]) -> tuple[str, ...]:
    """Return the stated fields that change a block draft's forward and no manifest can say."""
    known = {"causal", *(_DFLASH2 if algorithm == "dflash2" else ())}
    return tuple(name for name in details if name not in known)


def _integer(details: Mapping[str, object], name: str) -> int | None:
    value = details.get(name)
    return value if isinstance(value, int) else None
