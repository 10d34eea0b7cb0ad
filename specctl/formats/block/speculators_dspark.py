"""Speculators dspark: a block of slots in one forward, a Markov head, captured boundaries.

Foreign conventions undone: `sample_from_anchor` true means block_size tokens, false block_size - 1
(slot 0 only conditions); early files lack it although they were trained false (SD307), so an absent
field is settled by the token count and never by the class default alone. `block_size` is our
`draft_block_size`. Markov w1 rows are target ids, w2 rows draft ids.
*Source:* Speculators `DSparkSpeculatorConfig` 0.7 to 0.9; DSpark reads q/k-normed Qwen3 layers.
"""

from __future__ import annotations

from typing import Literal

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.manifest import Decoder, Geometry, MarkovHead
from specctl.contract.roles import DSPARK_ROLES
from specctl.draft import DraftCheckpoint, block_geometry
from specctl.formats.assemble import (
    BlockFacts,
    assemble,
    is_whole,
)
from specctl.formats.aux_layers import read_boundary_ids
from specctl.formats.decoder import count_layers, read_draft_stack, report_layer_count
from specctl.formats.eagle.eagle3 import IGNORED_KEYS, VOCABULARY_NAMES, read_target_hidden
from specctl.formats.fields import Fields, Findings, root_fields
from specctl.formats.names import Matched, Name, NameTable, layer_names
from specctl.formats.speculators import (
    GAMMA_PATH,
    layer_fields,
    read_token_count,
)
from specctl.formats.vocabulary import read_vocabulary

NAMES = NameTable(
    names=(
        *VOCABULARY_NAMES,
        Name(role="fc.weight", keys=("fc.weight",)),
        Name(role="hidden_norm", keys=("hidden_norm.weight",)),
        Name(role="norm", keys=("norm.weight",)),
        *layer_names("layers.{i}."),
        Name(role="markov_w1", keys=("markov_head.markov_w1.weight",)),
        Name(role="markov_w2", keys=("markov_head.markov_w2.weight",)),
        Name(role="markov_gate.weight", keys=("markov_head.gate_proj.weight",)),
        Name(role="markov_gate.bias", keys=("markov_head.gate_proj.bias",)),
        Name(role="markov_joint.weight", keys=("markov_head.joint_proj.weight",)),
        Name(role="markov_joint.bias", keys=("markov_head.joint_proj.bias",)),
        Name(role="confidence.weight", keys=("confidence_head.proj.weight",)),
        Name(role="confidence.bias", keys=("confidence_head.proj.bias",)),
    ),
    ignored=IGNORED_KEYS,
)


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, Findings())
    layers, family = layer_fields(root, absent_model_type="qwen3")
    tokens = read_token_count(root, "dspark")
    matched = NAMES.match(checkpoint.tensors, root.findings)
    block = _read_block(root, matched, tokens)
    aux = read_boundary_ids(root, "aux_hidden_state_layer_ids", has_default=False)
    num_layers = count_layers(matched.tensors)
    if family is not None and is_whole(checkpoint):
        report_layer_count(layers, num_layers)
    decoder = read_draft_stack(
        checkpoint,
        NAMES,
        DSPARK_ROLES,
        matched=matched,
        layers=layers,
        family=family,
        num_layers=num_layers,
        num_aux_states=aux.num_states or 0,
        head_conditions=_head_conditions(block),
    )
    _refuse_causal_exception(root, decoder)
    return assemble(
        checkpoint,
        format="speculators-dspark",
        algorithm="dspark",
        roles=DSPARK_ROLES,
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=read_target_hidden(root, layers),
        target_num_layers=None,
        aux=aux,
        vocabulary=read_vocabulary(checkpoint, matched, root=root, layers=layers),
        num_speculative_tokens=tokens,
        geometry=_geometry(root, block, tokens),
        block=block,
    )


def _head_conditions(block: BlockFacts) -> frozenset[str]:
    words: set[str] = set()
    if block.markov is not None:
        words |= {"markov", f"markov_{block.markov.kind}"}
    if block.has_confidence_head:
        words.add("confidence")
    return frozenset(words)


def _read_block(root: Fields, matched: Matched, tokens: int | None) -> BlockFacts:
    size = root.integer("block_size", "geometry.draft_block_size", is_required=True)
    mask = root.integer("mask_token_id", "draft.mask_token_id", minimum=0)
    if mask is None and not root.has("mask_token_id"):
        root.findings.add(
            "SD314",
            where=root.where("mask_token_id"),
            message="`mask_token_id` is absent; the slots after the anchor have no input",
            expected="a target id",
            found="nothing",
        )
    markov = _markov(root, matched)
    has_confidence = _confidence(root, matched)
    with_markov = root.flag("confidence_head_with_markov", "draft.is_confidence_with_markov")
    if with_markov is None:
        path, rule = "draft.is_confidence_with_markov", "true when there is a Markov head"
        root.findings.derived(path, root.where("confidence_head_with_markov"), rule)
        with_markov = has_confidence and markov is not None
    if has_confidence and with_markov and markov is None:
        root.findings.add(
            "SD313",
            where=root.where("confidence_head_with_markov"),
            message="`confidence_head_with_markov` is true and `markov_rank` is 0",
            expected="false, or a Markov head",
            found="true",
        )
    return BlockFacts(
        mask_token_id=mask,
        markov=markov,
        has_confidence_head=has_confidence,
        is_confidence_with_markov=with_markov,
        sample_from_anchor=_anchor(root, size, tokens),
        draft_block_size=size,
    )


