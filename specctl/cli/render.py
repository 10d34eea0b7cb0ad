"""The one renderer of diagnostics: terminal text, GitHub annotation lines."""

from __future__ import annotations

from specctl.contract.diagnostics import Diagnostic

_COLORS = {"error": "31", "warning": "33", "info": "36"}
_GITHUB = {"error": "error", "warning": "warning", "info": "notice"}
_WIDE = 100


def human(diagnostic: Diagnostic, *, color: bool = False) -> str:
    """Return the terminal form: headline, place, both values, help, notes."""
    d = diagnostic
    severity = f"{d.severity:<7}"
    if color:
        severity = f"\033[{_COLORS[d.severity]}m{severity}\033[0m"
    lines = [f"{d.code} {severity} {d.slug}: {d.message}", f"  --> {d.where}"]
    if d.expected is not None and d.found is not None:
        both = f"   expected: {d.expected}      found: {d.found}"
        if len(both) <= _WIDE:
            lines.append(both)
        else:
            lines += [f"   expected: {d.expected}", f"      found: {d.found}"]
    elif d.expected is not None:
        lines.append(f"   expected: {d.expected}")
    elif d.found is not None:
        lines.append(f"      found: {d.found}")
    if d.help is not None:
        lines.append(f"   help: {d.help}")
    lines += [f"   note: {note}" for note in d.notes]
    lines.append(f"   more: specctl explain {d.code}")
    return "\n".join(lines)


def github(diagnostic: Diagnostic) -> str:
    """Return one workflow command line, which GitHub shows next to the file.

    *Source:* GitHub Actions workflow commands: `%`, CR and LF are escaped in data, `:` and `,` also
    in properties.
    """
    d = diagnostic
    text = [d.message, f"at {d.where}"]
    if d.expected is not None:
        text.append(f"expected: {d.expected}")
    if d.found is not None:
        text.append(f"found: {d.found}")
    if d.help is not None:
        text.append(f"help: {d.help}")
    title = f"{d.code} {d.slug}"
    return github_line(_GITHUB[d.severity], d.where, "\n".join(text), title=title)


def github_line(level: str, where: str, text: str, *, title: str | None = None) -> str:
    """Return `::level file=...::text`, escaped.

    Args:
        level: `error`, `warning` or `notice`.
        where: a diagnostic's place; its file, and line if it has one, are used.
        text: may have several lines.
        title: shown in bold above the text.
    """
    heading = "" if title is None else f",title={_escape_property(title)}"
    return f"::{level} {_file_property(where)}{heading}::{_escape(text)}"


def _file_property(where: str) -> str:
    """Return `file=...`, and `line=...` when the place has one."""
    file = where.partition("#")[0].partition("::")[0]
    name, _, line = file.rpartition(":")
    if name and line.isdigit():
        return f"file={_escape_property(name)},line={line}"
    return f"file={_escape_property(file)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
