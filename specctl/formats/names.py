"""Name tables: role <-> name in a file, as data, and the matching of a file against one.

Invariants: every key of a file becomes exactly one of: a role's tensor, the scale of one, a second
spelling (SD505), a known tensor without use (SD507), or unmapped (SD502). A scale's role is that of
its weight with the scale's suffix, so that a writer which renames the weight renames both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specctl.checkpoint import TensorEntry
from specctl.contract.findings import MAX_OF_A_CODE, Findings
from specctl.contract.manifest import TensorRef
from specctl.contract.roles import TensorRole, generic_role, required_roles
from specctl.formats.generic_keys import INDEX, generic_forms, generic_key, matching


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """One row of a name table.

    Args:
        role: canonical role, `{i}` for an index.
        keys: spellings in files; the first is the one that is written.
    """

    role: str
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored:
    """A key pattern that is known and has no use, with the reason shown to the user."""

    pattern: str
    reason: str


SCALE_SUFFIXES = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
    "scale",
)
"""Last parts of keys that belong to the weight of the same module."""
_SCALE_ENDS = tuple(f".{suffix}" for suffix in SCALE_SUFFIXES)

ROTARY_BUFFER = Ignored(pattern=r".*rotary_emb\.inv_freq", reason="rotary frequencies are computed")


@dataclass(frozen=True, kw_only=True, slots=True)
class NameTable:
    """All names of one dialect."""

    names: tuple[Name, ...]
    ignored: tuple[Ignored, ...] = ()

    def key_of(self, role: str) -> str | None:
        """Return the key that the dialect writes for a role."""
        generic, index = generic_role(role)
        for row in self.names:
            if row.role == role:
                return row.keys[0]
            if row.role == generic and index is not None:
                return row.keys[0].replace("{i}", str(index))
        return self._key_of_scale(role)

    def roles_in(self, keys: Iterable[str]) -> dict[str, str]:
        """Return role -> key of those that the dialect reads, in any spelling; judges none."""
        lookup = self._lookup()
        found: dict[str, str] = {}
        for key in keys:
            role = _role(key, lookup)
            if role is not None:
                found.setdefault(role, key)
        return found

    def match(self, tensors: Mapping[str, TensorEntry], findings: Findings) -> Matched:
        """Assign every tensor of a file, reporting SD502, SD505 and SD507."""
        lookup = self._lookup()
        found: dict[str, TensorRef] = {}
        twice: list[tuple[str, TensorEntry, str]] = []
        unmapped: list[TensorEntry] = []
        unmapped_forms: list[str] = []
        listed = sorted(tensors)
        without_use = "|".join(f"(?:{row.pattern})" for row in self.ignored)
        ignored = frozenset(matching(without_use, listed) if without_use else ())
        for key, form in zip(listed, generic_forms(listed), strict=True):
            entry = tensors[key]
            role = None
            if key in lookup or form in lookup or key.endswith(_SCALE_ENDS):
                role = _role(key, lookup) or _scale_role(key, lookup)
            if role is None and key in ignored:
                reason = self._ignored_reason(key)
                findings.add("SD507", where=entry.describe(), message=f"not used: {reason}")
            elif role is None:
                unmapped.append(entry)
                unmapped_forms.append(form)
            elif role in found:
                twice.append((role, entry, found[role].key))
            else:
                found[role] = as_ref(entry)
        _report_twice(twice, findings)
        _report_unmapped(unmapped, unmapped_forms, findings)
        return Matched(tensors=found, unmapped=tuple(entry.key for entry in unmapped))

    def report_missing(
        self,
        roles: tuple[TensorRole, ...],
        matched: Matched,
        findings: Findings,
        *,
        conditions: frozenset[str],
        num_layers: int,
        num_aux_states: int,
        file: str,
    ) -> None:
        """Report SD501 for every role that the format requires and the file lacks.

        `conditions`, `num_layers` and `num_aux_states` are those of
        `contract.roles.required_roles`; `file` is the weight file named as the place.
        """
        required = required_roles(
            roles, conditions=conditions, num_layers=num_layers, num_aux_states=num_aux_states
        )
        for role in required:
            if role not in matched.tensors:
                key = self.key_of(role) or role
                findings.add(
                    "SD501",
                    where=f"{file}::{key}",
                    message=f"`{key}` is not stored; the format requires it",
                    expected=f"`{key}`",
                    found="nothing",
                )

    def _key_of_scale(self, role: str) -> str | None:
        stem, _, suffix = role.rpartition(".")
        if suffix not in SCALE_SUFFIXES or not stem:
            return None
        key = self.key_of(f"{stem}.weight") or self.key_of(stem)
        return None if key is None else f"{key.removesuffix('.weight')}.{suffix}"

    def _lookup(self) -> dict[str, str]:
        return {key: row.role for row in self.names for key in row.keys}

    def _ignored_reason(self, key: str) -> str | None:
        for row in self.ignored:
            if re.fullmatch(row.pattern, key):
                return row.reason
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTables:
    """What the files of a format hold, and under which names."""

    names: NameTable
    roles: tuple[TensorRole, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """A file's tensors by role, and the keys that have none."""

    tensors: Mapping[str, TensorRef]
    unmapped: tuple[str, ...]


