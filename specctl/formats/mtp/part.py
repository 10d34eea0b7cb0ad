"""Which tensors of a checkpoint are prediction layers, and the role of each.

Invariants: a key has one role or none; what belongs to the target is never in the part. Roles are
`fc.weight`, `embedding_norm`, ... of the one layer, `layers.{k}.` + role inside a layer; a family
whose layers each have a fuse tensor writes `layers.{k}.fc.weight` when there are several. Layers
are counted from 0 whatever their stored index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from specctl.formats.mtp.family import MtpFamily, layer_role
from specctl.formats.names import SCALE_SUFFIXES

# Everything that a decoder layer of any family may hold; another word is no tensor of a layer.
_LAYER_PART = re.compile(
    r"(?:self_attn|attn|attention|mlp|ffn|moe|mixer|block_sparse_moe|feed_forward"
    r"|linear_attn|share_expert|shared_experts?|router|indexer|\w*hyper_connection\w*|ple"
    r"|transformer|transformer_layer|hc_\w+|\w+_hc|\w*norm\w*|layer_scalar)(?:\..+)?"
)
_PACKED = ("weight_packed", "qweight", "qzeros", "scales", "g_idx")
_SUFFIX = f"(?:{'|'.join(('weight', 'bias', *SCALE_SUFFIXES, *_PACKED))})"
SHARED_KEYS: tuple[tuple[str, str], ...] = (
    ("model.embed_tokens.weight", "embedding"),
    ("embed_tokens.weight", "embedding"),
    ("lm_head.weight", "head"),
)
"""A slice may carry the target's embedding and head under the target's own names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpPart:
    """The prediction layers of one checkpoint.

    Args:
        family: that they are of.
        root: prefix of their keys.
        indexes: of the layers as stored, ascending; entry k is layer k here.
        num_fused: fuse tensors, 1 when all layers share one.
        roles: key -> role.
    """

    family: MtpFamily
    root: str
    indexes: tuple[int, ...]
    num_fused: int
    roles: Mapping[str, str]

    @property
    def num_layers(self) -> int:
        """Prediction layers, as the config counts them."""
        return len(self.indexes) if self.family.is_fused_once else self.num_fused

    def key_of(self, role: str) -> str | None:
        """Return the key that holds a role, or would hold it; None past the last layer."""
        stored = next((key for key, name in self.roles.items() if name == role), None)
        if stored is not None:
            return stored
        place, name = 0, role
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", role)
        if found is not None:
            place, name = int(found[1]), found[2]
        if place >= len(self.indexes):
            return None
        return self.family.key_of(name, root=self.root, index=self.indexes[place])

    @property
    def layer_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the layers' keys."""
        block = self.root + self.family.block
        return tuple(block.replace("{i}", str(index)) for index in self.indexes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Patterns:
    names: tuple[tuple[str, re.Pattern[str]], ...]
    block: re.Pattern[str]
    marker: re.Pattern[str]


@lru_cache(maxsize=64)
def _patterns(family: MtpFamily) -> _Patterns:
    names: list[tuple[str, re.Pattern[str]]] = []
    for role, template in family.names:
        stem = re.escape(template.removesuffix(".weight")).replace(r"\{i\}", r"(?P<i>\d{1,5})")
        names.append((role, re.compile(rf"{stem}\.(?P<suffix>{_SUFFIX})")))
    block = re.escape(family.block).replace(r"\{i\}", r"(?P<i>\d{1,5})")
    return _Patterns(
        names=tuple(names),
        block=re.compile(rf"{block}(?P<part>.+)"),
        marker=re.compile(family.marker.replace(r"\{i\}", r"(?P<i>\d{1,5})")),
    )


def find_part(family: MtpFamily, keys: Iterable[str]) -> MtpPart | None:
    """Return the family's prediction layers among the keys, None without any."""
    listed = list(keys)
    patterns = _patterns(family)
    marked = _marked(family, listed)
    root = next((root for root in family.roots if _shows(root, patterns, marked)), None)
    if root is None:
        return None
    parsed = {
        key: found
        for key in _candidates(family, root, listed, marked)
        if (found := _parse(family, patterns, key[len(root) :])) is not None
    }
    fused = [i for name, i in parsed.values() if name == family.fuse_roles[0]]
    indexes = tuple(sorted({index for _, index in parsed.values() if index is not None}))
    place = {index: k for k, index in enumerate(indexes)}
    several = len(fused) > 1
    roles = {
        key: _full_role(name, None if index is None else place[index], several=several)
        for key, (name, index) in parsed.items()
    }
    return MtpPart(
        family=family, root=root, indexes=indexes, num_fused=max(len(fused), 1), roles=roles
    )


def _mark_ends(family: MtpFamily) -> tuple[str, ...]:
    """Return how the keys end that only prediction layers have, for layers behind a trunk."""
    marks = {*family.fuse_roles, "embedding_norm", "hidden_norm"}
    return tuple(key.rpartition("{i}")[2] for role, key in family.names if role in marks)


def _marked(family: MtpFamily, keys: list[str]) -> list[str]:
    """Return the keys that can show the layout: a trunk of 90,000 tensors is passed over."""
    if not family.is_after_trunk:
        return keys
    ends = _mark_ends(family)
    return [key for key in keys if key.endswith(ends)]


def _candidates(family: MtpFamily, root: str, keys: list[str], marked: list[str]) -> list[str]:
    """Return the keys that are worth parsing."""
    if not family.is_after_trunk:
        return [key for key in keys if key.startswith(root)]
    ends = _mark_ends(family)
    owners = {key[: -len(end)] for key in marked for end in ends if key.endswith(end)}
    prefixes = tuple(f"{owner}." for owner in owners if owner.startswith(root))
    return [key for key in keys if key.startswith(prefixes)]


def _shows(root: str, patterns: _Patterns, keys: Iterable[str]) -> bool:
    return any(
        key.startswith(root) and patterns.marker.fullmatch(key, len(root)) is not None
        for key in keys
    )


def _parse(family: MtpFamily, patterns: _Patterns, rest: str) -> tuple[str, int | None] | None:
    """Return role and layer index of a key after the root; roles inside a layer start with `.`."""
    for role, pattern in patterns.names:
        found = pattern.fullmatch(rest)
        if found is not None:
            index = found.groupdict().get("i")
            return _with_suffix(role, found["suffix"]), None if index is None else int(index)
    if family.is_extra(rest):
        return rest, None
    found = patterns.block.fullmatch(rest)
    if found is None or _LAYER_PART.fullmatch(found["part"]) is None:
        return None
    part = found["part"]
    for native, canonical in family.aliases:
        if part.startswith(native):
            part = canonical + part.removeprefix(native)
            break
    return "." + layer_role(part), int(found["i"])


def _with_suffix(role: str, suffix: str) -> str:
    if suffix == "weight":
        return role
    return f"{role.removesuffix('.weight')}.{suffix}"


def _full_role(name: str, place: int | None, *, several: bool) -> str:
    if name.startswith("."):
        return f"layers.{place}{name}"
    return f"layers.{place}.{name}" if several and place is not None else name
