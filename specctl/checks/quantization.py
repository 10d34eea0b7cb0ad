"""Checks of quantised weights: each with its scales, and as the configs say.

Works on keys and shapes alone, so that it holds for every layout, target and draft, each judged by
its own config (an engine that passes the target's method on to a draft is at fault, not the file).
*Source:* vLLM issues 26402, 28435; SGLang issues 17166, 28196, 35797.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specctl.checkpoint import TensorEntry
from specctl.checks.name_entries import NameEntries, name_entries
from specctl.checks.quantization_facts import (
    FUSED,
    Declared,
    declared_beside,
    declared_in_config,
)
from specctl.contract.diagnostics import Diagnostic, diagnose

QUANTISED_DTYPES = frozenset(
    {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "F4", "F6_E2M3", "F6_E3M2"}
)
PACKED_DTYPES = frozenset({"U8", "F4"})  # two elements in a byte
_WEIGHT = ".weight"
_PACKED_WEIGHT = ".weight_packed"
_WEIGHT_SCALES = (".weight_scale", ".weight_scale_inv", ".scale", ".weight.absmax")
_OTHER_SCALES = (".weight_scale_2", ".weight_global_scale", ".input_scale", ".input_global_scale")
SCALES = (*_WEIGHT_SCALES, *_OTHER_SCALES)
_ABSMAX = _WEIGHT_SCALES[3]  # of bitsandbytes, which flattens the weight
_WEIGHTS = (_WEIGHT, _PACKED_WEIGHT)
_MAX_COST = 400_000_000  # characters of expressions times characters of modules; about a second
_PROJECTIONS = tuple(
    f".{name}_proj{suffix}"
    for name in ("q", "k", "v", "o", "qkv", "gate", "up", "down", "gate_up")
    for suffix in _WEIGHTS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What the checks look at.

    Args:
        config: config.json's object.
        side: `hf_quant_config.json`'s object, None without one.
        tensors: key -> tensor, of the whole checkpoint.
        draft_keys: keys of prediction layers inside a target; empty for a draft by itself.
    """

    config: Mapping[str, object]
    side: Mapping[str, object] | None
    tensors: Mapping[str, TensorEntry]
    draft_keys: frozenset[str]


def check_quantization(stored: Stored) -> Iterator[Diagnostic]:
    """Yield SD511 to SD518."""
    beside = declared_beside(stored.side)
    inside = declared_in_config(stored.config)
    declared = next((d for d in (*inside, beside) if d and d.is_weight_declared), None)
    # The longest loop of a check: `_is_quantised` without its call.
    quantised = sorted(
        [
            key
            for key, entry in stored.tensors.items()
            if (entry.dtype in QUANTISED_DTYPES and key.endswith(_WEIGHT))
            or key.endswith(_PACKED_WEIGHT)
        ]
    )
    if declared is None and not quantised and beside is None:
        return
    yield from _check_sources(inside, beside)
    if declared is None:
        if quantised:
            yield _undeclared(stored.tensors[quantised[0]], len(quantised))
        return
    yield from _check_scales(stored.tensors, quantised, declared)
    yield from _check_plain(stored, frozenset(quantised), declared)
    yield from _check_entries(stored.tensors, declared)


def is_quantization_declared(config: Mapping[str, object]) -> bool:
    """Tell whether a config declares quantised weights."""
    return any(found.is_weight_declared for found in declared_in_config(config))


def check_inheritance(
    draft: Mapping[str, object], target: Mapping[str, object]
) -> Iterator[Diagnostic]:
    """Yield SD519 when the target is quantised and the draft says nothing of itself."""
    if is_quantization_declared(target) and not is_quantization_declared(draft):
        yield diagnose(
            "SD519",
            where="config.json#/quantization_config",
            message="the target declares quantised weights and the draft has no "
            "`quantization_config`; the draft's weights are plain",
            expected="nothing, or the draft's own method",
            found="nothing",
        )


def _is_quantised(entry: TensorEntry) -> bool:
    if entry.key.endswith(_PACKED_WEIGHT):
        return True
    return entry.dtype in QUANTISED_DTYPES and entry.key.endswith(_WEIGHT)


def _stem(key: str) -> str:
    return key.removesuffix(_PACKED_WEIGHT).removesuffix(_WEIGHT)


