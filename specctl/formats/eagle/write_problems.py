"""What stops an EAGLE draft from being written in a dialect: SD602 with the tensor or field."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import Rope
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import AUX_KEY
from specctl.formats.written import lost, unable

_PARTS = ("fc.weight", "norm", "layers.0.input_norm", "layers.0.hidden_norm")
_LIBRARY_FAMILIES = ("llama", "qwen3")
REFERENCE_ROPE = ("default", "linear", "dynamic")


def no_place(draft: DraftCheckpoint, role: str, reason: str) -> Diagnostic:
    """Return SD602 at a tensor for which the dialect has no place."""
    ref = draft.tensors.get(role)
    where = CONFIG if ref is None else f"{ref.file}::{ref.key}"
    return unable(
        where=where,
        message=reason,
        expected="a draft without it",
        found=role if ref is None else ref.key,
    )


def common_problems(draft: DraftCheckpoint, *, is_own: bool = False) -> Iterator[Diagnostic]:
    """Yield what every EAGLE-3 dialect needs: dense layers, and a decided list of layers.

    Args:
        draft: as read.
        is_own: it is written in its own dialect, which keeps an undecided list as it is.
    """
    if draft.decoder is None:
        yield unable(
            where=CONFIG,
            message="the layers are of a kind that this dialect does not hold, or a dimension of "
            "them is not known",
            expected="dense layers of the llama family",
            found=draft.architecture or "unknown",
        )
    if not is_own and draft.declared_aux_ids is not None and draft.aux_layer_ids is None:
        yield unable(
            where=f"{CONFIG}#/{AUX_KEY}",
            message=f"ids {list(draft.declared_aux_ids)} do not say what they count",
            expected="--aux-numbering output or --aux-numbering boundary",
            found="undecided",
        )
    if draft.decoder is not None and draft.decoder.num_layers > 1 and _has_wide_layers(draft):
        yield no_place(
            draft,
            "layers.1.hidden_norm",
            "the layers after the first read the embedding again, which only DeepSpec's do",
        )


def missing_parts(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield the tensors that only ModelOpt may leave out, and its parallel heads."""
    for role in _PARTS:
        if role not in draft.tensors:
            yield unable(
                where=CONFIG,
                message=f"the dialect always has the tensor `{role}`, which this draft leaves out",
                expected=role,
                found="nothing",
            )


def undeclared_parts(draft: DraftCheckpoint, format: str) -> Iterator[Diagnostic]:
    """Yield the parts that SafeAILab's reference neither reads nor computes.

    A file of the dialect itself may hold them; the engines that read it know more.
    """
    if draft.format == format:
        return
    decoder = draft.decoder
    flags = {
        "norm_before_residual": draft.has_norm_before_residual,
        "norm_before_fc": draft.has_norm_before_fc,
        "fc_norm": draft.has_fc_norm,
        "norm_output": draft.has_norm_output,
        "bias": draft.has_fc_bias,
        "q_norm": decoder is not None and decoder.has_qk_norm,
        "attention_bias": decoder is not None and (decoder.has_qkv_bias or decoder.has_o_bias),
        "mlp_bias": decoder is not None and decoder.has_mlp_bias,
    }
    for name, holds in flags.items():
        if holds:
            yield unable(
                where=CONFIG,
                message=f"the reference of this dialect does not know `{name}`",
                expected="specforge-eagle3, modelopt-eagle3 or speculators-eagle3",
                found=f"`{name}` is true",
            )
    if decoder is not None and decoder.rope.kind not in REFERENCE_ROPE:
        yield unable(
            where=f"{CONFIG}#/rope_scaling",
            message="the reference of this dialect scales rotary positions in two ways only",
            expected=" or ".join(REFERENCE_ROPE),
            found=decoder.rope.kind,
        )


def reference_rope(rope: Rope) -> dict[str, object]:
    """Return `rope_scaling` as the reference's config accepts it: two keys, `type` and `factor`."""
    if rope.kind == "default" or rope.kind not in REFERENCE_ROPE:
        return {}
    return {"rope_scaling": {"type": rope.kind, "factor": rope.parameters.get("factor")}}


def normed_residual(draft: DraftCheckpoint, format: str) -> Iterator[Diagnostic]:
    """Yield SD602 for a residual that only Speculators and vLLM compute.

    A file of the dialect itself may say so; its readers decide.
    """
    if draft.has_norm_before_residual and draft.format != format:
        yield unable(
            where=f"{CONFIG}#/norm_before_residual",
            message="the residual is the normed state; readers of this dialect take the raw one",
            expected="speculators-eagle3",
            found="`norm_before_residual` is true",
        )


def library_problems(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield what the classes of Speculators 0.9 cannot hold.

    SD601 `library-load`: target states of another width, which the config can state and vLLM reads,
    and the library's class cannot.
    """
    decoder = draft.decoder
    if draft.has_fc_bias:
        yield no_place(draft, "fc.bias", "Speculators' `fc` has no bias")
    if draft.hidden_size != draft.target_hidden_size:
        yield lost(
            "library-load",
            where=f"{CONFIG}#/target_hidden_size",
            message=f"the draft is {draft.hidden_size} wide and reads states of "
            f"{draft.target_hidden_size}",
            found=draft.target_hidden_size,
        )
    if decoder is None:
        return
    if decoder.family not in _LIBRARY_FAMILIES:
        yield unable(
            where=f"{CONFIG}#/model_type",
            message="Speculators has no draft layers of this type",
            expected=" or ".join(_LIBRARY_FAMILIES),
            found=decoder.family,
        )
    if decoder.has_qkv_bias and not decoder.has_o_bias:
        yield no_place(
            draft, "layers.0.q_proj.bias", "Speculators' layers have biases in all of q, k, v and o"
        )
    is_qwen3 = decoder.family == "qwen3"
    if decoder.has_qk_norm and not is_qwen3:
        yield no_place(draft, "layers.0.q_norm", "only Speculators' qwen3 layers norm q and k")
    if decoder.has_mlp_bias and is_qwen3:
        yield no_place(draft, "layers.0.gate_proj.bias", "qwen3 layers have no biases in the MLP")


def _has_wide_layers(draft: DraftCheckpoint) -> bool:
    return "layers.1.hidden_norm" in draft.tensors
