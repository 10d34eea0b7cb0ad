"""Counts the kernels that a round would launch on a GPU, from a run of it on a CPU.

Every op of `runtime.kernels` counts as what its launcher launches, and every library operation
around them that makes or changes numbers counts as one. Where triton is installed, each call of an
op is launched, too, with nothing run, and must launch as many kernels as are told here: those of
the library that a launcher calls, such as copies of rows that lie apart, are among them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import kernels
from runtime.kernels import block_rows, context_kv, draw, ngram, prefill_rows, round, sample
from runtime.kernels.stream import Stream

LAYER = (
    "scaled_linear", "attend_new_rows", "residual_linear", "scaled_linear", "residual_linear",
)  # fmt: skip
"""What a decoder layer launches."""

_FREE = ("empty", "new_empty", "empty_like", "empty_strided")
"""Library operations that make a tensor and launch nothing; views launch nothing either."""


def _head_logits(*args: Any, **kwargs: Any) -> int:
    norm = args[2] if len(args) > 2 else kwargs.get("norm")
    return 1 + int(norm is not None) + _head_entry(*args, **kwargs)


def _head_entry(*args: Any, **kwargs: Any) -> int:
    norm = args[2] if len(args) > 2 else kwargs.get("norm")
    return int(norm is not None and not isinstance(args[0], Stream))


def _joint_heads(*args: Any, **kwargs: Any) -> int:
    x_MD, _, named, *norm = args
    return 2 + (named.num_named > 0) + _head_entry(x_MD, None, *norm, **kwargs)


def _new_rows(*args: Any, norms: object = None, **kwargs: Any) -> int:
    """Rows of a prefill are rotated, stored and read by a kernel each."""
    is_dense = args[4].rows_per_request is not None
    return 1 if is_dense else 3 + 2 * (norms is not None)


_COUNTS: Mapping[Callable[..., Any], Callable[..., int]] = {
    kernels.attend_new_rows: _new_rows,
    kernels.head_argmax: lambda *args, **kwargs: 2 + _head_entry(*args, **kwargs),
    kernels.joint_head_argmax: _joint_heads,
    kernels.corrected_argmax: lambda *args, **kwargs: 2,
    kernels.head_logits: _head_logits,
    sample.sample: lambda *args, **kwargs: 2,
    draw.draw_tokens: lambda _, sampling, *args, **kwargs: 5 if sampling.has_filters else 3,
    **dict.fromkeys(
        (
            kernels.accept,
            kernels.apply_rope,
            kernels.embed,
            kernels.embed_stream,
            kernels.enter_stream,
            kernels.head_rms_norm,
            kernels.joined_linear,
            kernels.keep_own_ids,
            kernels.keep_rows,
            kernels.linear,
            kernels.logits_argmax,
            kernels.residual_linear,
            kernels.rms_norm,
            kernels.scaled_linear,
            kernels.side_by_side,
            kernels.take_rows,
            kernels.write_kv,
            block_rows.keep_chances,
            block_rows.place_blocks,
            context_kv.write_context_kv,
            ngram.append_history,
            ngram.find_drafts,
            prefill_rows.place_prompts,
            round.finish_round,
            round.prepare_round,
        ),
        lambda *args, **kwargs: 1,
    ),
}
"""Kernels that a call launches, at the sizes that tests have: `linear` has one part of K there."""


class _Library(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.is_inside and name not in _FREE and not _is_view(name, made, args):
            self.counts[name] += 1
        return made


def _is_view(name: str, made: Any, args: Any) -> bool:
    """Return whether an operation that writes nothing returns its first argument's numbers."""
    first = made[0] if isinstance(made, list | tuple) else made
    source = args[0] if args else None
    if name.endswith("_") or not isinstance(source, torch.Tensor):
        return False
    return first.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


@contextmanager
def _launches() -> Iterator[Callable[..., int | None]]:
    """Yield what launches an op and returns how many kernels that takes; None without triton."""
    if importlib.util.find_spec("triton") is None:
        yield lambda *args, **kwargs: None
        return
    from tests.kernel_variants import Variants

    variants = Variants()

    def launched(op: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        before, copies = variants.num_launches, Counter[str]()
        with variants.launching(), _Library(copies):
            op(*args, **kwargs)
        return variants.num_launches - before + copies.total()

    with variants.launches_noted():
        yield launched


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Count by name what runs within; ops inside ops do not count."""
    counts: Counter[str] = Counter()
    library = _Library(counts)

    def counted(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if library.is_inside:
                return op(*args, **kwargs)
            told = _COUNTS[op](*args, **kwargs)
            library.is_inside = True
            try:
                launched = launches_of(op, *args, **kwargs)
                assert launched in (None, told), f"{op.__name__} launches {launched}, not {told}"
                counts[op.__name__] += told
                return op(*args, **kwargs)
            finally:
                library.is_inside = False

        return run

    with _launches() as launches_of, pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != "runtime":
                continue
            for attribute, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__hash__", None) and value in _COUNTS:
                    patch.setattr(module, attribute, counted(value))
        with library:
            yield counts
