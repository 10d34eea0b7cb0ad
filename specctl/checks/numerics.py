"""Checks of the stored numbers: what was never written, never trained, or broken on the way.

A draft with such a tensor loads, and the target still verifies every token, so nothing fails: the
accept length is 1.00. Zero biases, norms of ones, padding rows above the tokenizer and norms stored
as a difference to one are all normal and are not reported.
*Source:* formats' rule "all-zero or NaN head, embedding, norm"; Speculators 0.9.0 (zero embedding);
TorchSpec issue 38 (random embedding); foundry-local issue 910 (zeros in a preallocated file).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from specctl.checkpoint import Checkpoint, TensorEntry
from specctl.checkpoint.config_sections import model_sections
from specctl.checks.freshness import fresh_law
from specctl.checks.quantization import SCALES
from specctl.checks.scan import Scan, is_scannable, scan
from specctl.contract.diagnostics import Diagnostic, diagnose

_VOCABULARY_ROLE = re.compile(r"embedding|head|heads\.\d+\.head|emb\.\d+|head\.\d+")
_NORM_KEY = re.compile(r".*(?:norm|enorm|hnorm|ln_f|\.ln)[^.]*(?:\.\d+)?\.weight")
# Families that store a norm's weight as a difference to one, so that zeros are its first value.
_OFFSET_NORMS = re.compile(r"gemma.*|qwen3_next.*|qwen3_5.*|qwen4.*|step3p5.*")
_MANY_ROWS = 4  # fewer rows decide nothing
_FEW_COLUMNS = 8

Progress = Callable[[TensorEntry], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the checks know of a checkpoint beside its bytes.

    Args:
        checkpoint: whose tensors are read.
        roles: key -> canonical role, as far as a format names them.
        num_real_rows: role -> rows that are tokens; those behind them are padding. A role that is
            not in it may end in padding of unknown length.
        mask_token_id: id that a block draft feeds to its slots, None without one.
        has_mask_file: the mask vector lies in a file of its own.
    """

    checkpoint: Checkpoint
    roles: Mapping[str, str]
    num_real_rows: Mapping[str, int]
    mask_token_id: int | None
    has_mask_file: bool


def check_numbers(reading: Reading, progress: Progress | None = None) -> Iterator[Diagnostic]:
    """Yield SD520 to SD524, SD528 and SD529, reading every weight once in bounded memory.

    Args:
        reading: what is read.
        progress: called with every tensor before it is read.

    Raises:
        DiagnosticError: SD108, SD135 when a file cannot be read to its end.
    """
    tensors = reading.checkpoint.tensors.values()
    for entry in sorted(tensors, key=lambda entry: (entry.file, entry.begin)):
        if progress is not None:
            progress(entry)
        if is_scannable(entry):
            yield from _check(entry, scan(reading.checkpoint, entry), reading)


def _check(entry: TensorEntry, seen: Scan, reading: Reading) -> Iterator[Diagnostic]:
    is_matrix = len(entry.shape) > 1 and not entry.key.endswith(SCALES)
    if seen.num_nonfinite:
        yield _not_finite(entry, seen)
    elif seen.is_zero:
        if is_matrix or _is_suspicious_norm(entry.key, reading.checkpoint.config or {}):
            yield _all_zero(entry, reading.roles.get(entry.key))
    elif is_matrix and seen.is_constant and seen.num_elements > 1:
        yield diagnose(
            "SD528",
            where=entry.describe(),
            message=f"all {seen.num_elements} elements of `{entry.key}` are the same",
        )
    elif is_matrix:
        yield from _check_rows(entry, seen, reading)
        yield from _check_fresh(entry, seen, reading.checkpoint.config or {})


def _not_finite(entry: TensorEntry, seen: Scan) -> Diagnostic:
    place, dims = seen.first_nonfinite or 0, []
    for size in reversed(entry.shape):
        place, rest = divmod(place, size)
        dims.append(rest)
    return diagnose(
        "SD520",
        where=entry.describe(),
        message=f"`{entry.key}` holds {seen.num_nonfinite} NaN or infinite values of "
        f"{seen.num_elements}, the first at {dims[::-1]}",
        expected="finite values",
        found=seen.num_nonfinite,
    )


