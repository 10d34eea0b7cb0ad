"""Dynamic rows beside a reduced head: how many, of which rank, and where they have an effect."""

from __future__ import annotations

from runtime.config.ledger import Ledger
from runtime.config.values import ProposerName
from specctl.contract.manifest import Manifest

_CHAINS: tuple[ProposerName, ...] = ("eagle", "eagle3", "mtp")


def settle_dynamic_rows(
    ledger: Ledger, manifest: Manifest, proposer: ProposerName
) -> tuple[int, int]:
    """Return `dynamic_rows` and `dynamic_rank`, both 0 where they have no effect.

    Findings: SD832 (a rank above the head's width), SD805 (given, and nothing outside a map to
    compute).
    """
    given = ledger.given
    reason = _why_idle(manifest, proposer)
    if reason is not None:
        for name, value in (
            ("dynamic_rows", given.dynamic_rows),
            ("dynamic_rank", given.dynamic_rank),
        ):
            if value:
                ledger.idle(name, reason)
            ledger.note(name, 0, "derived")
        return 0, 0
    width = manifest.target.decoder.hidden_size
    rank = ledger.pick("dynamic_rank", 0)
    if rank > width:
        ledger.refuse(
            "SD832",
            "dynamic_rank",
            f"`dynamic_rank` is {rank}, the head is {width} wide",
            expected=f"at most {width}",
            found=rank,
        )
    return ledger.pick("dynamic_rows", 0), rank


def _why_idle(manifest: Manifest, proposer: ProposerName) -> str | None:
    draft, sharing = manifest.draft, manifest.sharing
    if proposer not in _CHAINS or draft is None or sharing is None:
        return f"the proposer is `{proposer}`"
    if proposer == "mtp" and draft.decoder.num_layers > 1:
        return "the draft has several prediction layers"
    if manifest.vocabulary.map_kind == "identity":
        return "no token map leaves an id out"
    if sharing.head == "own":
        return "the draft has a head of its own, and ids outside its map have no row in it"
    return None
