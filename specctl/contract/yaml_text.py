"""YAML and JSON text <-> plain values, without the surprises of either.

Invariants: a key occurs once in its mapping; only YAML 1.2 core scalars are recognised (`no` is
text, `1e5` a number, `2024-01-01` text); anchors, aliases, merge keys and tags are refused, so a
small file cannot expand to a large one. Text that `emit` writes is read back equal.
*Source:* YAML 1.2.2 chapter 10.3 (core schema); PyYAML implements the YAML 1.1 types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = (
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
)


class _Loader(yaml.SafeLoader):
    """Core-schema loader that reports duplicate keys; `name` is the file as the user wrote it."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own class attribute)

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.file = name
        self.duplicates: list[Diagnostic] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(problem="anchors and aliases", problem_mark=event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="explicit tags", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="keys must be text", problem_mark=node.start_mark)
        key = key_node.value
        if key in values:
            loader.duplicates.append(
                diagnose(
                    "SD704",
                    where=f"{loader.file}:{key_node.start_mark.line + 1}",
                    message=f"key `{key}` occurs twice in one mapping",
                    expected="one line",
                    found=f"a second one on line {key_node.start_mark.line + 1}",
                )
            )
        values[key] = loader.construct_object(value_node, deep=True)
    return values


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(node.value).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """YAML 1.1 quoting rules plus ours, so that both kinds of readers see the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_flow(dumper: _Dumper, data: _Flow) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)


def _represent_list(dumper: _Dumper, data: Sequence[Any]) -> yaml.Node:
    is_flat = all(not isinstance(item, (dict, list, tuple)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_flat)


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Dumper.add_representer(_Flow, _represent_flow)
_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(tuple, _represent_list)


def parse(text: str, *, name: str, is_json: bool) -> object:
    """Return the plain value of a YAML or JSON text.

    Args:
        text: the whole document.
        name: the file, for the places of diagnostics.
        is_json: read strict JSON instead of YAML.

    Raises:
        DiagnosticError: SD703 (no YAML or JSON), SD704 (a key twice; all of them).
    """
    try:
        return _parse_json(text, name) if is_json else _parse_yaml(text, name)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _unreadable(f"{name}:{line}", f"not a plain YAML document: {error.problem}") from None
    except yaml.YAMLError as error:
        raise _unreadable(f"{name}#", f"not YAML: {str(error).splitlines()[0]}") from None
    except json.JSONDecodeError as error:
        raise _unreadable(f"{name}:{error.lineno}", f"not JSON: {error.msg}") from None
    except RecursionError:
        raise _unreadable(f"{name}#", "nested too deeply to be a manifest") from None
    except ValueError as error:  # int() of more digits than Python converts
        raise _unreadable(f"{name}#", f"a number cannot be read: {error}") from None


def _parse_yaml(text: str, name: str) -> object:
    loader = _Loader(text, name)
    try:
        value: object = loader.get_single_data()
    finally:
        loader.dispose()
    if loader.duplicates:
        raise DiagnosticError(loader.duplicates)
    return value


def _parse_json(text: str, name: str) -> object:
    duplicates: list[Diagnostic] = []

    def pairs(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in items:
            if key in values:
                duplicates.append(
                    diagnose(
                        "SD704",
                        where=f"{name}#",
                        message=f"key `{key}` occurs twice in one mapping",
                        expected=f"one value, such as {json.dumps(values[key])[:60]}",
                        found=f"a second one, {json.dumps(value)[:60]}",
                    )
                )
            values[key] = value
        return values

    value: object = json.loads(text, object_pairs_hook=pairs)
    if duplicates:
        raise DiagnosticError(duplicates)
    return value


def _unreadable(where: str, message: str) -> DiagnosticError:
    return DiagnosticError(diagnose("SD703", where=where, message=message))


def emit(value: Mapping[str, Any]) -> str:
    """Return deterministic block YAML; mappings wrapped by `one_line` stay on one line."""
    return yaml.dump(
        dict(value),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        width=100_000,
        allow_unicode=False,
    )


def one_line(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping marked to be written on one line."""
    return _Flow(value)
