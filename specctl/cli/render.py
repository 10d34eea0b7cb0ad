"""The one renderer of diagnostics: terminal text, one-line text, GitHub annotation lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specctl.cli.wrapping import USUAL_WIDTH, wrapped
from specctl.contract.diagnostics import Diagnostic

if TYPE_CHECKING:
    from specctl.ops.places import Place

_COLORS = {"error": "31", "warning": "33", "info": "36"}
_GITHUB = {"error": "error", "warning": "warning", "info": "notice"}
_SEVERITY = slice(6, 13)


FIXABLE_MARK = " [*]"


def human(
    diagnostic: Diagnostic, *, color: bool = False, width: int | None = None, mark: str = ""
) -> str:
    """Return the terminal form: headline, place, both values, help, notes.

    Args:
        diagnostic: what to show.
        color: mark the severity.
        width: columns to wrap at; None leaves every text on one line.
        mark: stands behind the short name, such as `FIXABLE_MARK`.
    """
    d = diagnostic
    lines = wrapped(f"{d.code} {d.severity:<7} {d.slug}{mark}: {d.message}", width, rest="   ")
    if color:
        head = lines[0]
        marked = f"\033[{_COLORS[d.severity]}m{head[_SEVERITY]}\033[0m"
        lines[0] = f"{head[: _SEVERITY.start]}{marked}{head[_SEVERITY.stop :]}"
    lines.append(f"  --> {d.where}")
    lines += _values(d, width)
    if d.help is not None:
        lines += wrapped(d.help, width, first="   help: ", rest=" " * 9)
    for note in d.notes:
        lines += wrapped(note, width, first="   note: ", rest=" " * 9)
    lines.append(f"   more: specctl explain {d.code}")
    return "\n".join(lines)


def _values(d: Diagnostic, width: int | None) -> list[str]:
    if d.expected is not None and d.found is not None:
        both = f"   expected: {d.expected}      found: {d.found}"
        if len(both) <= (width or USUAL_WIDTH):
            return [both]
    values = (("   expected: ", d.expected), ("      found: ", d.found))
    return [
        line
        for label, value in values
        if value is not None
        for line in wrapped(value, width, first=label, rest=" " * 13)
    ]


def concise(diagnostic: Diagnostic, place: Place) -> str:
    """Return one line that editors can jump from: `file:line:column: CODE severity name: text`."""
    d = diagnostic
    where = d.where
    if place.line is not None:
        column = "" if place.column is None else f":{place.column}"
        where = f"{place.file}:{place.line}{column}"
    return f"{where}: {d.code} {d.severity} {d.slug}: {d.message}"


def github(diagnostic: Diagnostic, place: Place) -> str:
    """Return one workflow command line, which GitHub shows next to the file.

    *Source:* GitHub Actions workflow commands: `%`, CR and LF are escaped in data, `:` and `,` also
    in properties.
    """
    d = diagnostic
    title = f"{d.code} {d.slug}"
    return github_line(_GITHUB[d.severity], place, full_text(d), title=title)


def full_text(diagnostic: Diagnostic) -> str:
    """Return message, place, both values and help, a line each."""
    d = diagnostic
    text = [d.message, f"at {d.where}"]
    if d.expected is not None:
        text.append(f"expected: {d.expected}")
    if d.found is not None:
        text.append(f"found: {d.found}")
    if d.help is not None:
        text.append(f"help: {d.help}")
    return "\n".join(text)


def is_hub_place(path: str) -> bool:
    """Tell whether a place is on a hub, and so a URI already."""
    return path.startswith(("hf:", "ms:", "http:", "https:"))


def github_line(level: str, place: Place, text: str, *, title: str | None = None) -> str:
    """Return `::level file=...::text`, escaped.

    Args:
        level: `error`, `warning` or `notice`.
        place: its file, line and columns are used as far as it has them.
        text: may have several lines.
        title: shown in bold above the text.
    """
    # An annotation needs a file of the repository that is checked; a hub's stands in the text.
    is_remote = place.file is not None and is_hub_place(place.file)
    properties: list[tuple[str, object]] = [
        ("file", None if is_remote else place.file),
        ("line", place.line),
        ("col", place.column),
        ("endColumn", place.end_column),
        ("title", title),
    ]
    shown = [f"{name}={_escape_property(str(v))}" for name, v in properties if v is not None]
    return f"::{level} {','.join(shown)}::{_escape(text)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
