"""Plugin of the interpreter's runs: `triton.language` is patched once a launch, not at each call.

Under the interpreter every call of a device function looks through all names of `triton.language`
to patch them again, which is half of the time of these tests. They are patched already: by the
launch, or, for Triton's own functions, by the first of their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def languages(fn: Callable[..., Any]) -> tuple[ModuleType, ...]:
    """Return the modules that the interpreter would patch for this function."""
    return tuple(value for value in fn.__globals__.values() if value is tl or value is tl.core)


def patch_once(fn: Callable[..., Any]) -> None:
    """Patch what this function sees, unless that was done."""
    if any(tl.core.is_builtin(module.load) for module in languages(fn)):
        patch_each_time(fn)


def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a device function from one that runs."""
    patch_once(self.fn)
    return self.rewrite()(*args, **kwargs)


patch_each_time = interpreter._patch_lang
interpreter.InterpretedFunction.__call__ = call
