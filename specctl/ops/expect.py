"""Compare the codes of fixtures with a written list: each exactly its own, none missing, none new.

A list is a YAML mapping from a path, relative to the list's directory, to `codes` (each code once,
any order), for drafts an optional `target`, and `deep` for one whose weights are read. An
`expected.yaml` in a walked subdirectory adds its own entries. Infos count like any other code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.text import printable
from specctl.ops.discover import EXPECTATION_NAME
from specctl.ops.report import Mismatch, ValidateResult


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one fixture must give.

    Args:
        codes: every code it gives, once each.
        target: directory of the target, relative to the list's directory.
        deep: its weights are read as with `--deep`.
    """

    codes: tuple[str, ...]
    target: str | None = None
    deep: bool = False


Expectations = Mapping[str, Expectation]


def read_expectations(path: Path, sources: Iterable[str]) -> dict[str, Expectation]:
    """Return absolute fixture path -> expectation, targets made absolute.

    Args:
        path: the list that was named.
        sources: walked for further lists.

    Raises:
        DiagnosticError: SD703 to SD707 for a list that cannot be read.
    """
    lists = {path.absolute(): path}
    for source in sources:
        for root, directories, files in os.walk(source):
            directories.sort()
            if EXPECTATION_NAME in files:
                deeper = Path(root) / EXPECTATION_NAME
                lists.setdefault(deeper.absolute(), deeper)
    merged: dict[str, Expectation] = {}
    for file in lists.values():
        for name, entry in _read(file).items():
            target = None if entry.target is None else _absolute(file.parent, entry.target)
            key = _absolute(file.parent, name)
            merged[key] = msgspec.structs.replace(entry, target=target)
    return merged


def _absolute(directory: Path, name: str) -> str:
    return os.path.normpath(directory.absolute() / name)


def _read(path: Path) -> dict[str, Expectation]:
    from specctl.contract import strict, yaml_text

    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DiagnosticError(
            diagnose("SD703", where=f"{path}#", message=f"list cannot be read: {error}")
        ) from error
    value = yaml_text.parse(text, name=str(path), is_json=False)
    if not isinstance(value, dict):
        raise DiagnosticError(
            diagnose(
                "SD703",
                where=f"{path}#",
                message="a list of expectations is a mapping from a path to its codes",
                found=strict.describe_value(value),
            )
        )
    return {
        str(name): strict.convert(entry, Expectation, name=f"{path}#/{name}")
        for name, entry in value.items()
    }


def compare(results: Iterable[ValidateResult], expectations: Expectations) -> tuple[Mismatch, ...]:
    """Return every difference between what was found and what is listed."""
    found = {
        os.path.abspath(result.source): (  # noqa: PTH100  (lexical, like the keys)
            result.source,
            tuple(sorted({item.code for item in result.diagnostics})),
        )
        for result in results
    }
    mismatches: list[Mismatch] = []
    for key, (source, codes) in found.items():
        if key not in expectations:
            problem = "is not in the list"
            mismatches.append(
                Mismatch(source=printable(source), expected=None, found=codes, problem=problem)
            )
            continue
        expected = tuple(sorted(set(expectations[key].codes)))
        if expected != codes:
            lacking = [code for code in expected if code not in codes]
            surplus = [code for code in codes if code not in expected]
            problem = "; ".join(
                f"{word} {', '.join(items)}"
                for word, items in (("lacks", lacking), ("has also", surplus))
                if items
            )
            mismatches.append(
                Mismatch(source=printable(source), expected=expected, found=codes, problem=problem)
            )
    mismatches += [
        Mismatch(
            source=printable(key),
            expected=tuple(sorted(set(entry.codes))),
            found=None,
            problem="is listed and was not found",
        )
        for key, entry in expectations.items()
        if key not in found
    ]
    return tuple(mismatches)
