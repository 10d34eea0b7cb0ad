"""A `validate` report as one SARIF 2.1.0 log.

Invariants: every result has a physical location with a URI that is not empty; a region only where
the line is known, so that no annotation points at a line by accident. Rules are the codes that
occur. Severities: `info` is the level `note`.
*Source:* OASIS SARIF 2.1.0; GitHub code scanning refuses results without an artifact location
(codeql-action issues 1738 and 2459) and does not read `originalUriBaseIds` (issue 2456).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specctl import __version__
from specctl.cli import render
from specctl.contract.codes import CODES, FAMILIES, Code
from specctl.contract.text import printable
from specctl.ops.places import Place
from specctl.ops.report import Finding, Mismatch, ValidateReport, diagnostic_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_EXPECTATION: dict[str, Any] = {
    "id": "expected-codes",
    "name": "ExpectedCodes",
    "shortDescription": {"text": "A fixture gives other codes than the list says."},
    "help": {"text": "Correct the fixture, or the entry in the list given with --expect."},
    "defaultConfiguration": {"level": "error"},
}


def sarif_log(report: ValidateReport, places: Mapping[str, Place]) -> dict[str, Any]:
    """Return the log as plain values.

    Args:
        report: what was found.
        places: place of every finding by its `where`.
    """
    if report.mismatches is not None:
        rules = [_EXPECTATION] if report.mismatches else []
        results = [_mismatch(item) for item in report.mismatches]
    else:
        pairs = [(item, r.source) for r in report.results for item in r.diagnostics]
        codes = sorted({item.code for item, _ in pairs})
        rules = [_rule(CODES[code]) for code in codes]
        results = [
            _result(item, source, places[item.where], codes.index(item.code))
            for item, source in pairs
        ]
    driver = {"name": "specctl", "version": __version__, "semanticVersion": __version__}
    run = {
        "tool": {"driver": {**driver, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: Code) -> dict[str, Any]:
    markdown = f"{code.summary}\n\n**Why it matters.** {code.why}\n\n**What to do.** {code.fix}."
    return {
        "id": code.code,
        "name": "".join(part.capitalize() for part in code.slug.split("-")),
        "shortDescription": {"text": code.summary},
        "fullDescription": {"text": code.why},
        "help": {"text": f"{code.fix}. `specctl explain {code.code}`", "markdown": markdown},
        "defaultConfiguration": {"level": _LEVELS[code.severity]},
        "properties": {"tags": [FAMILIES[code.code[2]]]},
    }


def _result(item: Finding, source: str, place: Place, rule_index: int) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": _physical(place, source)}
    logical = _logical(place)
    if logical:
        location["logicalLocations"] = logical
    mark = "\n".join((item.code, item.where, item.message))
    return {
        "ruleId": item.code,
        "ruleIndex": rule_index,
        "level": _LEVELS[item.severity],
        "message": {"text": render.full_text(diagnostic_of(item))},
        "locations": [location],
        "partialFingerprints": {"specctlFinding/v1": hashlib.sha256(mark.encode()).hexdigest()},
        "properties": {"source": printable(source), "place": item.where},
    }


def _mismatch(item: Mismatch) -> dict[str, Any]:
    return {
        "ruleId": _EXPECTATION["id"],
        "ruleIndex": 0,
        "level": "error",
        "message": {"text": f"{printable(item.source)}: {item.problem}"},
        "locations": [{"physicalLocation": _physical(Place(file=None), item.source)}],
    }


def _physical(place: Place, source: str) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": artifact(place.file or source)}
    if place.line is not None:
        region = {"startLine": place.line}
        if place.column is not None and place.end_column is not None:
            region |= {"startColumn": place.column, "endColumn": place.end_column}
        physical["region"] = region
    return physical


def artifact(path: str) -> dict[str, str]:
    """Return the artifact location of a file: relative to the working directory when it is in it.

    Args:
        path: as the user wrote it; a hub source is a URI already.
    """
    text = path.encode("utf-8", "surrogateescape")
    if render.is_hub_place(path):
        return {"uri": quote(text, safe="/:@")}
    full = os.path.abspath(path)  # noqa: PTH100  (lexical: links keep their names)
    inside = os.path.relpath(full)
    if inside != ".." and not inside.startswith("../"):
        name = inside.encode("utf-8", "surrogateescape")
        return {"uri": quote(name, safe="/"), "uriBaseId": "%SRCROOT%"}
    return {"uri": f"file://{quote(Path(full).as_posix().encode('utf-8', 'surrogateescape'))}"}


def _logical(place: Place) -> list[dict[str, str]]:
    if place.tensor:
        name = {"name": place.tensor, "kind": "variable"}
        return [{**name, "fullyQualifiedName": f"{place.file}::{place.tensor}"}]
    if place.pointer:
        key = place.pointer.rpartition("/")[2]
        return [{"name": key, "kind": "property", "fullyQualifiedName": place.pointer}]
    return []
