"""What a format's writer returns: a config and, for every tensor, where its bytes come from.

Invariants: bytes are copied or gathered from stored tensors, never re-encoded; only small integer
vectors (maps) are computed. A writer reads no weights and writes no file; `specctl.convert` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from specctl.checkpoint.tensor_entry import DTYPE_BITS
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import TensorRef
from specctl.draft import DraftCheckpoint, TargetCheckpoint

Origin = Literal["draft", "target"]

LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "aux-layer-ids": "the dialect has no field for the captured layers",
        "confidence-head": "the confidence head is left out",
        "embedding": "the draft's own embedding is left out; engines take the target's",
        "gate": "a gate of the layers that the dialect cannot hold is left out",
        "head": "the draft's own head is left out; engines take the target's",
        "library-load": "Speculators 0.9 itself does not load the result; vLLM does",
        "rank-order": "the order of the map is lost: ids and rows are sorted",
        "t2d": "the mask is left out; it follows from `d2t`",
        "target-name": "the dialect has no field for the target's name",
        "token-count": "the dialect has no field for the number of draft tokens",
        "unknown-fields": "config fields that no rule reads are left out",
        "unmapped-tensors": "tensors that no rule of the source format names are left out",
    }
)
"""What `convert --allow NAME` may give up, by name; writers report it with `lost`."""


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
        is_same_dialect: `normalize`: what the source leaves out may stay out.
    """

    draft: DraftCheckpoint
    target: TargetCheckpoint | None = None
    target_name: str | None = None
    is_same_dialect: bool = False


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


def nothing(*problems: Diagnostic) -> Written:
    """Return a conversion that cannot be done."""
    return Written(config={}, tensors={}, diagnostics=problems)


def lost(name: str, *, where: str, message: str, found: object = None) -> Diagnostic:
    """Return SD601 for a loss that the user must allow by its name, a key of `LOSSES`.

    Args:
        name: of the loss.
        where: the field or tensor of the source that is given up.
        message: what is lost, one line.
        found: the value that is lost.
    """
    return diagnose(
        "SD601",
        where=where,
        message=f"{message}: {LOSSES[name]}",
        expected=f"--allow {name}",
        found=found,
        help=f"Pass `--allow {name}` to accept this loss, or choose another dialect",
    )


def loss_of(diagnostic: Diagnostic) -> str | None:
    """Return the name of the loss that an SD601 reports, None for another code."""
    if diagnostic.code != "SD601":
        return None
    return (diagnostic.expected or "").removeprefix("--allow ")


def unable(
    *, where: str, message: str, expected: object = None, found: object = None
) -> Diagnostic:
    """Return SD602: a fact that the dialect cannot hold, whatever the user allows."""
    return diagnose("SD602", where=where, message=message, expected=expected, found=found)