def _anchor(root: Fields, size: int | None, tokens: int | None) -> bool | None:
    key, path = "sample_from_anchor", "geometry.sample_from_anchor"
    stated = root.flag(key, path)
    if stated is not None or root.has(key) or size is None:
        return stated
    if tokens == size:
        rule = "class default true, and the token count equals the block"
        root.findings.derived(path, root.where(key), rule)
        return True
    inferred = False if tokens == size - 1 else None
    root.findings.add(
        "SD307",
        where=root.where(key),
        message=f"`sample_from_anchor` is absent; {tokens} tokens from a block of {size} "
        + ("mean a conditioning anchor" if inferred is False else "decide nothing"),
        expected="true or false",
        found="nothing" if inferred is None else "nothing, read as false",
        severity="error" if inferred is None else "warning",
    )
    if inferred is False:
        root.findings.derived(path, root.where(key), "token count is block_size - 1")
    return inferred


def _geometry(root: Fields, block: BlockFacts, tokens: int | None) -> Geometry | None:
    size, anchor = block.draft_block_size, block.sample_from_anchor
    if size is None or anchor is None:
        return None
    available = size if anchor else size - 1
    if available < 1:
        _report_width(root, size, anchor, available, tokens, is_error=True)
        return None
    if tokens is None:
        rule = "block_size with a sampled anchor, else block_size - 1"
        root.findings.derived(GAMMA_PATH, root.where("block_size"), rule)
    elif tokens != available:
        # One token off is the other anchor convention; fewer are a shorter chain, which is legal.
        is_error = tokens > available or tokens == size - 1
        _report_width(root, size, anchor, available, tokens, is_error=is_error)
    return block_geometry(
        draft_block_size=size, sample_from_anchor=anchor, num_speculative_tokens=tokens
    )


def _report_width(
    root: Fields, size: int, anchor: bool, available: int, tokens: int | None, *, is_error: bool
) -> None:
    anchor_text = "true" if anchor else "false"
    root.findings.add(
        "SD302",
        where=root.where("speculators_config/proposal_methods"),
        message=f"`sample_from_anchor` is {anchor_text} but the config promises {tokens} tokens "
        f"from a block of {size}",
        expected=f"{available} ({'block_size' if anchor else 'block_size - 1'})",
        found=tokens,
        severity="error" if is_error else "warning",
    )


def _markov(root: Fields, matched: Matched) -> MarkovHead | None:
    path = "draft.markov"
    first = matched.tensors.get("markov_w1")
    rank = root.integer("markov_rank", path, minimum=0)
    if rank is None:
        if root.has("markov_rank") or first is None or len(first.shape) != 2:
            return None
        rank = first.shape[1]
        root.findings.derived(path, tensor_place(first), "columns of markov_w1")
    elif rank == 0 and first is not None:
        _report_unflagged(root, matched, "markov_w1", "markov_rank", "above 0")
    kind = _markov_kind(root)
    return None if kind is None or rank < 1 else MarkovHead(rank=rank, kind=kind)


def _markov_kind(root: Fields) -> Literal["vanilla", "gated", "rnn"] | None:
    kind = root.text("markov_head_type")
    if kind is None or kind == "vanilla":
        return "vanilla"
    if kind == "gated":
        return "gated"
    if kind == "rnn":
        return "rnn"
    root.findings.add(
        "SD207",
        where=root.where("markov_head_type"),
        message=f"`markov_head_type` is `{kind}`",
        expected="vanilla, gated or rnn",
        found=kind,
    )
    return None


def _confidence(root: Fields, matched: Matched) -> bool:
    key, path = "enable_confidence_head", "draft.has_confidence_head"
    stated = root.flag(key, path)
    is_stored = "confidence.weight" in matched.tensors
    if stated is None:
        root.findings.derived(path, root.where(key), "the tensors are stored")
        return is_stored
    if is_stored and not stated:
        _report_unflagged(root, matched, "confidence.weight", key, "true")
    return stated


def _report_unflagged(root: Fields, matched: Matched, role: str, key: str, expected: str) -> None:
    ref = matched.tensors[role]
    root.findings.add(
        "SD506",
        where=tensor_place(ref),
        message=f"`{ref.key}` is stored and `{key}` is {root.raw(key)}",
        expected=f"`{key}`: {expected}",
        found=root.raw(key),
    )


def _refuse_causal_exception(root: Fields, decoder: Decoder | None) -> None:
    key = "sliding_window_non_causal"
    if root.flag(key) and decoder is not None and decoder.sliding_window is not None:
        root.findings.add(
            "SD205",
            where=root.where(key),
            message=f"`{key}` with sliding layers is not supported",
            expected="false",
            found="true",
        )
