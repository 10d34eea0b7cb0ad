"""Which variants of kernels a run on an H200 would compile, found by the same run on a CPU.

While variants are noted, every function that chooses between a CUDA kernel and its twin does both:
first it launches as on CUDA, where a launch is only noted, then its twin gives the values that the
run goes on with. A variant is what Triton keeps a binary by: compile-time arguments, options, and
what it specializes other arguments by (their types; whether an integer is 1 or divisible by 16,
whether an address is). Addresses are those of the CPU; parts of tensors are aligned as on CUDA.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from runtime.kernels import attention, cuda
from runtime.kernels.cuda import device
from tests.fake_graph import FakeGraph

Variant = tuple[str, str]
"""Name of a kernel and what it was compiled for."""

for _module in pkgutil.iter_modules(cuda.__path__):  # those loaded later would keep what is put in
    importlib.import_module(f"{cuda.__name__}.{_module.name}")

_H200 = GPUTarget("cuda", 90, 32)
_options = device.overlap_options


class Variants:
    """Notes variants.

    Attributes:
        seen: so far.
        num_launches: so far, each time that a variant was launched.
    """

    def __init__(self) -> None:
        self.seen: set[Variant] = set()
        self.num_launches = 0
        self._is_on_device = False
        self._is_captured = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is launched, by functions that choose a kernel, too: they do both."""
        with self.launches_noted(), pytest.MonkeyPatch.context() as patch:
            for module, name, function in _choosing():
                patch.setattr(module, name, self._doing_both(function))
            yield

    @contextmanager
    def launches_noted(self) -> Iterator[None]:
        """Note what is launched within `launching`."""

        def note(kernel: JITFunction[Any], *args: Any, grid: object, **given: Any) -> None:
            del given["warmup"]
            self.num_launches += 1
            self.seen.add((kernel.__name__, _variant(kernel, args, given)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.Tensor, "is_cuda", property(lambda _: self._is_on_device), raising=False
            )
            patch.setattr(JITFunction, "run", note)
            patch.setattr(attention, "ROUND_LAYOUTS", {"cpu": "dense"})
            patch.setattr(device, "device_arch", lambda _: _H200.arch)
            for module, name in _names_of(device.overlap_options):
                patch.setattr(module, name, _options_on_device)
            yield

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch as on CUDA, without values."""
        self._is_on_device = True
        try:
            yield
        finally:
            self._is_on_device = False

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Compute what a graph does: its kernels were compiled when it was captured."""
        self._is_captured = True
        try:
            yield
        finally:
            self._is_captured = False

    def _doing_both(self, function: FunctionType) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not (self._is_on_device or self._is_captured):
                with self.launching():
                    function(*args, **kwargs)
            return function(*args, **kwargs)

        return run


def captured_runner(variants: Variants) -> type[FakeGraph]:
    """Return a runner whose rounds and prefills are graphs: they compile nothing."""

    class Captured(FakeGraph):
        def launch(self, *args: Any) -> None:
            with variants.captured():
                super().launch(*args)

        def launch_prefill(self, *args: Any) -> None:
            with variants.captured():
                super().launch_prefill(*args)

        def launch_drafts(self, *args: Any) -> None:
            with variants.captured():
                super().launch_drafts(*args)

    return Captured


def _choosing() -> list[tuple[ModuleType, str, FunctionType]]:
    """Return every name in the runtime of a function that chooses between a kernel and a twin."""
    return [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] == "runtime"
        for name, value in list(vars(module).items())
        if isinstance(value, FunctionType)
        and value.__module__.startswith("runtime.kernels.")
        and "is_cuda" in value.__code__.co_names
    ]


def _names_of(function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    return [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("runtime.kernels.cuda.")
        for name, value in list(vars(module).items())
        if value is function
    ]


def _options_on_device(_: torch.device, *args: Any) -> tuple[int, dict[str, bool]]:
    return _options(torch.device("cuda", 0), *args)


@functools.cache
def _binder(kernel: JITFunction[Any]) -> Callable[..., Any]:
    backend = make_backend(_H200)
    return create_function_from_signature(kernel.signature, kernel.params, backend)  # type: ignore[no-any-return]


def _variant(kernel: JITFunction[Any], args: tuple[Any, ...], given: dict[str, Any]) -> str:
    values, kinds, options = _binder(kernel)(*args, **given)
    parts = [
        f"{name}={values[name] if kind == 'constexpr' else (kind, special)}"
        for name, (kind, special) in zip(kernel.arg_names, kinds, strict=True)
    ]
    return " ".join((*parts, *(f"{name}={value}" for name, value in sorted(options.items()))))
