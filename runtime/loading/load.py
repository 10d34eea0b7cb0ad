"""Load the models of a manifest: facts first, then files, then weights.

Order of refusal: facts that have no arithmetic here, files that changed since the manifest, tensors
that are missing or misshapen, and only then a weight is read. Nothing is sniffed from config.json
and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from runtime.config import LoadFormat
from runtime.loading.draft import read_draft
from runtime.loading.load_format import file_problems
from runtime.loading.reader import refuse_errors
from runtime.loading.target import read_target
from runtime.models import (
    DraftModel,
    TargetModel,
    block_problems,
    eagle3_problems,
    last_state_problems,
    target_problems,
)
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.codec import verify_digests, verify_places
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import BLOCK_DRAFTS, Draft, Manifest
from specctl.contract.stage_split import Stage

_FACT_CHECKS: Mapping[str, Callable[[Draft], list[Diagnostic]]] = {
    "eagle": last_state_problems,
    "eagle3": eagle3_problems,
    "mtp": last_state_problems,
    "peagle": eagle3_problems,
    **dict.fromkeys(BLOCK_DRAFTS, block_problems),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModels:
    """What a manifest loads to.

    Args:
        target: the target.
        draft: None without a draft, or when none was asked for.
        diagnostics: warnings and facts found while reading; no errors.
    """

    target: TargetModel
    draft: DraftModel | None
    diagnostics: tuple[Diagnostic, ...]


def load_models(
    manifest: Manifest,
    manifest_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    with_draft: bool = True,
    ranks: Ranks = ONE_RANK,
    is_draft_split: bool = True,
    stage: Stage | None = None,
    load_format: LoadFormat = "auto",
) -> LoadedModels:
    """Return the manifest's models with every weight on `device` in `dtype`.

    Args:
        manifest: as `specctl.contract.codec.load_manifest` returns it.
        manifest_dir: the manifest file's directory; relative sources count from it.
        device: where the weights go.
        dtype: weights are converted to it whatever their stored dtype.
        with_draft: whether to load the draft, too; without it its files are not looked at.
        ranks: over which the models are split.
        is_draft_split: False keeps the draft's own tensors whole on every rank.
        stage: of a pipeline; None: all of the target. The draft is the last stage's.
        load_format: how files are read.

    Raises:
        DiagnosticError: SD810-SD814 (facts), SD857 (load format), SD702, SD712 (files that
            changed), SD710 (tensors stored otherwise than stated), and the codes of `read_target`
            and `read_draft`.
    """
    if not with_draft:
        manifest = _without_draft(manifest)
    refuse_errors([*_fact_problems(manifest), *file_problems(manifest, load_format)])
    refuse_errors(verify_digests(manifest, manifest_dir) or verify_places(manifest, manifest_dir))
    is_dummy = load_format == "dummy"
    target, warnings = read_target(
        manifest,
        manifest_dir,
        device=device,
        dtype=dtype,
        stage=stage,
        ranks=ranks,
        is_dummy=is_dummy,
    )
    if manifest.draft is None or not (stage is None or stage.has_head):
        return LoadedModels(target=target, draft=None, diagnostics=warnings)
    draft, draft_warnings = read_draft(
        manifest,
        manifest_dir,
        target=target,
        device=device,
        dtype=dtype,
        ranks=ranks if is_draft_split else ONE_RANK,
        is_dummy=is_dummy,
    )
    return LoadedModels(target=target, draft=draft, diagnostics=warnings + draft_warnings)


def _without_draft(manifest: Manifest) -> Manifest:
    vocabulary = msgspec.structs.replace(
        manifest.vocabulary, token_map_file=None, token_map_digest=None
    )
    return msgspec.structs.replace(manifest, draft=None, vocabulary=vocabulary)


def _fact_problems(manifest: Manifest) -> list[Diagnostic]:
    problems = target_problems(manifest.target)
    draft = manifest.draft
    if draft is None:
        return problems
    check = _FACT_CHECKS.get(draft.algorithm)
    if check is None:
        return [*problems, _unsupported_proposer(draft)]
    return [*problems, *check(draft)]


def _unsupported_proposer(draft: Draft) -> Diagnostic:
    return diagnose(
        "SD810",
        where="manifest#/draft/algorithm",
        message=f"no proposer runs a `{draft.algorithm}` draft",
        expected=", ".join(_FACT_CHECKS),
        found=draft.algorithm,
    )