def _is_suspicious_norm(key: str, config: Mapping[str, object]) -> bool:
    """Tell whether a zero vector is a norm that multiplies every state by zero."""
    if not _NORM_KEY.fullmatch(key):
        return False
    types = [section.get("model_type") for _, section in model_sections(config)]
    return not any(isinstance(t, str) and _OFFSET_NORMS.fullmatch(t) for t in types)


def _all_zero(entry: TensorEntry, role: str | None) -> Diagnostic:
    notes = {
        "embedding": "Speculators 0.9.0 leaves an EAGLE-3 embedding that the file lacks at zero, "
        "and saves it so",
        "markov_w2": "a Markov head starts from zeros: this one adds nothing to any logit",
    }
    note = notes.get(role or "")
    return diagnose(
        "SD521",
        where=entry.describe(),
        message=f"every element of `{entry.key}` is zero",
        expected="trained values",
        found="zeros",
        notes=() if note is None else (note,),
    )


def _check_rows(entry: TensorEntry, seen: Scan, reading: Reading) -> Iterator[Diagnostic]:
    rows = seen.num_elements // entry.shape[-1]
    role = reading.roles.get(entry.key, "")
    is_vocabulary = _VOCABULARY_ROLE.fullmatch(role) is not None
    zero = (
        _real_rows(seen, rows, reading.num_real_rows.get(role)) if is_vocabulary else seen.zero_rows
    )
    if role == "embedding" and reading.mask_token_id in seen.zero_rows:
        zero = tuple(row for row in zero if row != reading.mask_token_id)
        if not reading.has_mask_file:
            yield diagnose(
                "SD529",
                where=entry.describe(),
                message=f"row {reading.mask_token_id} of `{entry.key}`, the mask token's, is zero",
                expected="a trained row",
                found="zeros",
            )
    count = len(zero) if is_vocabulary else seen.num_zero_rows
    is_much = 2 * count > rows and rows >= _MANY_ROWS
    if (is_vocabulary and count) or is_much:
        yield diagnose(
            "SD522",
            where=entry.describe(),
            message=f"{count} of {rows} rows of `{entry.key}` are zero, the first is row {zero[0]}",
            expected="no rows of zeros" + (" below the padding" if is_vocabulary else ""),
            found=f"{count}",
            severity="info" if count <= max(1, rows // 100) else "warning",
        )
    is_copied = 2 * seen.num_distinct_rows < seen.num_sampled_rows
    if is_copied and seen.num_sampled_rows >= _MANY_ROWS and entry.shape[-1] >= _FEW_COLUMNS:
        yield diagnose(
            "SD523",
            where=entry.describe(),
            message=f"only {seen.num_distinct_rows} of {seen.num_sampled_rows} compared rows of "
            f"`{entry.key}` differ from the others",
            expected="different rows",
            found=f"{seen.num_distinct_rows} different ones",
        )


def _real_rows(seen: Scan, rows: int, num_real: int | None) -> tuple[int, ...]:
    """Return the zero rows that belong to tokens.

    Where their number is not known, zero rows at the very end are taken for padding.
    """
    if num_real is not None:
        return tuple(row for row in seen.zero_rows if row < num_real)
    zero, last = set(seen.zero_rows), rows
    while last - 1 in zero:
        last -= 1
    return tuple(row for row in seen.zero_rows if row < last)


def _check_fresh(
    entry: TensorEntry, seen: Scan, config: Mapping[str, object]
) -> Iterator[Diagnostic]:
    law = fresh_law(entry, seen.sample, config)
    if law is not None:
        yield diagnose(
            "SD524",
            where=entry.describe(),
            message=f"`{entry.key}` has the spread {law.spread:.4g} of {law.name}, equal in all "
            "rows and columns",
            expected="rows of different spread",
            found=law.name,
        )
