"""Write prediction layers: a slice in their own layout, Speculators mtp, and back.

Foreign conventions restored: Speculators fuses experts into two stacks, gate rows before up rows;
Qwen3-Next stores them one by one, Qwen3.5 in the same two stacks. A slice keeps its target's config
as stored, because that is what describes its layers.
*Source:* Speculators 0.9 `convert/mtp` and `stitch-mtp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint
from specctl.formats.mtp.config import count_pointer, with_count
from specctl.formats.mtp.expert_forms import with_experts
from specctl.formats.mtp.families import DEEPSEEK, QWEN, SPECULATORS
from specctl.formats.mtp.family import MtpFamily
from specctl.formats.mtp.layer_config import (
    GATED_TEXT_TYPES,
    deepseek_config,
    qwen_config,
    speculators_layer,
)
from specctl.formats.mtp.naming import BORROWED, named, own_copies, role_names
from specctl.formats.mtp.part import SHARED_KEYS
from specctl.formats.writing import (
    SPECULATORS_VERSION,
    dtype_config,
    speculators_problems,
    speculators_section,
)
from specctl.formats.written import Copy, TensorSource, WriteRequest, Written, lost, nothing, unable


def write_native(family: MtpFamily, request: WriteRequest) -> Written:
    """Return the layers in a family's layout: the slice of a target, or renamed from Speculators.

    Diagnostics: SD602 for layers of another family.
    """
    draft = request.draft
    if draft.format == family.name:
        return Written(config=_counted(family, draft), tensors=_as_stored(family, draft))
    if draft.format != SPECULATORS.name or family.name not in (DEEPSEEK.name, QWEN.name):
        return nothing(_other_family(family, draft))
    if _last_place(draft) > 0:
        return nothing(_limit("num_prediction_layers", "one prediction layer", "several"))
    if family.name == QWEN.name:
        return _qwen_from_speculators(request)
    return _deepseek_from_speculators(request)


def _counted(family: MtpFamily, draft: DraftCheckpoint) -> dict[str, object]:
    """Return the config as stored, with the number of layers that there are (SD310, SD326)."""
    pointer = count_pointer(draft.config, family.count_fields)
    layers = draft.details.get("num_prediction_layers")
    if pointer is None or not isinstance(layers, int):
        return dict(draft.config)
    return with_count(draft.config, pointer, layers)


def _as_stored(family: MtpFamily, draft: DraftCheckpoint) -> dict[str, TensorSource]:
    """Return the layers under the keys of their target, a slice's prefix made the usual one.

    Behind a trunk the prefix is the target's; out of a target every key stays as it is.
    """
    stored = str(draft.details.get("key_prefix", ""))
    is_kept = family.is_after_trunk or draft.details.get("is_bundled") is True
    prefix = stored if is_kept else family.roots[0]
    shared = {key for key, _ in SHARED_KEYS}
    return {
        ref.key if ref.key in shared else prefix + ref.key.removeprefix(stored): Copy(ref=ref)
        for ref in draft.tensors.values()
    }


def write_speculators(request: WriteRequest) -> Written:
    """Return the one layer as a Speculators mtp draft.

    Diagnostics: SD602 for several layers, another input order, a model type that the library has no
    layer for, quantised weights, no token count or no target's name; SD601 `embedding` and `head`
    for copies, which the library takes from the target.
    """
    draft = request.draft
    layer = speculators_layer(draft)
    problems = [*_speculators_limits(draft), *speculators_problems(request)]
    if isinstance(layer, Diagnostic):
        return nothing(layer, *problems)
    if draft.geometry is None or any(problem.code == "SD602" for problem in problems):
        return nothing(*problems)
    sources = with_experts(draft.tensors, is_fused=True)
    if any(".mlp.experts.0." in role for role in sources):
        return nothing(_limit("experts", "experts alike in dtype and shape", "unlike ones"))
    config: dict[str, Any] = {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_config": speculators_section(
            request, algorithm="mtp", num_tokens=draft.geometry.num_speculative_tokens
        ),
        "speculators_model_type": "mtp",
        "speculators_version": SPECULATORS_VERSION,
        **dtype_config(draft),
        "transformer_layer_config": layer,
    }
    tensors = named(SPECULATORS, sources, root="mtp_layers.", indexes=(0,), without=BORROWED)
    return Written(config=config, tensors=tensors, diagnostics=tuple(problems))


def _qwen_from_speculators(request: WriteRequest) -> Written:
    draft = request.draft
    config = qwen_config(draft)
    if isinstance(config, Diagnostic):
        return nothing(config)
    layer_type = _layer_type(draft)
    is_fused = layer_type not in ("qwen3_next",)
    sources = with_experts(draft.tensors, is_fused=is_fused)
    tensors = named(QWEN, sources, root=QWEN.roots[0], indexes=(0,))
    return Written(config=config, tensors=tensors)


def _deepseek_from_speculators(request: WriteRequest) -> Written:
    draft, target = request.draft, request.target
    depth = None if target is None else target.num_layers
    if depth is None:
        return nothing(
            unable(
                where=CONFIG,
                message="the layer is numbered after its target's layers, and the target is not "
                "known here",
                expected="--target TARGET",
                found="nothing",
            )
        )
    config = deepseek_config(draft, depth)
    if isinstance(config, Diagnostic):
        return nothing(config)
    sources = {role: Copy(ref=ref) for role, ref in draft.tensors.items()}
    tensors = named(DEEPSEEK, sources, root=DEEPSEEK.roots[0], indexes=(depth,))
    return Written(config=config, tensors=tensors)


def _layer_type(draft: DraftCheckpoint) -> object:
    section = draft.config.get("transformer_layer_config")
    return section.get("model_type") if isinstance(section, Mapping) else None


def _speculators_limits(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    details = draft.details
    layers, order = details.get("num_prediction_layers"), details.get("concat_order")
    if layers != 1 or _last_place(draft) > 0:
        yield _limit("num_prediction_layers", "one prediction layer", layers)
    if order != SPECULATORS.concat_order:
        yield _limit("concat_order", f"input order `{SPECULATORS.concat_order}`", order)
    scales = [role for role in draft.tensors if role_names(role)[-1].endswith("_scale_inv")]
    if scales:
        yield _limit(
            "dtype", "weights in bf16, f16 or f32", f"{len(scales)} quantised weights with scales"
        )
    for role in own_copies(draft.tensors):
        ref = draft.tensors[role]
        yield lost(
            "embedding" if role == "embedding" else "head",
            where=f"{ref.file}::{ref.key}",
            message=f"`{ref.key}` is a copy beside the layer",
            found=ref.key,
        )


def _last_place(draft: DraftCheckpoint) -> int:
    """Return the last layer that a tensor lies in, counted from 0."""
    return max((role_names(role)[0] or 0 for role in draft.tensors), default=0)


def _limit(name: str, expected: str, found: object) -> Diagnostic:
    return unable(
        where=CONFIG,
        message=f"a Speculators mtp draft has {expected} (`{name}`)",
        expected=expected,
        found=found,
    )


def _other_family(family: MtpFamily, draft: DraftCheckpoint) -> Diagnostic:
    types = ", ".join(GATED_TEXT_TYPES) if family.name == QWEN.name else "dense layers"
    return unable(
        where=CONFIG,
        message=f"layers in the layout `{draft.format}` are not those of `{family.name}`",
        expected=f"`{family.name}`, or `{SPECULATORS.name}` with {types}",
        found=draft.format,
    )
