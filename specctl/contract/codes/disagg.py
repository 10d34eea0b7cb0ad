"""Family 8, SD860-SD879: prefill and decode in different processes."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD862",
        slug="kv-cannot-be-resharded",
        severity="error",
        summary="The KV of a prefill server cannot be spread over the ranks of a decode server.",
        why=(
            "KV travels by whole heads. A rank with part of a head, or a layer that the other side "
            "does not have, would attend to other numbers than the prefill computed."
        ),
        fix="Choose tensor-parallel sizes that divide the KV heads on both sides",
    ),
)
