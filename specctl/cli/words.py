"""Words that the text forms and the page share, so that a thing is called the same in both."""

from __future__ import annotations

from collections.abc import Mapping

ORIGINS: Mapping[str, str] = {
    "own": "own",
    "target": "the target's",
    "tied": "tied to the embedding",
}
"""Origin of an embedding or head -> words."""

OUTCOMES: Mapping[str, str] = {
    "loads": "nothing is known against it",
    "wrong": "loads, runs wrong",
    "refused": "refused",
    "unknown": "not examined",
}
"""What an engine does with a draft -> words."""


def kind_text(role: str | None, format: str | None) -> str:
    """Return what a source is, such as `draft speculators-eagle3`."""
    role = None if role is None else role.replace("_", " ")
    return " ".join(filter(None, (role, format))) or "unknown"


def count_text(number: int, word: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def counts_text(num_errors: int, num_warnings: int, num_infos: int) -> str:
    """Return `2 errors, 1 info`, or `none`."""
    named = ((num_errors, "error"), (num_warnings, "warning"), (num_infos, "info"))
    return ", ".join(count_text(number, word) for number, word in named if number) or "none"