def _undeclared(first: TensorEntry, count: int) -> Diagnostic:
    return diagnose(
        "SD515",
        where=first.describe(),
        message=f"{count} weights are stored as {first.dtype} or the like, and no config has a "
        "`quantization_config`",
        expected="`quantization_config`",
        found="nothing",
    )


def _check_sources(inside: tuple[Declared, ...], beside: Declared | None) -> Iterator[Diagnostic]:
    if not inside or beside is None:
        return
    first = inside[0]
    same_algorithm = first.algorithm.lower() == beside.algorithm.lower() or not first.algorithm
    same_list = set(first.ignore) == set(beside.ignore)
    if same_algorithm and same_list:
        return
    name = "the method" if not same_algorithm else "the modules that stay plain"
    yield diagnose(
        "SD517",
        where=beside.where,
        message=f"{name} of {beside.where.partition('#')[0]} and of config.json differ",
        expected=first.algorithm if not same_algorithm else f"{len(first.ignore)} entries",
        found=beside.algorithm if not same_algorithm else f"{len(beside.ignore)} entries",
    )


def _check_scales(
    tensors: Mapping[str, TensorEntry], quantised: list[str], declared: Declared
) -> Iterator[Diagnostic]:
    verdicts: dict[tuple[object, ...], bool] = {}  # a model has few pairs of shapes
    paired: set[str] = set()
    usual = _WEIGHT_SCALES[0]  # the suffix that the last weight had
    for key in quantised:
        entry, stem = tensors[key], key.removesuffix(_PACKED_WEIGHT).removesuffix(_WEIGHT)
        scale = tensors.get(stem + usual)
        if scale is None:
            suffix = next((s for s in _WEIGHT_SCALES if stem + s in tensors), None)
            if suffix is not None:
                usual, scale = suffix, tensors[stem + suffix]
        if scale is not None:
            paired.add(scale.key)
        shapes = (entry.dtype, entry.shape, None if scale is None else scale.shape)
        if verdicts.get(shapes):
            continue
        verdicts[shapes] = scale is not None and _is_divided(entry, scale, declared.block)
        if scale is None:
            yield diagnose(
                "SD511",
                where=entry.describe(),
                message=f"`{key}` is {entry.dtype} and none of its scales is stored",
                expected=" or ".join(f"`{stem}{suffix}`" for suffix in _WEIGHT_SCALES[:2]),
                found="nothing",
            )
        elif not verdicts[shapes]:
            yield diagnose(
                "SD513",
                where=scale.describe(),
                message=f"`{scale.key}` {list(scale.shape)} does not divide `{key}` "
                f"{list(entry.shape)}",
                expected=_expected_scale(entry, declared.block),
                found=list(scale.shape),
            )
    for key in [key for key in tensors if key not in paired and key.endswith(SCALES)]:
        suffix = next(s for s in SCALES if key.endswith(s))
        stem = key.removesuffix(suffix)
        weights = (tensors.get(stem + s) for s in _WEIGHTS)
        if not any(weight is not None and _is_quantised(weight) for weight in weights):
            yield from _check_lone_scale(tensors[key], stem, suffix, tensors)


def _check_lone_scale(
    entry: TensorEntry, stem: str, suffix: str, tensors: Mapping[str, TensorEntry]
) -> Iterator[Diagnostic]:
    weights = [tensors[stem + s] for s in _WEIGHTS if stem + s in tensors]
    if not weights and suffix == ".scale":
        return  # also the name of a norm or a soft cap in some targets
    state = f"is {weights[0].dtype}" if weights else "is not stored"
    yield diagnose(
        "SD512",
        where=entry.describe(),
        message=f"`{entry.key}` is a scale, and `{stem}{_WEIGHT}` {state}",
        expected="a quantised weight",
        found=weights[0].dtype if weights else "nothing",
    )


