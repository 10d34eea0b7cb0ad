"""Who drafts, how many tokens, and how wide a draft forward is."""

from __future__ import annotations

from typing import get_args

from runtime.config.ledger import Ledger
from runtime.config.values import (
    DEFAULT_LENGTH_MODE,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    DRAFT_PROPOSERS,
    LengthMode,
    ProposerName,
)
from specctl.contract.diagnostics import diagnose
from specctl.contract.manifest import PARALLEL_DRAFTS, Manifest


def settle_proposer(ledger: Ledger, manifest: Manifest) -> tuple[ProposerName, int]:
    """Return the proposer and the drafts per round; 0 drafts and `none` imply each other.

    Findings: SD807 (cannot run with this manifest), SD806 (more drafts than a block or several
    prediction layers yield), SD832 (more drafts than positions), SD805.
    """
    draft = manifest.draft
    name = ledger.pick(
        "proposer", draft.algorithm if draft is not None else "none", origin="manifest"
    )
    known: tuple[ProposerName, ...] = get_args(ProposerName)
    proposer = next((item for item in known if item == name), None)
    if proposer is None:
        ledger.refuse(
            "SD807",
            "proposer",
            f"there is no proposer `{name}` in this version",
            expected=", ".join(known),
            found=name,
        )
        return "none", 0
    if proposer in DRAFT_PROPOSERS and (draft is None or draft.algorithm != proposer):
        ledger.refuse(
            "SD807",
            "proposer",
            f"proposer `{proposer}` needs an `{proposer}` draft",
            expected=f"a manifest whose draft is `{proposer}`",
            found="no draft" if draft is None else draft.algorithm,
        )
    if ledger.given.max_ngram is not None and proposer != "ngram":
        ledger.idle("max_ngram", f"the proposer is `{proposer}`")
    if proposer == "none":
        if ledger.given.num_speculative_tokens:
            ledger.idle("num_speculative_tokens", "the proposer is `none`")
        return "none", ledger.note("num_speculative_tokens", 0, "derived")
    gamma = _settle_gamma(ledger, manifest, proposer)
    if gamma == 0:
        if ledger.given.proposer is not None:
            ledger.idle("proposer", "`num_speculative_tokens` is 0")
        return ledger.note("proposer", "none", "derived"), 0
    return proposer, gamma


def _settle_gamma(ledger: Ledger, manifest: Manifest, proposer: ProposerName) -> int:
    geometry = manifest.geometry
    if geometry.num_speculative_tokens:
        gamma = ledger.pick(
            "num_speculative_tokens", geometry.num_speculative_tokens, origin="manifest"
        )
    else:
        gamma = ledger.pick("num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS)
    positions = manifest.target.decoder.max_position_embeddings
    if gamma >= positions:
        ledger.refuse(
            "SD832",
            "num_speculative_tokens",
            f"a round of {gamma} drafts never fits into the target's {positions} positions",
            expected=f"at most {positions - 1}",
            found=gamma,
        )
    num_layers = 0 if manifest.draft is None else manifest.draft.decoder.num_layers
    if proposer == "mtp" and 1 < num_layers < gamma:
        ledger.refuse(
            "SD806",
            "num_speculative_tokens",
            f"{gamma} tokens are asked for, {num_layers} prediction layers make one each",
            expected=f"at most {num_layers}",
            found=gamma,
        )
    if geometry.draft_block_size is None or proposer not in DRAFT_PROPOSERS:
        return gamma
    limit = geometry.draft_block_size - (0 if geometry.sample_from_anchor else 1)
    if gamma > limit:
        ledger.refuse(
            "SD806",
            "num_speculative_tokens",
            f"{gamma} tokens are asked for, a draft block of {geometry.draft_block_size} "
            f"yields {limit}",
            expected=f"at most {limit}",
            found=gamma,
        )
    return gamma


def refuse_wide_rounds(ledger: Ledger, gamma: int, max_model_len: int) -> None:
    """Collect SD832 for more drafts than `max_model_len` leaves room for in any round.

    A captured round places its rows at the first positions of the padding slot: they must exist.
    """
    if gamma >= max_model_len:
        ledger.refuse(
            "SD832",
            "num_speculative_tokens",
            f"a round of {gamma} drafts never fits into the {max_model_len} positions of "
            "`max_model_len`",
            expected=f"at most {max_model_len - 1}",
            found=gamma,
        )


def settle_length_mode(ledger: Ledger, gamma: int) -> LengthMode:
    """Return how draft counts are chosen; findings are SD832 (no such mode) and SD805 (idle)."""
    given = ledger.pick("length_mode", DEFAULT_LENGTH_MODE)
    modes: tuple[LengthMode, ...] = get_args(LengthMode)
    mode = next((item for item in modes if item == given), None)
    if mode is None:
        expected = " or ".join(modes)
        ledger.refuse(
            "SD832", "length_mode", f"`length_mode` is {given}", expected=expected, found=given
        )
        return DEFAULT_LENGTH_MODE
    if mode != "static" and gamma == 0:
        ledger.idle("length_mode", "there are no drafts to choose a number of")
        return ledger.note("length_mode", DEFAULT_LENGTH_MODE, "derived")
    if mode == "static" and ledger.given.cost_table is not None:
        ledger.idle("cost_table", "`length_mode` is `static`")
    return mode


def draft_width(manifest: Manifest, proposer: ProposerName, num_speculative_tokens: int) -> int:
    """Return the slots of one draft forward: 1 for a chain, 0 without a draft model."""
    geometry = manifest.geometry
    if proposer not in DRAFT_PROPOSERS or num_speculative_tokens == 0:
        return 0
    if proposer in PARALLEL_DRAFTS or geometry.sample_from_anchor:
        return num_speculative_tokens
    return 1 if geometry.draft_block_size is None else num_speculative_tokens + 1


def check_draft_context(
    ledger: Ledger, manifest: Manifest, proposer: ProposerName, max_model_len: int
) -> None:
    """Collect SD808 when requests may grow beyond the draft's positions."""
    draft = manifest.draft
    if proposer not in DRAFT_PROPOSERS or draft is None:
        return
    known = draft.decoder.max_position_embeddings
    if known < max_model_len:
        ledger.found.append(
            diagnose(
                "SD808",
                where="manifest#/draft/decoder/max_position_embeddings",
                message=f"drafting stops at position {known} of {max_model_len}",
                expected=f"at least {max_model_len}",
                found=known,
            )
        )
