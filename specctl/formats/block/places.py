"""One fact that writers put in several places: find it, and report places that disagree.

Invariants: all places of a fact are read, so that none of them is an unknown field; the first that
states it decides and every other value is SD208 (vLLM issue 48932: the list of captured layers was
written at one level and read at another).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specctl.formats.fields import Fields

SECTIONS = ("dflash_config", "dspark_config", "eagle_config")


def same(value: object) -> object:
    """Return a stored value as it is."""
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One place of a fact.

    Args:
        fields: the object.
        key: in it.
        meaning: turns the stored value into the fact's, for comparison only.
    """

    fields: Fields
    key: str
    meaning: Callable[[object], object] = same

    @property
    def name(self) -> str:
        """Return the dotted name of the place, `dflash_config.block_size`."""
        return f"{self.fields.pointer}/{self.key}".removeprefix("/").replace("/", ".")

    @property
    def where(self) -> str:
        """Return the place as diagnostics name it."""
        return self.fields.where(self.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """The root of a config and the nested objects that block drafts have."""

    root: Fields
    nested: dict[str, Fields]

    def places(self, *names: str, meaning: Callable[[object], object] = same) -> tuple[Place, ...]:
        """Return the places of dotted names; one in a section that is absent is left out."""
        found: list[Place] = []
        for name in names:
            section, _, key = name.rpartition(".")
            fields = self.nested.get(section) if section else self.root
            if fields is not None:
                found.append(Place(fields=fields, key=key, meaning=meaning))
        return tuple(found)


def open_sections(root: Fields) -> Sections:
    """Return the config's sections; SD207 for one that is no object."""
    nested = {name: fields for name in SECTIONS if (fields := root.section(name)) is not None}
    return Sections(root=root, nested=nested)


def settle(places: tuple[Place, ...]) -> Place | None:
    """Return the first place that states the fact; SD208 for each that states another value."""
    stating = [place for place in places if place.fields.has(place.key)]
    if not stating:
        return None
    first = stating[0]
    value = first.meaning(first.fields.raw(first.key))
    for place in stating[1:]:
        other = place.meaning(place.fields.raw(place.key))
        if other != value:
            place.fields.findings.add(
                "SD208",
                where=place.where,
                message=f"`{place.name}` contradicts `{first.name}`",
                expected=first.fields.raw(first.key),
                found=place.fields.raw(place.key),
            )
    return first
