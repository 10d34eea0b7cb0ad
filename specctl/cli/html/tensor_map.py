"""Every weight file as a bar, its tensors to scale at the offsets that they have in the file.

Invariants: bytes decide every width; neighbours of one part and layer are drawn as one piece, and
so are pieces too narrow to be seen, so that a picture stays small for any number of tensors. The
numbers are in tables as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from specctl.cli.html.markup import bytes_text, code, escaped, section, table
from specctl.ops.inspect import part_of
from specctl.ops.report import Tensor, Tensors

_UNITS = 1000
_NUM_COLORS = 8
_MAX_ROWS = 2000
_MIXED = "several parts"
_NUMBER = re.compile(r"\.([0-9]{1,6})\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A run of bytes: what it is, for the tooltip, and its color class."""

    label: str
    color: str
    is_odd: bool
    num_tensors: int
    begin: int
    end: int


def tensors_section(tensors: Tensors) -> str:
    """Return the picture, the parts and the list of all tensors."""
    if not tensors.list:
        return ""
    colors = {part.name: f"p{i % _NUM_COLORS}" for i, part in enumerate(tensors.parts)}
    files = {name: tuple(group) for name, group in groupby(tensors.list, key=lambda t: t.file)}
    largest = max(max(tensor.end for tensor in group) for group in files.values())
    bars = "\n".join(_bar(name, group, largest, colors) for name, group in files.items())
    scale = f"Full width: {bytes_text(largest)}. The gap at the left is the header; "
    scale += "shades tell neighbouring layers apart."
    parts = table(
        ("part", "tensors #", "bytes #"),
        (
            (
                f"{_key(colors[part.name])}{escaped(part.name)}",
                f"{part.num_tensors:,}",
                f"{part.num_bytes:,}",
            )
            for part in tensors.parts
        ),
        caption="Tensors by part",
    )
    body = f'{parts}\n<p class="reason">{scale}</p>\n<div class="bars">\n{bars}\n</div>'
    return section("Tensors", f"{body}\n{_list(tensors)}")


def _key(color: str) -> str:
    return f'<span class="key {color}" aria-hidden="true"></span>'


def _bar(name: str, tensors: Sequence[Tensor], largest: int, colors: dict[str, str]) -> str:
    size = max(tensor.end for tensor in tensors)
    unit = largest / _UNITS
    pieces = list(_visible(_pieces(tensors, colors), unit))
    rects = "".join(_rect(piece, unit) for piece in pieces)
    label = f"{name}: {len(tensors)} tensors, {bytes_text(size)}"
    return (
        f'<div class="bar"><div class="file">{code(name)}</div>\n'
        f'<svg viewBox="0 0 {_UNITS} 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(label)}">'
        f'<rect class="ground" width="{size / unit:.2f}" height="20"/>{rects}</svg>\n'
        f'<div class="size">{bytes_text(size)}</div></div>'
    )


def _pieces(tensors: Iterable[Tensor], colors: dict[str, str]) -> Iterator[_Piece]:
    for (part, layer), group in groupby(tensors, key=_part_and_layer):
        run = tuple(group)
        yield _Piece(
            label=part if layer is None else f"{part} {layer}",
            color=colors[part],
            is_odd=layer is not None and layer % 2 == 1,
            num_tensors=len(run),
            begin=run[0].begin,
            end=max(tensor.end for tensor in run),
        )


def _part_and_layer(tensor: Tensor) -> tuple[str, int | None]:
    """Return the part and the number of the layer, from the role or, without one, the key."""
    number = _NUMBER.search(tensor.role or "") or _NUMBER.search(tensor.key)
    return part_of(tensor.role), None if number is None else int(number[1])


def _visible(pieces: Iterable[_Piece], unit: float) -> Iterator[_Piece]:
    """Return pieces of at least half a unit; narrower ones are joined with what follows them."""
    waiting: _Piece | None = None
    for piece in pieces:
        joined = piece if waiting is None else _joined(waiting, piece)
        if joined.end - joined.begin < unit / 2:
            waiting = joined
        else:
            waiting = None
            yield joined
    if waiting is not None:
        yield waiting


def _joined(first: _Piece, second: _Piece) -> _Piece:
    """Return both as one; the larger gives its color."""
    larger = max(first, second, key=lambda piece: piece.end - piece.begin)
    return _Piece(
        label=first.label if first.label == second.label else _MIXED,
        color=larger.color,
        is_odd=larger.is_odd,
        num_tensors=first.num_tensors + second.num_tensors,
        begin=first.begin,
        end=max(first.end, second.end),
    )


def _rect(piece: _Piece, unit: float) -> str:
    odd = " odd" if piece.is_odd else ""
    width = max((piece.end - piece.begin) / unit, 0.4)
    plural = "" if piece.num_tensors == 1 else "s"
    title = f"{piece.label}: {piece.num_tensors} tensor{plural}"
    title += f", {bytes_text(piece.end - piece.begin)} from byte {piece.begin:,}"
    return (
        f'<rect class="{piece.color}{odd}" x="{piece.begin / unit:.2f}" width="{width:.2f}" '
        f'height="20"><title>{escaped(title)}</title></rect>'
    )


def _list(tensors: Tensors) -> str:
    shown = tensors.list[:_MAX_ROWS]
    rows = (
        (
            code(tensor.key),
            escaped(tensor.role or "unmapped"),
            escaped(f"[{','.join(map(str, tensor.shape))}]"),
            escaped(tensor.dtype),
            code(tensor.file),
            f"{tensor.begin:,}",
            f"{tensor.end - tensor.begin:,}",
        )
        for tensor in shown
    )
    head = ("tensor", "role", "shape", "dtype", "file", "offset #", "bytes #")
    left = len(tensors.list) - len(shown)
    more = f"<p>{left:,} more; <code>inspect --json</code> lists all.</p>" if left else ""
    summary = f"<summary>All {tensors.num_tensors:,} tensors</summary>"
    return f"<details>{summary}\n{table(head, rows, caption='All tensors')}{more}</details>"
