"""What a round costs: seconds to draft and seconds to verify, measured on one machine and kept.

A table is only good for what it was measured on: the manifest's facts, device, dtype, kernels and
how rounds run. All of that is in the file, and a table measured on anything else is refused: a
wrong table, like a flat one, would choose draft counts that slow decoding down and say nothing.

Legend: B requests, G drafts, N verified rows.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from runtime.config.round_sizes import ROW_BIN, RoundSize
from specctl.contract.diagnostics import DiagnosticError, diagnose

LAYOUT = 1
DEFAULT_SUFFIX = ".costs.json"

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Cell = tuple[_Count, _Count, Annotated[float, msgspec.Meta(ge=0)]]


class MeasuredOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a table's seconds depend on besides batch and rows.

    Args:
        fingerprint: of the manifest.
        device: name of the hardware, not its index.
        dtype: of weights and KV.
        kernel_table: digest of the pinned tiles.
        proposer: who drafts.
        rounds: `graphs` (captured) or `eager`.
    """

    fingerprint: str
    device: str
    dtype: str
    kernel_table: str
    proposer: str
    rounds: str


class CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of a table.

    Args:
        layout: version of this file's layout.
        row_bin: rows of a bin.
        draft: (batch, drafts, seconds) of one draft phase.
        verify: (batch, rows at the bin's end, seconds) of everything else in a round.
        num_timings: timings behind each entry, which is their median.
    """

    layout: int
    measured_on: MeasuredOn
    row_bin: Annotated[int, msgspec.Meta(ge=1)]
    draft: tuple[_Cell, ...]
    verify: tuple[tuple[_Count, _Count, _Seconds], ...]
    num_timings: _Count


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Seconds of a round by batch, drafts and verified rows.

    Args:
        measured_on: what the seconds depend on besides.
        draft_s: (batch, drafts) -> seconds of the draft phase.
        verify_s: (batch, rows rounded up to a bin) -> seconds of all else in a round.
        num_timings: timings behind each entry.
    """

    measured_on: MeasuredOn
    draft_s: Mapping[tuple[int, int], float]
    verify_s: Mapping[tuple[int, int], float]
    num_timings: int

    def has(self, size: RoundSize) -> bool:
        """Whether a size's own entries are in the table."""
        has_draft = not size.num_drafts or (size.batch, size.num_drafts) in self.draft_s
        return has_draft and (size.batch, bin_end(size.num_rows)) in self.verify_s

    def round_s(self, batch: int, num_drafts: int, num_rows: int) -> float:
        """Return the seconds of a round: its own entry, else that of the next larger size.

        Beyond the largest measured size its seconds grow in proportion.
        """
        draft_s = _at(self.draft_s, batch, num_drafts) if num_drafts else 0.0
        return draft_s + _at(self.verify_s, batch, bin_end(num_rows))


def bin_end(num_rows: int) -> int:
    """Return the rows of the bin that holds `num_rows`."""
    return -(-num_rows // ROW_BIN) * ROW_BIN


def save_costs(table: CostTable, path: Path) -> None:
    """Write a table; a reader never sees half of it.

    Raises:
        DiagnosticError: SD838, the file cannot be written.
    """
    file = CostFile(
        layout=LAYOUT,
        measured_on=table.measured_on,
        row_bin=ROW_BIN,
        draft=_cells(table.draft_s),
        verify=_cells(table.verify_s),
        num_timings=table.num_timings,
    )
    text = msgspec.json.format(msgspec.json.encode(file), indent=1)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(text + b"\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DiagnosticError(
            diagnose(
                "SD838",
                where=str(path),
                message=f"the cost table cannot be written: {error.strerror}",
            )
        ) from error


def load_costs(path: Path, expected: MeasuredOn) -> CostTable | None:
    """Return the table of a file; None when there is no file.

    Raises:
        DiagnosticError: SD837, it is no cost table or was measured on something else.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unfit(path, f"the cost table cannot be read: {error.strerror}") from error
    try:
        file = msgspec.json.decode(content, type=CostFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unfit(path, f"this is no cost table: {error}") from error
    if (file.layout, file.row_bin) != (LAYOUT, ROW_BIN):
        raise _unfit(
            path,
            "the cost table has another layout",
            expected=f"layout {LAYOUT}, bins of {ROW_BIN} rows",
            found=f"layout {file.layout}, bins of {file.row_bin} rows",
        )
    for name in MeasuredOn.__struct_fields__:
        wanted, found = getattr(expected, name), getattr(file.measured_on, name)
        if wanted != found:
            raise _unfit(
                path,
                f"the cost table was measured with another {name}",
                expected=wanted,
                found=found,
            )
    return CostTable(
        measured_on=file.measured_on,
        draft_s={(batch, count): seconds for batch, count, seconds in file.draft},
        verify_s={(batch, rows): seconds for batch, rows, seconds in file.verify},
        num_timings=file.num_timings,
    )


def _at(seconds: Mapping[tuple[int, int], float], batch: int, size: int) -> float:
    batches = sorted({known for known, _ in seconds})
    place = min(bisect.bisect_left(batches, batch), len(batches) - 1)
    sizes = sorted(known for group, known in seconds if group == batches[place])
    at = bisect.bisect_left(sizes, size)
    if at < len(sizes):
        return seconds[batches[place], sizes[at]]
    return seconds[batches[place], sizes[-1]] * size / sizes[-1]


def _cells(seconds: Mapping[tuple[int, int], float]) -> tuple[_Cell, ...]:
    return tuple((batch, size, value) for (batch, size), value in sorted(seconds.items()))


def _unfit(
    path: Path, message: str, *, expected: object = None, found: object = None
) -> DiagnosticError:
    return DiagnosticError(
        diagnose("SD837", where=str(path), message=message, expected=expected, found=found)
    )
