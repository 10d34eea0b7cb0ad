"""What each dialect of block drafts cannot hold, found before anything is written.

Invariants: a loss that a user may accept is SD601 and has a name; everything that would make the
file describe another draft is SD602.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specctl.checkpoint import tensor_place
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import Decoder
from specctl.contract.roles import generic_role
from specctl.draft import DraftCheckpoint
from specctl.formats.writing import speculators_problems
from specctl.formats.written import WriteRequest, lost, unable

_FOREIGN_ROLES = {
    "fc_norm.{i}": "a norm for each captured state",
    "layers.{i}.attention_sink": "attention sinks",
}
_FOREIGN_DETAILS = {
    "attention_sink_bias": "attention sinks",
    "final_logit_softcapping": "a soft cap on the logits",
    "input_embedding_scale": "a scale of the embedding",
    "mask_file": "the mask token's vector in a file of its own",
    "output_multiplier": "a scale of the logits",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What every block dialect states, all of it known."""

    decoder: Decoder
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int | None
    sample_from_anchor: bool
    draft_block_size: int
    num_speculative_tokens: int


def settled_facts(draft: DraftCheckpoint) -> Facts | None:
    """Return the facts, None while one is open; `_open_facts` says which."""
    if (
        draft.decoder is None
        or draft.aux_layer_ids is None
        or draft.sample_from_anchor is None
        or draft.draft_block_size is None
        or draft.geometry is None
        or (draft.mask_token_id is None and "mask_file" not in draft.details)
    ):
        return None
    return Facts(
        decoder=draft.decoder,
        aux_layer_ids=draft.aux_layer_ids,
        mask_token_id=draft.mask_token_id,
        sample_from_anchor=draft.sample_from_anchor,
        draft_block_size=draft.draft_block_size,
        num_speculative_tokens=draft.geometry.num_speculative_tokens,
    )


def check_speculators(request: WriteRequest) -> Iterator[Diagnostic]:
    """Yield SD602 for what the Speculators classes of this family cannot hold."""
    draft = request.draft
    yield from _open_facts(draft)
    yield from _token_count(draft)
    yield from speculators_problems(request)
    said = set[str]()
    for role, ref in draft.tensors.items():
        what = _FOREIGN_ROLES.get(generic_role(role)[0])
        if what is not None and what not in said:
            said.add(what)
            yield unable(
                where=tensor_place(ref),
                message=f"the Speculators classes have no form for {what}",
                found=ref.key,
            )
    for key, what in _FOREIGN_DETAILS.items():
        if key in draft.details and what not in said:
            yield unable(
                where=f"{CONFIG}#/{key}",
                message=f"the Speculators classes have no form for {what}",
                found=draft.details[key],
            )
    if draft.details.get("causal") is True:
        yield unable(
            where=f"{CONFIG}#/causal",
            message="full layers are open inside the block in the Speculators classes",
            expected="false, or no such field",
            found="true",
        )
    if draft.target_hidden_size != draft.hidden_size:
        yield unable(
            where=f"{CONFIG}#/target_hidden_size",
            message="the Speculators classes size `fc` by the draft's own width",
            expected=draft.hidden_size,
            found=draft.target_hidden_size,
        )


def _token_count(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD602 for one token less than a sampled block has: it means an unsampled slot 0."""
    size, geometry = draft.draft_block_size, draft.geometry
    if size is None or geometry is None or not draft.sample_from_anchor:
        return
    if geometry.num_speculative_tokens == size - 1:
        yield unable(
            where=f"{CONFIG}#/speculators_config/proposal_methods",
            message=f"{size - 1} tokens from a block of {size} mean an unsampled slot 0 in a "
            "Speculators config",
            expected=f"{size} tokens, or fewer than {size - 1}",
            found=size - 1,
        )


def check_zlab(request: WriteRequest, format: str) -> Iterator[Diagnostic]:
    """Yield what z-lab's classes cannot hold: SD601 and SD602."""
    draft = request.draft
    yield from check_flat(request, format, is_anchor_sampled=False)
    if draft.map_kind != "identity":
        yield unable(
            where=f"{CONFIG}#/draft_vocab_size",
            message=f"z-lab's layout has no reduced vocabulary; this draft has "
            f"{draft.draft_vocab_size} of {draft.target_vocab_size} ids",
            expected=draft.target_vocab_size,
            found=draft.draft_vocab_size,
        )
    layers = None if request.target is None else request.target.num_layers
    if layers is None and draft.target_num_layers is None:
        yield unable(
            where=f"{CONFIG}#/num_target_layers",
            message="z-lab's class needs the target's layer count, which is not known here",
            expected="--target TARGET",
            found="nothing",
        )
    for role in ("embedding", "head"):
        ref = draft.tensors.get(role)
        if ref is not None and draft.map_kind == "identity":
            yield lost(
                role,
                where=tensor_place(ref),
                message=f"`{ref.key}` has no place in z-lab's layout",
                found=ref.key,
            )


def check_flat(
    request: WriteRequest, format: str, *, is_anchor_sampled: bool | None
) -> Iterator[Diagnostic]:
    """Yield what a flat dialect cannot hold: SD601 `token-count`, SD602.

    Args:
        request: what is written.
        format: dialect that is written; its own files may state another anchor than its rule.
        is_anchor_sampled: what slot 0 is in the dialect, None when it has a field for it.
    """
    draft = request.draft
    yield from _open_facts(draft)
    anchor = draft.sample_from_anchor
    if is_anchor_sampled is None:
        if draft.markov is None and not draft.has_confidence_head:
            yield unable(
                where=f"{CONFIG}#/markov_rank",
                message="without a Markov head or a confidence head nothing tells the dialect",
                expected="one of the heads",
                found="neither",
            )
    elif anchor is not None and anchor != is_anchor_sampled and draft.format != format:
        meaning = "is a prediction" if is_anchor_sampled else "only conditions"
        yield unable(
            where=f"{CONFIG}#/sample_from_anchor",
            message=f"slot 0 {meaning} in this dialect, and not in this draft",
            expected="true" if is_anchor_sampled else "false",
            found="true" if anchor else "false",
        )
    if anchor is None or draft.draft_block_size is None or draft.geometry is None:
        return
    available = draft.draft_block_size if anchor else draft.draft_block_size - 1
    if draft.geometry.num_speculative_tokens != available:
        yield lost(
            "token-count",
            where=f"{CONFIG}#/speculators_config",
            message=f"{draft.geometry.num_speculative_tokens} tokens from a block that offers "
            f"{available}",
            found=draft.geometry.num_speculative_tokens,
        )


def _open_facts(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    facts = (
        ("block_size", draft.draft_block_size),
        ("sample_from_anchor", draft.sample_from_anchor),
        ("target_layer_ids", draft.aux_layer_ids),
        ("mask_token_id", draft.details.get("mask_file", draft.mask_token_id)),
    )
    if draft.decoder is None:
        yield unable(
            where=CONFIG,
            message="the layers are of a kind that this dialect does not hold",
            expected="dense Qwen3 layers",
            found=draft.architecture or "unknown",
        )
    for key, value in facts:
        if value is None:
            yield unable(
                where=f"{CONFIG}#/{key}",
                message=f"`{key}` is open; every file of this dialect states it",
                expected=f"`{key}`",
                found="nothing",
            )
