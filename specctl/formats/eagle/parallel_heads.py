"""ModelOpt's parallel heads: Medusa-like layers beside an EAGLE-3 draft.

They add drafted tokens after EAGLE's own; their names depend on how many a file holds, so the rows
of both tables are made for the file.
*Source:* Model-Optimizer pull request 664.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from specctl.contract.roles import OPTIONAL, TensorRole
from specctl.formats.names import Name, NameTable

MAX_TENSORS = 256  # real drafts have a handful of heads
_KEY = re.compile(
    r"(?:model\.)?(parallel_draft_heads\.\d+\.medusa_layers\.\d+\.linear)\.(weight|bias)"
)


def heads_names(names: NameTable, keys: Iterable[str]) -> NameTable:
    """Return the table with a row for each parallel head's tensor among the keys."""
    rows = tuple(Name(role=role, keys=(key,)) for role, key in _heads(keys))
    return NameTable(names=(*names.names, *rows), ignored=names.ignored) if rows else names


def heads_roles(keys: Iterable[str]) -> tuple[TensorRole, ...]:
    """Return the roles of the parallel heads among the keys: a square matrix and its bias."""
    shapes = {"weight": ("H", "H"), "bias": ("H",)}
    return tuple(
        TensorRole(name=role, shape=shapes[role.rpartition(".")[2]], when=OPTIONAL)
        for role, _ in _heads(keys)
    )


def _heads(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return role and key of parallel heads, at most `MAX_TENSORS`: tables grow by them."""
    found = ((match, key) for key in keys if (match := _KEY.fullmatch(key)))
    return sorted((f"{match[1]}.{match[2]}", key) for match, key in islice(found, MAX_TENSORS))


def is_head_role(role: str) -> bool:
    """Tell whether a role is a parallel head's."""
    return _KEY.fullmatch(role) is not None
