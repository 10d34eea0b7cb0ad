"""What one on-disk format is: how it is recognised, read and written.

Invariants: a format's `claim` looks at the evidence only, never at paths; formats do not know each
other except by `refines`. A layout is a group of tensor names that only some formats can hold.
Claims are light and asked of every checkpoint; a reader or writer is imported by the first call of
it (`at`), because a start of the command line needs one of forty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from specctl.checkpoint import Checkpoint
from specctl.contract.file_names import CONFIG
from specctl.draft import Algorithm, DraftCheckpoint, Role
from specctl.formats.generic_keys import generic_forms, matching

if TYPE_CHECKING:
    from specctl.formats.written import WriteRequest, Written

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Tensor names that tell a draft's layout.

    Args:
        name: of the layout, for messages.
        pattern: regular expression that a whole key matches; indexes in keys are written `{i}`.
    """

    name: str
    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What detection may look at.

    Args:
        config: config.json's object, empty when there is none.
        architecture: first entry of `architectures`, None without one.
        generic: every key with its indexes written `{i}` -> the first such key of the files.
        layouts: layout -> the key that shows it.
        file_names: plain files of the directory, for markers such as `medusa_lm_head.pt`.
    """

    config: Mapping[str, object]
    architecture: str | None
    generic: Mapping[str, str]
    layouts: Mapping[str, str]
    file_names: tuple[str, ...]

    def first_key(self, pattern: str) -> str | None:
        """Return the mark of the first key whose generic form matches, None without one."""
        found = next(matching(pattern, self.generic), None)
        return None if found is None else f"tensor {self.generic[found]}"

    def config_mark(self, *keys: str) -> str | None:
        """Return the mark of the first of the keys that the config states, None without one."""
        found = next((key for key in keys if self.config.get(key) is not None), None)
        return None if found is None else f"{CONFIG}#/{found}"

    def value_mark(self, key: str, *values: object) -> str | None:
        """Return the mark of a config key that has one of the values."""
        value = self.config.get(key)
        return f"{CONFIG}#/{key} = {value}" if value in values else None

    def architecture_mark(self, *names: str) -> str | None:
        """Return the mark of the architecture when it is one of the names."""
        if self.architecture not in names:
            return None
        return f"{CONFIG}#/architectures/0 = {self.architecture}"

    def layout_mark(self, *names: str) -> str | None:
        """Return the mark of the first layout that is seen, None without one."""
        found = next((name for name in names if name in self.layouts), None)
        return None if found is None else f"tensor {self.layouts[found]}"

    @property
    def is_speculators(self) -> bool:
        """Tell whether the config declares a Speculators type, whichever."""
        return isinstance(self.config.get("speculators_model_type"), str)


@dataclass(frozen=True, kw_only=True, slots=True)
class Late(Generic[Given, Made]):
    """A function that is imported by its first call; made with `at`.

    Args:
        module: full name of the module.
        function: its name there.
        first: arguments before the one of the call.
    """

    module: str
    function: str
    first: tuple[object, ...]

    def resolve(self) -> Callable[..., Made]:
        """Import the module and return the function."""
        return cast("Callable[..., Made]", getattr(import_module(self.module), self.function))

    def __call__(self, given: Given, /) -> Made:
        """Call the function."""
        return self.resolve()(*self.first, given)


def at(module: str, function: str, *first: object) -> Late[Given, Made]:
    """Return a function of another module by name; what it takes and gives is the row's promise."""
    return Late(module=module, function=function, first=first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format; a row of the registry.

    Args:
        name: of the dialect, as reports and `convert --to` spell it.
        title: for people.
        role: of a checkpoint in this format.
        algorithm: what the draft computes, None for a target.
        layouts: layouts that its tensors may show; another one beside it is SD202.
        claim: returns the mark by which the evidence is of this format, None when it is not.
        read: reader (`at`), None for a format that is recognised only (SD205).
        source: where the rules were read: project, file or version.
        refines: formats whose claim this one's claim overrules.
        is_bundled: lives inside a target's checkpoint; the target's claim overrules it and
            `Detection.bundled` names it.
        write: writer of the canonical form (`at`), None when the format cannot be written.
    """

    name: str
    title: str
    role: Role
    algorithm: Algorithm | None
    layouts: tuple[str, ...]
    claim: Callable[[Evidence], str | None]
    read: Late[Checkpoint, DraftCheckpoint] | None
    source: str
    refines: tuple[str, ...] = ()
    is_bundled: bool = False
    write: Late[WriteRequest, Written] | None = None


def _generic_forms(keys: Iterable[str]) -> dict[str, str]:
    """Return generic form -> the first key of that form, in the order of the keys."""
    listed = sorted(keys)
    forms = generic_forms(listed)
    first = dict.fromkeys(forms, "")
    first.update(zip(reversed(forms), reversed(listed), strict=True))  # the first key comes last
    return first


def _seen_layouts(generic: Mapping[str, str], layouts: Iterable[Layout]) -> dict[str, str]:
    """Return layout -> the first key that shows it.

    One expression for all layouts first: a file may have a million forms of names.
    """
    listed = list(layouts)
    any_layout = "|".join(f"(?:{layout.pattern})" for layout in listed)
    shown = {form: generic[form] for form in matching(any_layout, generic)}
    seen: dict[str, str] = {}
    for layout in listed:
        matches = re.compile(layout.pattern).fullmatch
        found = next((key for form, key in shown.items() if matches(form)), None)
        if found is not None:
            seen.setdefault(layout.name, found)
    return seen


def gather_evidence(checkpoint: Checkpoint, layouts: Iterable[Layout]) -> Evidence:
    """Return what detection looks at."""
    config = checkpoint.config or {}
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    generic = _generic_forms(checkpoint.tensors)
    return Evidence(
        config=config,
        architecture=first if isinstance(first, str) else None,
        generic=MappingProxyType(generic),
        layouts=MappingProxyType(_seen_layouts(generic, layouts)),
        file_names=checkpoint.file_names,
    )
