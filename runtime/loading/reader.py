"""Hand a model's builder its tensors by role, each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from runtime.loading.files import WeightFiles
from runtime.loading.shards import shard_of
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.diagnostics import Diagnostic, DiagnosticError


class TensorReader:
    """A `TensorSource` over open files that knows what was taken."""

    def __init__(
        self,
        files: WeightFiles,
        keys: Mapping[str, str],
        *,
        dtype: torch.dtype,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Read from `files` in `dtype`.

        Args:
            files: open files that hold every key.
            keys: role -> key.
            dtype: of every tensor that is handed out.
            ranks: a rank is handed its shard of each tensor.
        """
        self._files = files
        self._ranks = ranks
        self._left = dict(keys)
        self._dtype = dtype

    def __call__(self, role: str) -> torch.Tensor:
        """Return the tensor of a role; a role is handed out once."""
        assert role in self._left, f"role {role} is taken twice, or its shape was never checked"
        key = self._left.pop(role)
        shard = shard_of(role, self._files.tensors[key].shape, self._ranks)
        return self._files.read(key, self._dtype, shard)

    def assert_all_taken(self) -> None:
        """Check that the builder asked for every tensor that it announced."""
        assert not self._left, f"announced but never read: {sorted(self._left)}"


def refuse_errors(problems: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the findings when none is an error.

    Raises:
        DiagnosticError: with all findings, when one of them is an error.
    """
    found = tuple(problems)
    if any(problem.severity == "error" for problem in found):
        raise DiagnosticError(found)
    return found
