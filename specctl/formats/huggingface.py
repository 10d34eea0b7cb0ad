"""A Hugging Face target: dense llama, mistral, qwen2 and qwen3 whole, every other one in outline.

Other architectures give SD203, a note, and still list layer count, embedding and head. The
embedding is found among all spellings, never in a layer or draft part (SD504). A tied head is the
embedding; a stored copy of it is not used (SD507). Bundled prediction layers are not part of the
target (SD507); what the config promises of them is held against the files (SD240, SD327).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from specctl.checkpoint import Checkpoint, TensorEntry, tensor_place
from specctl.contract.file_names import CONFIG
from specctl.contract.findings import Findings
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
from specctl.formats.embedding import Located, is_decoy_part, locate
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.model_types import (
    ARCHITECTURES,
    Family,
    defaults_rule,
    flat_defaults,
)
from specctl.formats.mtp.bundled import report_bundled
from specctl.formats.mtp.config import text_fields
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
_ANY_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,5})\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """What depends on whether the architecture is supported."""

    decoder: Decoder | None
    tensors: Mapping[str, TensorRef]
    unmapped: tuple[str, ...]
    num_layers: int | None


def read(checkpoint: Checkpoint, bundled: str | None = None) -> TargetCheckpoint:
    """Return the target; every defect is in its diagnostics.

    Args:
        checkpoint: the opened files.
        bundled: format of the prediction layers inside, as `Detection.bundled` names it.
    """
    findings = ReaderFindings()
    root = root_fields(checkpoint.config, findings)
    report_remote_code(root)
    architectures = root.texts("architectures")
    architecture = architectures[0] if architectures else ""
    family = ARCHITECTURES.get(architecture)
    text = root
    if family is None:
        _report_architecture(root, architecture)
        text = text_fields(root)
    else:
        text = root.with_defaults(flat_defaults(family), defaults_rule(family))
    located = locate(checkpoint)
    # SD418 is also a finding on the files as a whole (checks.files), which reports it for drafts.
    findings.extend(d for d in located.diagnostics if d.code != "SD418")
    is_tied = located.is_tied if family is None else bool(_flag(text))
    own = report_bundled(checkpoint, bundled, root, text)
    stack = (
        _other_stack(checkpoint, text, located, own)
        if family is None
        else _dense_stack(checkpoint, text, family, located, own, is_tied=bool(is_tied))
    )
    return _whole(checkpoint, architecture, text, located, stack, is_tied=is_tied)


def _flag(text: Fields) -> bool | None:
    return text.flag("tie_word_embeddings")


def _whole(
    checkpoint: Checkpoint,
    architecture: str,
    text: Fields,
    located: Located,
    stack: _Stack,
    *,
    is_tied: bool | None,
) -> TargetCheckpoint:
    findings = text.findings
    tokenizer = read_tokenizer(checkpoint, findings)
    declared = text.integer("vocab_size")
    vocab_size, embedding = declared, located.embedding
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
        head=embedding if is_tied else located.stored_head,
        is_head_tied=is_tied,
        head_rule=located.rule,
        decoys=located.decoys,
        tensors=MappingProxyType(dict(stack.tensors)),
        unmapped=stack.unmapped,
        files=checkpoint.files,
        origins=MappingProxyType(dict(findings.origins)),
        # What the runtime does not run is no fault of a target; `specctl manifest` refuses it.
        diagnostics=tuple(
            msgspec.structs.replace(d, severity="info") if d.code == "SD203" else d
            for d in findings.result()
        ),
    )


def _dense_stack(
    checkpoint: Checkpoint,
    root: Fields,
    family: Family,
    located: Located,
    bundled: Collection[str],
    *,
    is_tied: bool,
) -> _Stack:
    findings = root.findings
    _report_other_parts(checkpoint.tensors, located, bundled, findings)
    gone = {ref.key for ref in located.decoys}.union(bundled)
    tensors = checkpoint.tensors
    if gone:
        tensors = {key: entry for key, entry in tensors.items() if key not in gone}
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


def _other_stack(
    checkpoint: Checkpoint, text: Fields, located: Located, bundled: Collection[str]
) -> _Stack:
    findings = text.findings
    tensors = {}
    if located.embedding is not None:
        tensors["embedding"] = located.embedding
    if located.stored_head is not None:
        tensors["head"] = located.stored_head
    _report_other_parts(checkpoint.tensors, located, bundled, findings)
    if located.is_tied is False and located.stored_head is None and is_whole(checkpoint):
        _report_no_head(checkpoint, located, findings)
    stated = text.integer("num_hidden_layers")
    return _Stack(
        decoder=None,
        tensors=tensors,
        unmapped=(),
        num_layers=stated or _counted_layers(checkpoint.tensors, bundled),
    )


def _report_no_head(checkpoint: Checkpoint, located: Located, findings: Findings) -> None:
    findings.add(
        "SD501",
        severity="warning",
        where=f"{main_file(checkpoint)}::lm_head.weight",
        message="no output head is stored, and the config says that it is not the embedding",
        expected="`lm_head.weight`, or `tie_word_embeddings`: true",
        found=f"nothing ({located.rule})",
    )


def _counted_layers(keys: Iterable[str], bundled: Collection[str]) -> int | None:
    indexes = [
        int(found[1])
        for key in keys
        if key not in bundled and (found := _ANY_LAYER.search(key)) and not is_decoy_part(key)
    ]
    return max(indexes, default=-1) + 1 or None


def _report_other_parts(
    tensors: Mapping[str, TensorEntry],
    located: Located,
    bundled: Collection[str],
    findings: Findings,
) -> None:
    decoys = {ref.key for ref in located.decoys}
    for key in sorted(decoys):
        _report_decoy(tensors[key], findings)
    own = sorted(key for key in bundled if key not in decoys)
    if own:
        findings.add(
            "SD507",
            where=tensors[own[0]].describe(),
            message=f"{len(own)} tensors are bundled prediction layers, not the target's",
        )


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
        message=f"the runtime of this version does not run targets of architecture "
        f"`{architecture or 'unstated'}`; embedding, head and bundled layers are listed",
        expected=", ".join(ARCHITECTURES),
        found=architecture or "nothing",
        help="Nothing to do for inspect, validate and convert; serve it with another engine",
    )
