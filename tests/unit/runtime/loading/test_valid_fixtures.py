"""What `specctl validate` calls fit loads, or the refusal was said before: one fixture at a time.

Each draft is put beside every target that it fits, not only beside the one that it is listed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from runtime.loading import load_models
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, has_errors
from specctl.contract.manifest import Manifest
from specctl.ops.deep import deep_findings
from specctl.ops.emit_manifest import build_manifest
from specctl.ops.given import Given
from specctl.ops.load import Loaded, fit, load

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
CPU = torch.device("cpu")

# Refused although it validates, because the runtime does not compute it.
NOT_COMPUTED = {
    "SD716": "a family, an algorithm, a part or a quantisation that no manifest describes",
    "SD811": "a rotary kind, or an odd width of a head",
}
# Refused for a reason that validate gives under another code.
SAID_AS = {
    "SD710": "SD221",  # a map in a file of its own is no tensor that a manifest could name
    "SD816": "SD507",  # a stored head that the config says is the embedding
}
# Refused for weights, which validate reads with --deep only: then it says what load says.
SAID_BY_DEEP = {"SD532": {"SD532"}, "SD817": {"SD520"}}


@cache
def _opened(name: str) -> Loaded | None:
    """Return a fixture that validates without errors by itself."""
    try:
        loaded = load(str(CHECKPOINTS / name))
    except DiagnosticError:
        return None
    return None if has_errors(loaded.diagnostics) else loaded


@cache
def _targets() -> tuple[str, ...]:
    """Return the targets of families that the runtime has."""
    found = ((name, _opened(name)) for name in NAMES)
    return tuple(
        name for name, item in found if item and item.target and item.target.decoder is not None
    )


def _fitting(draft: Loaded) -> Iterator[tuple[str, Loaded, tuple[Diagnostic, ...]]]:
    """Yield the targets that a draft fits, the completed draft, and what is said about the pair."""
    for name in _targets():
        target = _opened(name)
        assert target is not None
        pair = fit(draft, target)
        if not has_errors(pair.diagnostics):
            yield name, pair.draft, (*pair.diagnostics, *target.diagnostics)


def _manifest(target: str, draft: str | None) -> Manifest:
    """Return the manifest, with a token count where the files state none (SD301)."""
    sources = str(CHECKPOINTS / target), None if draft is None else str(CHECKPOINTS / draft)
    try:
        return build_manifest(*sources, given=Given()).manifest
    except DiagnosticError as error:
        if "SD301" not in {found.code for found in error.diagnostics}:
            raise
    return build_manifest(*sources, given=Given(num_speculative_tokens=2)).manifest


def _refusals(target: str, draft: str | None) -> set[str]:
    """Return the codes of the errors on the way from two directories to loaded models."""
    try:
        load_models(_manifest(target, draft), Path(), device=CPU, dtype=torch.float32)
    except DiagnosticError as error:
        return {found.code for found in error.diagnostics if found.severity == "error"}
    return set()


def _unsaid(
    refusals: Iterable[str], said: Iterable[Diagnostic], loaded: Loaded, target: Loaded | None
) -> set[str]:
    """Return the refusals that neither validate nor the tables above account for."""
    codes = {found.code for found in said}
    left = {
        code
        for code in refusals
        if code not in codes and code not in NOT_COMPUTED and SAID_AS.get(code) not in codes
    }
    if not left & SAID_BY_DEEP.keys():
        return left
    deep = {found.code for found in deep_findings(loaded, target, lambda file, done, total: None)}
    return {code for code in left if not SAID_BY_DEEP.get(code, set()) & deep}


@pytest.mark.parametrize("name", NAMES)
def test_a_valid_fixture_loads_or_its_refusal_was_said(name: str) -> None:
    loaded = _opened(name)
    if loaded is None:
        return  # an error says it
    if loaded.target is not None:
        refusals = _refusals(name, None)
        assert _unsaid(refusals, loaded.diagnostics, loaded, None) == set()
        return
    for target, completed, said in _fitting(loaded):
        refusals = _refusals(target, name)
        left = _unsaid(refusals, said, completed, _opened(target))
        assert left == set(), f"with {target}"
