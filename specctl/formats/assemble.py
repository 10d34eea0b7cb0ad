"""Put the parts that a dialect's reader found together into a `DraftCheckpoint`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specctl.checkpoint import Checkpoint
from specctl.checkpoint.config_sections import named_target
from specctl.contract.diagnostics import has_errors
from specctl.contract.file_names import CONFIG, SINGLE
from specctl.contract.manifest import Decoder, Geometry, MarkovHead, TensorRef
from specctl.contract.roles import TensorRole
from specctl.draft import Algorithm, DraftCheckpoint
from specctl.formats.aux_layers import AuxFacts
from specctl.formats.fields import Fields, ReaderFindings
from specctl.formats.names import Matched
from specctl.formats.tokenizer import read_ids
from specctl.formats.vocabulary import VocabularyFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class NormFlags:
    """EAGLE-3's variants; all false for other algorithms. Fields as in `DraftCheckpoint`."""

    has_fc_bias: bool = False
    has_norm_before_residual: bool = False
    has_norm_before_fc: bool = False
    has_fc_norm: bool = False
    has_norm_output: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """What only block drafts have; the defaults are a chain's. Fields as in `DraftCheckpoint`."""

    mask_token_id: int | None = None
    markov: MarkovHead | None = None
    has_confidence_head: bool = False
    is_confidence_with_markov: bool = False
    sample_from_anchor: bool | None = None
    draft_block_size: int | None = None


NO_FLAGS = NormFlags()
NO_BLOCK = BlockFacts()
NO_SIZES: Mapping[str, int] = MappingProxyType({})
NO_DETAILS: Mapping[str, object] = MappingProxyType({})


def assemble(
    checkpoint: Checkpoint,
    *,
    format: str,
    algorithm: Algorithm,
    roles: tuple[TensorRole, ...],
    root: Fields,
    layers: Fields,
    matched: Matched,
    decoder: Decoder | None,
    target_hidden_size: int | None,
    target_num_layers: int | None,
    aux: AuxFacts,
    vocabulary: VocabularyFacts,
    num_speculative_tokens: int | None,
    geometry: Geometry | None,
    flags: NormFlags = NO_FLAGS,
    block: BlockFacts = NO_BLOCK,
    sizes: Mapping[str, int] = NO_SIZES,
    details: Mapping[str, object] = NO_DETAILS,
) -> DraftCheckpoint:
    """Return the normalized draft; its findings are those of `root`.

    `sizes` and `details` are what the other arguments do not say; see `DraftCheckpoint`. Every
    config field that is needed must have been read before this call: the rest is SD211.
    """
    findings = root.findings
    report_remote_code(root)
    architectures = root.texts("architectures")
    hidden_size = layers.integer("hidden_size")
    begin = read_ids(layers.raw("bos_token_id"), layers.where("bos_token_id"), findings)
    end = read_ids(layers.raw("eos_token_id"), layers.where("eos_token_id"), findings)
    unknown = report_unknown_fields(findings)
    findings.read("draft", CONFIG)
    findings.read("draft.tensors", "tensor names")
    findings.derived("draft.format", "config.json and tensor names", "format detection")
    findings.derived("draft.dtype", "tensor headers", "dtype that most weight bytes have")
    return DraftCheckpoint(
        root=checkpoint.root,
        format=format,
        algorithm=algorithm,
        architecture=architectures[0] if architectures else "",
        target_name=_target_name(checkpoint),
        config_digest=checkpoint.config_digest,
        dtype=main_dtype(matched.tensors),
        decoder=decoder,
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        target_num_layers=target_num_layers,
        target_vocab_size=vocabulary.target_vocab_size,
        draft_vocab_size=vocabulary.draft_vocab_size,
        num_aux_states=aux.num_states,
        declared_aux_ids=aux.declared,
        aux_layer_ids=aux.canonical,
        aux_numbering=aux.numbering,
        has_fc_bias=flags.has_fc_bias,
        has_norm_before_residual=flags.has_norm_before_residual,
        has_norm_before_fc=flags.has_norm_before_fc,
        has_fc_norm=flags.has_fc_norm,
        has_norm_output=flags.has_norm_output,
        mask_token_id=block.mask_token_id,
        markov=block.markov,
        has_confidence_head=block.has_confidence_head,
        is_confidence_with_markov=block.is_confidence_with_markov,
        declared_num_speculative_tokens=num_speculative_tokens,
        sample_from_anchor=block.sample_from_anchor,
        draft_block_size=block.draft_block_size,
        geometry=geometry,
        d2t=vocabulary.d2t,
        t2d=vocabulary.t2d,
        draft_to_target=vocabulary.draft_to_target,
        bos_token_id=next(iter(begin), None),
        eos_token_ids=tuple(sorted(set(end))),
        details=MappingProxyType(dict(details)),
        roles=roles,
        sizes=MappingProxyType(dict(sizes)),
        config=MappingProxyType(checkpoint.config or {}),
        unknown_fields=unknown,
        tensors=MappingProxyType(dict(matched.tensors)),
        unmapped=matched.unmapped,
        files=checkpoint.files,
        origins=MappingProxyType(dict(findings.origins)),
        diagnostics=findings.result(),
    )


def _target_name(checkpoint: Checkpoint) -> str | None:
    config = checkpoint.config or {}
    names = (
        named_target(config).get("name_or_path"),
        config.get("target_model_name_or_path"),
        config.get("base_model_name_or_path"),
    )
    return next((name for name in names if isinstance(name, str) and name), None)


def report_unknown_fields(findings: ReaderFindings) -> tuple[str, ...]:
    """Report SD211 for the config fields that nothing read, and return their pointers."""
    unknown = findings.unread_fields()
    for pointer, value in unknown.items():
        findings.add(
            "SD211",
            where=f"{CONFIG}#{pointer}",
            message=f"`{pointer.rpartition('/')[2]}` is no field of this format; it was not used",
            expected="a field that the format defines",
            found=json.dumps(value)[:80],
        )
    return tuple(unknown)


def report_remote_code(root: Fields) -> None:
    """Report SD204 for an `auto_map`; nothing it names is ever imported."""
    if root.has("auto_map"):
        root.findings.add(
            "SD204",
            where=root.where("auto_map"),
            message="`auto_map` names code of the checkpoint; it was not read or run",
            found=json.dumps(root.raw("auto_map"))[:80],
        )


def main_dtype(tensors: Mapping[str, TensorRef]) -> str | None:
    """Return the dtype that most bytes of the matrices have, None without matrices."""
    sizes: dict[str, int] = {}
    for role, ref in tensors.items():
        if len(ref.shape) > 1 and role not in ("d2t", "t2d"):
            sizes[ref.dtype] = sizes.get(ref.dtype, 0) + ref.end - ref.begin
    return max(sorted(sizes), key=lambda dtype: sizes[dtype]) if sizes else None


def main_file(checkpoint: Checkpoint) -> str:
    """Return the weight file to name for a tensor that is nowhere."""
    return checkpoint.files[0].file if checkpoint.files else SINGLE


def is_whole(checkpoint: Checkpoint) -> bool:
    """Tell whether all weights could be read; else nothing can be said on what is missing."""
    return bool(checkpoint.tensors) and not has_errors(checkpoint.diagnostics)
