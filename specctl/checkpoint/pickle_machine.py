"""Read the data of a pickle without executing it: our own small stack machine.

Invariants: no callable named by the pickle is looked up, imported or called; classes and functions
stay names. With placeholders allowed (`--allow-pickle`) an object of an unknown class becomes a
`Placeholder` that keeps the name and drops the state; that executes nothing either. Only opcodes
that build data are known. `pickletools.genops` checks every length against the bytes that are
there, so nothing is allocated by a declared length, and memo numbers are dictionary keys, so a
large one costs nothing.
*Source:* Python's pickle protocol 0-5; the opcodes `torch.save` and `pickle.dumps` emit for plain
data and state dicts.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_PICKLE_BYTES = 256 << 20
_FREE_OBJECTS = 100_000
_BYTES_PER_OBJECT = 8  # one tensor of a state dict: ten objects in some 150 bytes


class PickleRefusedError(Exception):
    """The pickle is damaged or holds something other than plain data."""


class UnknownGlobalError(PickleRefusedError):
    """The pickle wants a class or function that is not in the known set."""

    def __init__(self, name: str) -> None:
        super().__init__(f"refers to `{name}`")
        self.name = name


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function that the pickle names; never resolved."""

    name: str


@dataclass(frozen=True, slots=True)
class PersistentId:
    """A reference to data outside the pickle; torch uses it for storages."""

    value: Any


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What stands for an object of an unknown class; its state was dropped."""

    name: str


Reducer = Callable[[str, tuple[Any, ...]], Any]

_MARK = object()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    )
)
_IGNORED = frozenset(("PROTO", "FRAME"))
_CONTAINERS = frozenset(
    ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT")
)
_SMALL_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickleMachine:
    """Interpret one pickle; `run` returns the object it describes.

    Args:
        reducer: called for `name(*arguments)` in the pickle, returns the value that stands for it
            or raises `UnknownGlobalError`. It receives names, never callables.
        has_placeholders: put a `Placeholder` where an unknown name would end the reading.
    """

    def __init__(self, reducer: Reducer, *, has_placeholders: bool = False) -> None:
        self._reducer = reducer
        self._has_placeholders = has_placeholders
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._num_containers = 0

    def run(self, raw: bytes) -> Any:
        """Return the object described by `raw`.

        Raises:
            UnknownGlobalError: a name outside the reducer's set.
            PickleRefusedError: damaged, too large, or with an opcode that is not plain data.
        """
        if len(raw) > MAX_PICKLE_BYTES:
            raise PickleRefusedError(f"the pickle has {len(raw)} bytes, limit {MAX_PICKLE_BYTES}")
        most = max(_FREE_OBJECTS, len(raw) // _BYTES_PER_OBJECT)
        try:
            for opcode, argument, position in pickletools.genops(raw):
                if opcode.name == "STOP":
                    return self._pop()
                self._step(opcode.name, argument, position)
                if self._num_containers + len(self._memo) > most:
                    raise PickleRefusedError(f"more than {most} objects in {len(raw)} bytes")
        except PickleRefusedError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError) as error:
            # genops raises ValueError for damaged input; the others are a pickle that pops an
            # empty stack, reads an unset memo or applies an opcode to the wrong kind of value.
            raise PickleRefusedError(f"damaged pickle: {error}") from error
        raise PickleRefusedError("the pickle has no end")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefusedError("damaged pickle: mark where a value should be")
        return value

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        items.reverse()
        return items

    def _step(self, name: str, argument: Any, position: int | None) -> None:
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name not in _IGNORED:
            self._step_container(name, argument, position)

    def _step_container(self, name: str, argument: Any, position: int | None) -> None:
        stack = self._stack
        self._num_containers += name in _CONTAINERS
        if name in _SMALL_TUPLES:
            items = [self._pop() for _ in range(_SMALL_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "LIST":
            stack.append(self._pop_to_mark())
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "DICT":
            values = self._pop_to_mark()
            stack.append(dict(zip(map(_key, values[::2]), values[1::2], strict=True)))
        elif name == "APPEND":
            value = self._pop()
            self._target(list).append(value)
        elif name == "APPENDS":
            values = self._pop_to_mark()
            self._target(list).extend(values)
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._target(dict)[_key(key)] = value
        elif name == "SETITEMS":
            values = self._pop_to_mark()
            keys = (_key(k) for k in values[::2])
            self._target(dict).update(zip(keys, values[1::2], strict=True))
        else:
            self._step_object(name, argument, position)

    def _step_object(self, name: str, argument: Any, position: int | None) -> None:
        stack = self._stack
        if name == "GLOBAL":
            stack.append(GlobalName(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            stack.append(GlobalName(f"{module}.{attribute}"))
        elif name == "BINPERSID":
            stack.append(PersistentId(self._pop()))
        elif name == "REDUCE":
            self._num_containers += 1
            arguments, function = self._pop(), self._pop()
            stack.append(self._reduce(function, arguments, position))
        elif name == "BUILD":
            self._pop()  # attributes of a state dict (`_metadata`); plain data has none to keep
            if not isinstance(stack[-1], (dict, Placeholder)):
                raise PickleRefusedError(f"sets the state of an object at byte {position}")
        elif self._has_placeholders:
            self._step_unknown(name, argument, position)
        else:
            raise PickleRefusedError(f"uses the opcode {name} at byte {position}")

    def _reduce(self, function: Any, arguments: Any, position: int | None) -> Any:
        if isinstance(function, Placeholder):
            return function
        if not isinstance(function, GlobalName) or not isinstance(arguments, tuple):
            raise PickleRefusedError(f"damaged pickle: call of a value at byte {position}")
        try:
            return self._reducer(function.name, arguments)
        except UnknownGlobalError as error:
            if not self._has_placeholders:
                raise
            return Placeholder(error.name)

    def _step_unknown(self, name: str, argument: Any, position: int | None) -> None:
        """Put a placeholder for what a plain table has no use for: objects and sets."""
        stack = self._stack
        if name in ("NEWOBJ", "NEWOBJ_EX"):
            for _ in range(1 if name == "NEWOBJ" else 2):
                self._pop()
            stack.append(Placeholder(_class_name(self._pop())))
        elif name == "OBJ":
            stack.append(Placeholder(_class_name(self._pop_to_mark()[0])))
        elif name == "INST":
            self._pop_to_mark()
            stack.append(Placeholder(argument.replace(" ", ".")))
        elif name == "EMPTY_SET":
            stack.append(Placeholder("set"))
        elif name == "FROZENSET":
            self._pop_to_mark()
            stack.append(Placeholder("frozenset"))
        elif name == "ADDITEMS":
            self._pop_to_mark()
        else:
            raise PickleRefusedError(f"uses the opcode {name} at byte {position}")

    def _target(self, kind: type[Any]) -> Any:
        target = self._stack[-1]
        if isinstance(target, Placeholder):
            return kind()  # items of an object that is passed over
        if type(target) is not kind:
            raise PickleRefusedError(f"damaged pickle: {kind.__name__} expected")
        return target


def _class_name(value: Any) -> str:
    return value.name if isinstance(value, (GlobalName, Placeholder)) else type(value).__name__


def _key(value: Any) -> Any:
    # Hashing a tuple nested a million deep overflows the C stack; plain tables have plain keys.
    if value is None or isinstance(value, (str, int, float, bytes)):
        return value
    raise PickleRefusedError(f"a {type(value).__name__} as a dictionary key")
