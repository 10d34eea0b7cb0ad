"""A plain Hugging Face target: dense llama, mistral, qwen2 and qwen3.

Other architectures give SD203 and still list layer count, embedding and head. The embedding is
found among all spellings, never in a layer or draft part (SD504). A tied head is the embedding; a
stored copy of it is not used (SD507). A bundled MTP layer is not part of the target (SD507).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specctl.checkpoint import Checkpoint, TensorEntry, tensor_place
from specctl.contract.manifest import Decoder, TensorRef
from specctl.contract.roles import TARGET_ROLES, generic_role
from specctl.draft import TargetCheckpoint
from specctl.formats.assemble import is_whole, main_dtype, main_file, report_remote_code
from specctl.formats.decoder import (
    MAX_LAYERS,
    count_layers,
    layer_conditions,
    read_decoder,
    report_layer_count,
)
from specctl.formats.embedding import find_decoys, find_embedding, find_head
from specctl.formats.fields import CONFIG, Fields, Findings, root_fields
from specctl.formats.model_types import (
    ARCHITECTURES,
    Family,
    defaults_rule,
    flat_defaults,
)
from specctl.formats.mtp.deepseek import layer_indexes
from specctl.formats.names import ROTARY_BUFFER, Matched, Name, NameTable, layer_names
from specctl.formats.tokenizer import read_tokenizer

NAMES = NameTable(
    names=(
        Name(role="embedding", keys=("model.embed_tokens.weight",)),
        Name(role="norm", keys=("model.norm.weight",)),
        Name(role="head", keys=("lm_head.weight",)),
        *layer_names("model.layers.{i}."),
    ),
    ignored=(ROTARY_BUFFER,),
)
_ANY_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """What depends on whether the architecture is supported."""

    decoder: Decoder | None
    tensors: Mapping[str, TensorRef]
    unmapped: tuple[str, ...]
    num_layers: int | None


def read(checkpoint: Checkpoint) -> TargetCheckpoint:
    """Return the target; every defect is in its diagnostics."""
    findings = Findings()
    root = root_fields(checkpoint.config, findings)
    report_remote_code(root)
    architectures = root.texts("architectures")
    architecture = architectures[0] if architectures else ""
    family = ARCHITECTURES.get(architecture)
    text = root
    if family is None:
        _report_architecture(root, architecture)
        text = root.section("text_config") or root
    else:
        text = root.with_defaults(flat_defaults(family), defaults_rule(family))
    is_tied = _is_tied(root, text)
    embedding = find_embedding(checkpoint.tensors, findings)
    stored_head = find_head(checkpoint.tensors, findings)
    stack = (
        _other_stack(checkpoint, text)
        if family is None
        else _dense_stack(checkpoint, text, family, is_tied=is_tied)
    )
    tokenizer = read_tokenizer(checkpoint, findings)
    declared = text.integer("vocab_size")
    vocab_size = declared
    if embedding is not None and embedding.shape:
        vocab_size = embedding.shape[0]
        findings.derived("target.vocab_size", tensor_place(embedding), "rows of the embedding")
    findings.read("target", CONFIG)
    findings.derived("target.dtype", "tensor headers", "dtype that most weight bytes have")
    findings.derived("target.is_head_tied", text.where("tie_word_embeddings"), "config flag")
    return TargetCheckpoint(
        root=checkpoint.root,
        format="huggingface",
        architecture=architecture,
        config_digest=checkpoint.config_digest,
        dtype=main_dtype(stack.tensors),
        decoder=stack.decoder,
        hidden_size=text.integer("hidden_size"),
        num_layers=stack.num_layers,
        vocab_size=vocab_size,
        declared_vocab_size=declared,
        tokenizer_size=tokenizer.size,
        tokenizer_digest=tokenizer.digest,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        embedding=embedding,
        head=embedding if is_tied else stored_head,
        is_head_tied=is_tied,
        tensors=MappingProxyType(dict(stack.tensors)),
        unmapped=stack.unmapped,
        files=checkpoint.files,
        origins=MappingProxyType(dict(findings.origins)),
        diagnostics=tuple(findings.diagnostics),
    )


def _dense_stack(checkpoint: Checkpoint, root: Fields, family: Family, *, is_tied: bool) -> _Stack:
    findings = root.findings
    tensors = _without_other_parts(checkpoint.tensors, findings)
    matched = _without_tied_copy(NAMES.match(tensors, findings), findings, is_tied=is_tied)
    stored = count_layers(matched.tensors)
    stated = root.integer("num_hidden_layers", maximum=MAX_LAYERS, is_required=True)
    num_layers = stated or stored  # unlike a draft's, a target's config says what is built
    if stored > num_layers:
        report_layer_count(root, stored)
        matched = _without_layers(matched, num_layers)
    conditions = layer_conditions(matched.tensors, root, family)
    if is_whole(checkpoint):
        NAMES.report_missing(
            TARGET_ROLES,
            matched,
            findings,
            conditions=conditions if is_tied else conditions | {"untied_head"},
            num_layers=num_layers,
            num_aux_states=0,
            file=main_file(checkpoint),
        )
    decoder = read_decoder(
        root,
        family=family,
        tensors=matched.tensors,
        conditions=conditions,
        num_layers=num_layers,
        path="target.decoder",
    )
    findings.read("target.decoder.num_layers", root.where("num_hidden_layers"))
    return _Stack(
        decoder=decoder,
        tensors=matched.tensors,
        unmapped=matched.unmapped,
        num_layers=num_layers or None,
    )


def _without_layers(matched: Matched, num_layers: int) -> Matched:
    extra = {
        role: ref
        for role, ref in matched.tensors.items()
        for name, index in [generic_role(role)]
        if name.startswith("layers.") and index is not None and index >= num_layers
    }
    return Matched(
        tensors={role: ref for role, ref in matched.tensors.items() if role not in extra},
        unmapped=tuple(sorted((*matched.unmapped, *(ref.key for ref in extra.values())))),
    )


def _other_stack(checkpoint: Checkpoint, text: Fields) -> _Stack:
    findings = text.findings
    for entry in find_decoys(checkpoint.tensors):
        _report_decoy(entry, findings)
    tensors = {}
    embedding = find_embedding(checkpoint.tensors, None)
    head = find_head(checkpoint.tensors, None)
    if embedding is not None:
        tensors["embedding"] = embedding
    if head is not None:
        tensors["head"] = head
    indexes = [int(match[1]) for key in checkpoint.tensors if (match := _ANY_LAYER.search(key))]
    stated = text.integer("num_hidden_layers")
    return _Stack(
        decoder=None,
        tensors=tensors,
        unmapped=(),
        num_layers=stated or max(indexes, default=-1) + 1 or None,
    )


def _without_other_parts(
    tensors: Mapping[str, TensorEntry], findings: Findings
) -> Mapping[str, TensorEntry]:
    decoys = {entry.key for entry in find_decoys(tensors)}
    for key in sorted(decoys):
        _report_decoy(tensors[key], findings)
    bundled = tuple(f"model.layers.{index}." for index in layer_indexes(tensors))
    rest = {key: entry for key, entry in tensors.items() if key not in decoys}
    for prefix in bundled:
        own = sorted(key for key in rest if key.startswith(prefix))
        findings.add(
            "SD507",
            where=rest[own[0]].describe(),
            message=f"{len(own)} tensors of `{prefix}` are a bundled MTP layer, not the target's",
        )
        rest = {key: entry for key, entry in rest.items() if not key.startswith(prefix)}
    return rest


def _without_tied_copy(matched: Matched, findings: Findings, *, is_tied: bool) -> Matched:
    head = matched.tensors.get("head")
    if head is None or not is_tied:
        return matched
    findings.add(
        "SD507",
        where=tensor_place(head),
        message="not used: `tie_word_embeddings` is true, so the embedding is the head",
    )
    kept = {role: ref for role, ref in matched.tensors.items() if role != "head"}
    return Matched(tensors=kept, unmapped=matched.unmapped)


def _report_decoy(entry: TensorEntry, findings: Findings) -> None:
    findings.add(
        "SD504",
        where=entry.describe(),
        message=f"`{entry.key}` is a copy inside a layer or draft part; it was passed over",
    )


def _report_architecture(root: Fields, architecture: str) -> None:
    root.findings.add(
        "SD203",
        where=root.where("architectures"),
        message=f"targets of architecture `{architecture or 'unstated'}` are not supported; "
        "embedding and head are listed only",
        expected=", ".join(ARCHITECTURES),
        found=architecture or "nothing",
    )


def _is_tied(root: Fields, text: Fields) -> bool:
    # The root's flag wins where a multimodal config states it twice, as in transformers.
    source = root if root.has("tie_word_embeddings") else text
    return bool(source.flag("tie_word_embeddings"))
