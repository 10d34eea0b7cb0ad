"""What a checkpoint says of its quantisation: method, blocks, and the modules that stay plain.

The notation of the entries is undone in `name_entries`.
*Source:* compressed-tensors `QuantizationConfig`; DeepSeek-V3 `quantization_config`;
Model-Optimizer `hf_quant_config.json`; vLLM `quantization/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specctl.checkpoint.config_sections import QUANTIZATION_SECTIONS, model_sections
from specctl.contract.file_names import QUANTIZATION

_IGNORE_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """One statement on quantisation.

    Args:
        where: place of the object, `config.json#/quantization_config`.
        method: `fp8`, `compressed-tensors`, `modelopt`, ... in lower case; empty when unnamed.
        algorithm: what the weights are, such as `NVFP4`; empty when not stated.
        block: rows and columns that share a scale, None when not stated.
        ignore: modules that stay plain, as written.
        ignore_key: pointer of that list inside the object, empty without a list.
        targets: modules that are quantised, in the ignore list's notation; empty for all.
    """

    where: str
    method: str
    algorithm: str
    block: tuple[int, int] | None
    ignore: tuple[str, ...]
    ignore_key: str
    targets: tuple[str, ...]

    @property
    def is_weight_declared(self) -> bool:
        """Tell whether weights are declared quantised, not only the cache."""
        return bool(self.method or self.algorithm) and self.algorithm.lower() not in ("none", "w16")


def declared_in_config(config: Mapping[str, object]) -> tuple[Declared, ...]:
    """Return every statement of a config, outermost first."""
    found = []
    for section, holder in model_sections(config):
        for key in QUANTIZATION_SECTIONS:
            data = holder.get(key)
            if isinstance(data, Mapping):
                pointer = "/".join(part for part in (section, key) if part)
                found.append(_declared(data, f"config.json#/{pointer}"))
    return tuple(found)


def declared_beside(side: Mapping[str, object] | None) -> Declared | None:
    """Return the statement of `hf_quant_config.json`, None without one."""
    data = None if side is None else side.get("quantization")
    return _declared(data, f"{QUANTIZATION}#/quantization") if isinstance(data, Mapping) else None


def _declared(data: Mapping[str, object], where: str) -> Declared:
    entries, key = _ignored(data)
    method = data.get("quant_method")
    algorithm = data.get("quant_algo") or data.get("format")
    return Declared(
        where=where,
        method=method.lower() if isinstance(method, str) else "",
        algorithm=algorithm if isinstance(algorithm, str) else "",
        block=_block(data),
        ignore=entries,
        ignore_key=key,
        targets=_targets(data),
    )


def _ignored(data: Mapping[str, object]) -> tuple[tuple[str, ...], str]:
    for key in _IGNORE_KEYS:
        entries = data.get(key)
        if isinstance(entries, list):
            return tuple(entry for entry in entries if isinstance(entry, str) and entry), key
    return (), ""


def _targets(data: Mapping[str, object]) -> tuple[str, ...]:
    """Return the named modules of every group; none when a group takes every linear layer."""
    groups = data.get("config_groups")
    named: list[str] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        entries = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(entries, list) or "Linear" in entries:
            return ()
        named += [entry for entry in entries if isinstance(entry, str) and entry]
    return tuple(named)


def _block(data: Mapping[str, object]) -> tuple[int, int] | None:
    sizes = data.get("weight_block_size")
    groups = data.get("config_groups")
    if not isinstance(sizes, list) and isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                sizes = weights.get("block_structure")
                size = weights.get("group_size")
                if not isinstance(sizes, list) and type(size) is int and size > 0:
                    sizes = [1, size]
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(s) is int and s > 0 for s in sizes):
        return sizes[0], sizes[1]
    size = data.get("group_size")
    return (1, size) if type(size) is int and size > 0 else None
