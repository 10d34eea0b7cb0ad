"""Name and role tables of every EAGLE format, for the reference page and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specctl.contract.roles import EAGLE3_ROLES, TensorRole
from specctl.formats.eagle import deepspec, eagle1, mla, peagle
from specctl.formats.eagle.eagle3 import NEMO_NAMES, SAFEAILAB_NAMES, SPECULATORS_NAMES
from specctl.formats.eagle.roles import DEEPSPEC_ROLES, EAGLE1_ROLES, MLA_ROLES, peagle_roles
from specctl.formats.names import NameTable


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTables:
    """What a format's files hold, and under which names."""

    names: NameTable
    roles: tuple[TensorRole, ...]


def _tables(names: NameTable, roles: tuple[TensorRole, ...]) -> FormatTables:
    return FormatTables(names=names, roles=roles)


TABLES: Mapping[str, FormatTables] = MappingProxyType(
    {
        "safeailab-eagle3": _tables(SAFEAILAB_NAMES, EAGLE3_ROLES),
        "specforge-eagle3": _tables(SAFEAILAB_NAMES, EAGLE3_ROLES),
        "modelopt-eagle3": _tables(SPECULATORS_NAMES, EAGLE3_ROLES),
        "nemo-eagle3": _tables(NEMO_NAMES, EAGLE3_ROLES),
        "deepspec-eagle3": _tables(deepspec.NAMES, DEEPSPEC_ROLES),
        "mla-eagle3": _tables(mla.NAMES, MLA_ROLES),
        "speculators-eagle3": _tables(SPECULATORS_NAMES, EAGLE3_ROLES),
        "peagle": _tables(peagle.NAMES, peagle_roles(2)),
        "speculators-peagle": _tables(peagle.NAMES, peagle_roles(3)),
        "eagle": _tables(eagle1.NAMES, EAGLE1_ROLES),
        "vllm-eagle": _tables(eagle1.WRAPPER_NAMES, EAGLE1_ROLES),
        "speculators-eagle": _tables(eagle1.SPECULATORS_NAMES, EAGLE1_ROLES),
    }
)