def _role(key: str, lookup: Mapping[str, str]) -> str | None:
    if "{" in key:  # would meet the placeholder of a table row
        return None
    exact = lookup.get(key)
    indexes = INDEX.findall(key)
    if exact is not None or len(indexes) != 1:
        return exact
    role = lookup.get(generic_key(key))
    return None if role is None else role.replace("{i}", str(int(indexes[0])))


def _scale_role(key: str, lookup: Mapping[str, str]) -> str | None:
    """Return the role of a scale whose weight the table knows, None for other keys."""
    stem, _, suffix = key.rpartition(".")
    if suffix not in SCALE_SUFFIXES:
        return None
    role = _role(f"{stem}.weight", lookup)
    return None if role is None else f"{role.removesuffix('.weight')}.{suffix}"


def as_ref(entry: TensorEntry) -> TensorRef:
    """Return the manifest's form of a tensor."""
    return TensorRef(
        key=entry.key,
        file=entry.file,
        shape=entry.shape,
        dtype=entry.dtype,
        begin=entry.begin,
        end=entry.end,
    )


def _report_twice(twice: list[tuple[str, TensorEntry, str]], findings: Findings) -> None:
    if not twice:
        return
    role, entry, other = twice[0]
    findings.add(
        "SD505",
        where=entry.describe(),
        message=f"`{entry.key}` and `{other}` both name the tensor `{role}`"
        + (f", and {len(twice) - 1} more pairs like it" if twice[1:] else ""),
        expected="one spelling",
        found="two",
    )


def _report_unmapped(entries: list[TensorEntry], forms: list[str], findings: Findings) -> None:
    counts = Counter(forms)  # in the order in which the forms appear
    first: dict[str, TensorEntry] = {}
    for form, entry in zip(forms, entries, strict=True):
        first.setdefault(form, entry)
        if len(first) == MAX_OF_A_CODE:
            break
    for form, entry in first.items():
        count = counts[form]
        more = "" if count == 1 else f" and {count - 1} more of the form `{form}`"
        findings.add(
            "SD502",
            where=entry.describe(),
            message=f"`{entry.key}`{more}: not a name of this format; not used",
        )
    findings.count("SD502", max(0, len(counts) - MAX_OF_A_CODE))


def layer_names(prefix: str) -> tuple[Name, ...]:
    """Return the names of one layer's tensors under a key prefix, such as `layers.{i}.`."""
    return tuple(
        Name(role=f"layers.{{i}}.{role}", keys=(prefix + key,)) for role, key in _LAYER_KEYS
    )


_LAYER_KEYS: tuple[tuple[str, str], ...] = (
    *(
        (f"{name}.{kind}", f"self_attn.{name}.{kind}")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for kind in ("weight", "bias")
    ),
    *((name, f"self_attn.{name}.weight") for name in ("q_norm", "k_norm")),
    *(
        (f"{name}.{kind}", f"mlp.{name}.{kind}")
        for name in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "bias")
    ),
    ("input_norm", "input_layernorm.weight"),
    ("post_attention_norm", "post_attention_layernorm.weight"),
)
IGNORED_KEYS: tuple[Ignored, ...] = (
    ROTARY_BUFFER,
    Ignored(
        pattern=r"verifier_(lm_head|norm)\.weight",
        reason="a copy of the target's weights, kept by training",
    ),
)
"""Keys that any draft may hold beside its own, without a use."""


def at_layer(rows: tuple[Name, ...], role_index: int) -> tuple[Name, ...]:
    """Return the rows with `{i}` of their roles fixed; keys are left as they are."""
    return tuple(Name(role=row.role.replace("{i}", str(role_index)), keys=row.keys) for row in rows)
