"""Name and role tables of every EAGLE format, for the reference page and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specctl.contract.roles import EAGLE1_ROLES, EAGLE3_ROLES
from specctl.formats.eagle import deepspec, eagle1, mla, peagle
from specctl.formats.eagle.eagle3 import NEMO_NAMES, SAFEAILAB_NAMES, SPECULATORS_NAMES
from specctl.formats.eagle.roles import DEEPSPEC_ROLES, MLA_ROLES, peagle_roles
from specctl.formats.names import FileTables

TABLES: Mapping[str, FileTables] = MappingProxyType(
    {
        "safeailab-eagle3": FileTables(names=SAFEAILAB_NAMES, roles=EAGLE3_ROLES),
        "specforge-eagle3": FileTables(names=SAFEAILAB_NAMES, roles=EAGLE3_ROLES),
        "modelopt-eagle3": FileTables(names=SPECULATORS_NAMES, roles=EAGLE3_ROLES),
        "nemo-eagle3": FileTables(names=NEMO_NAMES, roles=EAGLE3_ROLES),
        "deepspec-eagle3": FileTables(names=deepspec.NAMES, roles=DEEPSPEC_ROLES),
        "mla-eagle3": FileTables(names=mla.NAMES, roles=MLA_ROLES),
        "speculators-eagle3": FileTables(names=SPECULATORS_NAMES, roles=EAGLE3_ROLES),
        "peagle": FileTables(names=peagle.NAMES, roles=peagle_roles(2)),
        "speculators-peagle": FileTables(names=peagle.NAMES, roles=peagle_roles(3)),
        "eagle": FileTables(names=eagle1.NAMES, roles=EAGLE1_ROLES),
        "vllm-eagle": FileTables(names=eagle1.WRAPPER_NAMES, roles=EAGLE1_ROLES),
        "speculators-eagle": FileTables(names=eagle1.SPECULATORS_NAMES, roles=EAGLE1_ROLES),
    }
)