def _is_divided(weight: TensorEntry, scale: TensorEntry, block: tuple[int, int] | None) -> bool:
    if math.prod(scale.shape) == 1 or weight.dtype == "I32" or scale.key.endswith(_ABSMAX):
        return True  # how many elements an I32 packs is not written in the tensor
    if len(weight.shape) < 2:
        return scale.shape == weight.shape
    rows, columns = weight.shape[-2:]
    if weight.dtype in PACKED_DTYPES:
        columns *= 2
    leading, shape = weight.shape[:-2], scale.shape
    if shape[: len(leading)] == leading:
        shape = shape[len(leading) :]
    if shape in ((rows,), (rows, 1), (1, columns)):
        return True
    if len(shape) != 2:
        return False
    if block is not None:
        return shape == (-(-rows // block[0]), -(-columns // block[1]))
    return all(_is_count(size, parts) for size, parts in zip((rows, columns), shape, strict=True))


def _is_count(size: int, parts: int) -> bool:
    """Tell whether blocks of one size cut `size` into `parts`."""
    return 0 < parts <= size and -(-size // -(-size // parts)) == parts


def _expected_scale(weight: TensorEntry, block: tuple[int, int] | None) -> str:
    if block is None or len(weight.shape) < 2:
        return "one number, one for each row, or one for each block"
    rows, columns = weight.shape[-2:]
    if weight.dtype in PACKED_DTYPES:
        columns *= 2
    return f"[{-(-rows // block[0])}, {-(-columns // block[1])}]"


def _is_decidable(entries: NameEntries, keys: list[str]) -> bool:
    """Tell whether all entries are understood and asking them is affordable."""
    return not entries.unknown and entries.cost * sum(map(len, keys)) <= _MAX_COST


def _check_plain(
    stored: Stored, quantised: frozenset[str], declared: Declared
) -> Iterator[Diagnostic]:
    """Compare each projection's precision with what the config says of it."""
    plain: list[TensorEntry] = []
    surplus: list[TensorEntry] = []
    own: list[TensorEntry] = []
    ignored, targets = name_entries(declared.ignore), name_entries(declared.targets)
    weights = [key for key in stored.tensors if key.endswith(_WEIGHTS)]
    projections = sorted([key for key in weights if key.endswith(_PROJECTIONS)])
    if not (_is_decidable(ignored, projections) and _is_decidable(targets, projections)):
        return
    for key in projections:
        module = _stem(key)
        is_listed = ignored.has(module) or (bool(declared.targets) and not targets.has(module))
        if (key in quantised) != is_listed:
            continue
        entry = stored.tensors[key]
        group = own if key in stored.draft_keys else surplus if is_listed else plain
        group.append(entry)
    if plain:
        yield diagnose(
            "SD514",
            where=plain[0].describe(),
            message=f"{len(plain)} projections are plain, such as `{plain[0].key}`, and "
            f"{declared.where} declares them quantised"
            + ("" if quantised else "; no weight of the files is quantised"),
            expected="quantised, or an entry in the ignore list",
            found=plain[0].dtype,
        )
    if surplus:
        yield diagnose(
            "SD515",
            where=surplus[0].describe(),
            message=f"{len(surplus)} projections are quantised, such as `{surplus[0].key}`, and "
            f"{declared.where} lists them as plain",
            expected="a plain weight",
            found=surplus[0].dtype,
        )
    if own:
        is_quantised = own[0].key in quantised
        yield diagnose(
            "SD518",
            where=own[0].describe(),
            message=f"{len(own)} projections of the prediction layer, such as `{own[0].key}`, are "
            + ("quantised and listed as plain" if is_quantised else "plain and not listed as such"),
            expected="an entry in the ignore list" if not is_quantised else "no such entry",
            found=own[0].dtype,
        )


def _check_entries(tensors: Mapping[str, TensorEntry], declared: Declared) -> Iterator[Diagnostic]:
    entries = name_entries(declared.ignore).names
    if not entries:
        return
    spellings = name_entries([*entries, *(s for entry in entries for s in _other_spelling(entry))])
    hits = spellings.hits(_stem(key) for key in tensors if key.endswith(_WEIGHTS))
    for number, entry in enumerate(declared.ignore):
        if entry not in entries or entry in hits:
            continue
        meant = [part for part in _other_spelling(entry) if part in hits]
        if not meant:
            continue  # modules of another model, such as a vision tower that was cut off
        yield diagnose(
            "SD516",
            where=f"{declared.where}/{declared.ignore_key}/{number}",
            message=f"`{entry}` names no module of the files; they hold `{meant[0]}`",
            expected=", ".join(meant),
            found=entry,
        )


def _other_spelling(entry: str) -> tuple[str, ...]:
    """Return the parts of a fused module's name, or the fused name of a part."""
    stem, _, last = entry.rpartition(".")
    prefix = f"{stem}." if stem else ""
    if last in FUSED:
        return tuple(prefix + part for part in FUSED[last])
    return tuple(prefix + name for name, parts in FUSED.items() if last in parts)
