"""Hand a model's builder its tensors by role, each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from runtime.loading.files import StoredTensor, WeightFiles
from runtime.loading.shards import shard_of
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose


class TensorReader:
    """A `TensorSource` over open files that knows what was taken."""

    def __init__(
        self,
        files: WeightFiles,
        keys: Mapping[str, str],
        *,
        dtype: torch.dtype,
        ranks: Ranks = ONE_RANK,
        least_rows: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Read from `files` in `dtype`.

        Args:
            files: open files that hold every key.
            keys: role -> key.
            dtype: of every tensor that is handed out.
            ranks: a rank is handed its shard of each tensor.
            least_rows: role -> rows; a tensor of fewer is followed by rows of zeros.
        """
        self._files = files
        self._ranks = ranks
        self._least_rows = least_rows
        self._left = dict(keys)
        self._dtype = dtype
        self._zero: list[Diagnostic] = []

    def __call__(self, role: str) -> torch.Tensor:
        """Return the tensor of a role; a role is handed out once."""
        assert role in self._left, f"role {role} is taken twice, or its shape was never checked"
        key = self._left.pop(role)
        stored = self._files.tensors[key]
        least = self._least_rows.get(role, 0)
        shard = shard_of(role, stored.shape, self._ranks, least_rows=least)
        value = self._files.read(key, self._dtype, shard)
        if not role.endswith(".bias"):
            self.note(key, value)
        return value

    def note(self, key: str, value: torch.Tensor) -> None:
        """Keep in mind for `zero_weights` when a weight that was read is zero throughout."""
        if value.numel() and not value.any():
            self._zero.append(_all_zero(self._files.tensors[key]))

    @property
    def zero_weights(self) -> tuple[Diagnostic, ...]:
        """SD521 for every norm and matrix so far that is zero throughout."""
        return tuple(self._zero)

    def assert_all_taken(self) -> None:
        """Check that the builder asked for every tensor that it announced."""
        assert not self._left, f"announced but never read: {sorted(self._left)}"


def _all_zero(stored: StoredTensor) -> Diagnostic:
    return diagnose(
        "SD521",
        where=stored.place,
        message=f"every element of `{stored.key}` is zero",
        expected="trained values",
        found="zeros",
    )


def refuse_errors(problems: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the findings when none is an error.

    Raises:
        DiagnosticError: with all findings, when one of them is an error.
    """
    found = tuple(problems)
    if any(problem.severity == "error" for problem in found):
        raise DiagnosticError(found)
    return found
