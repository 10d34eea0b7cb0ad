"""Look up a diagnostic code by number or by name."""

from __future__ import annotations

from difflib import get_close_matches

from specctl.contract.codes import CODES, Code


def find_code(name: str) -> Code | None:
    """Return the entry for `SD302`, `sd302`, `302` or `anchor-width-mismatch`; None if unknown."""
    text = name.strip()
    key = text.upper() if text.upper().startswith("SD") else f"SD{text}"
    if key in CODES:
        return CODES[key]
    return next((code for code in CODES.values() if code.slug == text.lower()), None)


def _nearest_codes(name: str) -> tuple[str, ...]:
    """Return up to three codes whose number or name is close to `name`, each with its slug."""
    names = {code.code: code for code in CODES.values()} | {c.slug: c for c in CODES.values()}
    wanted = name.strip().upper() if name.upper().startswith("SD") else name.strip().lower()
    matches = get_close_matches(wanted, names, n=3, cutoff=0.5)
    found = dict.fromkeys(names[match].code for match in matches)
    return tuple(f"{code} {CODES[code].slug}" for code in found)


def unknown_code(name: str) -> str:
    """Return what to tell the user of a name that is no code, with the codes that are close."""
    near = ", ".join(f"`{match}`" for match in _nearest_codes(name))
    return f"there is no code `{name}`" + (f"; did you mean {near}?" if near else "")
