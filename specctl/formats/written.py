"""What a format's writer returns: a config and, for every tensor, where its bytes come from.

Invariants: bytes are copied or gathered from stored tensors, never re-encoded; only small integer
vectors (maps) are computed. A writer reads no weights and writes no file; `specctl.convert` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specctl.checkpoint.tensor_entry import DTYPE_BITS
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import TensorRef
from specctl.draft import DraftCheckpoint, TargetCheckpoint

Origin = Literal["draft", "target"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A stored tensor as it is.

    Args:
        ref: the stored tensor.
        origin: whose files hold it.
        shape: another shape of the same number of elements, None to keep the stored one.
    """

    ref: TensorRef
    origin: Origin = "draft"
    shape: tuple[int, ...] | None = None

    @property
    def dtype(self) -> str:
        """Element type, in safetensors' spelling."""
        return self.ref.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape as written."""
        return self.ref.shape if self.shape is None else self.shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a stored matrix, in the order given: a full-vocabulary head cut to a map."""

    ref: TensorRef
    rows: tuple[int, ...]
    origin: Origin = "draft"

    @property
    def dtype(self) -> str:
        """Element type, in safetensors' spelling."""
        return self.ref.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape as written."""
        return (len(self.rows), *self.ref.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Tensors one after another along axis 0; with `leading`, as a new axis of that many entries.

    Experts: gate rows, then up rows, expert by expert, `leading` = number of experts.

    Args:
        parts: in order, of one dtype and equal trailing shape.
        leading: entries of a new first axis, None to join along the first axis.
        origin: whose files hold the parts.
    """

    parts: tuple[TensorRef, ...]
    leading: int | None = None
    origin: Origin = "draft"

    @property
    def dtype(self) -> str:
        """Element type, in safetensors' spelling."""
        return self.parts[0].dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape as written."""
        rows = sum(part.shape[0] for part in self.parts)
        rest = self.parts[0].shape[1:]
        if self.leading is None:
            return (rows, *rest)
        return (self.leading, rows // self.leading, *rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A contiguous run of rows of a stored tensor, with an own shape: one expert of a stack.

    Args:
        ref: the stored tensor.
        begin_bytes: start inside the tensor.
        shape: as written.
        origin: whose files hold it.
    """

    ref: TensorRef
    begin_bytes: int
    shape: tuple[int, ...]
    origin: Origin = "draft"

    @property
    def dtype(self) -> str:
        """Element type, in safetensors' spelling."""
        return self.ref.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape as written."""
        return self.shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """Computed little-endian bytes: a map or a mask."""

    dtype: str
    out_shape: tuple[int, ...]
    data: bytes


TensorSource = Copy | Rows | Joined | Span | Values


def num_bytes(source: TensorSource) -> int:
    """Return the bytes that a tensor takes in the output."""
    return math.prod(source.out_shape) * DTYPE_BITS[source.dtype] // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """What a writer is given.

    Args:
        draft: normalized facts, completed by the target and the user's given facts.
        target: None when the user gave none; a writer that needs it reports SD602.
        target_name: hub id or path to record as the target, None when unknown.
    """

    draft: DraftCheckpoint
    target: TargetCheckpoint | None = None
    target_name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A checkpoint in another dialect, described.

    Args:
        config: config.json's object; keys in the order written.
        tensors: key -> source of its bytes.
        diagnostics: SD601 for every loss (the user must name it), SD602 when it cannot be
            represented, infos on what was added.
        copied_files: file beside the weights -> its name in the output.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]
    diagnostics: tuple[Diagnostic, ...] = ()
    copied_files: Mapping[str, str] = field(default_factory=dict)
