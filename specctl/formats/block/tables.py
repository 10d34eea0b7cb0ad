"""Names and roles of the block dialects, once for the reference page and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specctl.contract.roles import DSPARK_ROLES, TensorRole
from specctl.formats.block import names, roles
from specctl.formats.names import NameTable

BLOCK_TABLES: Mapping[str, tuple[NameTable, tuple[TensorRole, ...]]] = MappingProxyType(
    {
        "zlab-dflash, speculators-dflash": (names.DFLASH_NAMES, roles.DFLASH_ROLES),
        "laguna-dflash": (names.DFLASH_NAMES, roles.FUSED_ROLES),
        "zlab-dflash with latent attention": (names.DFLASH_NAMES, roles.LATENT_ROLES),
        "deepspec-dspark with Gemma's layers": (names.DSPARK_NAMES, roles.GEMMA_ROLES),
        "zlab-dflash2, speculators-dflash2": (names.DFLASH2_NAMES, roles.DFLASH2_ROLES),
        "domino": (names.DOMINO_NAMES, roles.DOMINO_ROLES),
        "speculators-xpress": (names.XPRESS_NAMES, roles.XPRESS_ROLES),
        "deepspec-dspark, speculators-dspark": (names.DSPARK_NAMES, DSPARK_ROLES),
        "modelopt-dspark": (names.FLAT_DSPARK_NAMES, DSPARK_ROLES),
    }
)
"""Formats -> names in files, roles. DSpark inside a target has its names from the file."""
