"""Shape symbols and name tables of drafts of numbered heads, for the reference page and tests.

The tables of a file are made for its own counts; these are those of the smallest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specctl.formats.heads import hydra, medusa, mlp_speculator
from specctl.formats.heads.indexed import table
from specctl.formats.names import FileTables

SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "S": "rows of a stored head: V, or R when they were cut to the map",
        "E": "width of the target's states (`emb_dim`)",
        "I": "width of a step's state (`inner_dim`)",
    }
)
"""Shape symbols of these formats beside `contract.roles.SHAPE_SYMBOLS`."""

TABLES: Mapping[str, FileTables] = MappingProxyType(
    {
        "medusa (one head of one block)": table(medusa.original_rows(1, 1)),
        "vllm-medusa (one head of one block)": table(medusa.vllm_rows(1, 1, is_shared=False)),
        "hydra (one grounded head)": table(
            hydra.head_rows(["hydra_mlp.0.1.linear.weight"], 1, is_grounded=True)
        ),
        "mlp-speculator (two tied steps)": table(mlp_speculator.step_rows(2, is_tied=True)),
    }
)
