"""Name tensors by role in a family's layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from specctl.formats.mtp.family import MtpFamily

if TYPE_CHECKING:
    from specctl.formats.written import TensorSource

BORROWED = ("embedding", "head")
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def role_names(role: str) -> tuple[int | None, str]:
    """Return the layer and the role inside it: `layers.1.q_proj.weight` -> (1, `q_proj.weight`)."""
    found = _IN_LAYER.fullmatch(role)
    return (None, role) if found is None else (int(found[1]), found[2])


def own_copies(roles: Iterable[str]) -> tuple[str, ...]:
    """Return the roles that are copies of the target's embedding or head, sorted."""
    return tuple(sorted(role for role in roles if role_names(role)[1] in BORROWED))


def named(
    family: MtpFamily,
    sources: Mapping[str, TensorSource],
    *,
    root: str,
    indexes: tuple[int, ...],
    without: Collection[str] = (),
) -> dict[str, TensorSource]:
    """Return key -> source for every role, as the family spells it.

    Args:
        family: whose layout is written.
        sources: role -> where the bytes come from.
        root: prefix of the keys.
        indexes: of the layers as they are written.
        without: roles that are left out, by their name inside a layer.
    """
    tensors: dict[str, TensorSource] = {}
    for role, source in sources.items():
        place, name = role_names(role)
        key = family.key_of(name, root=root, index=indexes[place or 0])
        if name not in without and key is not None:
            tensors[key] = source
    return tensors
