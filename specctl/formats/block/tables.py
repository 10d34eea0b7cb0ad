"""Names and roles of the block dialects, once for the reference page and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specctl.contract.roles import DSPARK_ROLES
from specctl.formats.block import names, roles
from specctl.formats.names import FileTables

TABLES: Mapping[str, FileTables] = MappingProxyType(
    {
        "zlab-dflash, speculators-dflash": FileTables(
            names=names.DFLASH_NAMES, roles=roles.DFLASH_ROLES
        ),
        "laguna-dflash": FileTables(names=names.DFLASH_NAMES, roles=roles.FUSED_ROLES),
        "zlab-dflash with latent attention": FileTables(
            names=names.DFLASH_NAMES, roles=roles.LATENT_ROLES
        ),
        "deepspec-dspark with Gemma's layers": FileTables(
            names=names.DSPARK_NAMES, roles=roles.GEMMA_ROLES
        ),
        "zlab-dflash2, speculators-dflash2": FileTables(
            names=names.DFLASH2_NAMES, roles=roles.DFLASH2_ROLES
        ),
        "domino": FileTables(names=names.DOMINO_NAMES, roles=roles.DOMINO_ROLES),
        "speculators-xpress": FileTables(names=names.XPRESS_NAMES, roles=roles.XPRESS_ROLES),
        "deepspec-dspark, speculators-dspark": FileTables(
            names=names.DSPARK_NAMES, roles=DSPARK_ROLES
        ),
        "modelopt-dspark": FileTables(names=names.FLAT_DSPARK_NAMES, roles=DSPARK_ROLES),
    }
)
"""DSpark inside a target has its names from the file."""
