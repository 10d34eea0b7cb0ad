"""Imports point down: the arrows of docs/index.md, walked over the whole tree.

A module may import lower ranks, its own package and nothing of a sibling. Imports inside functions
count as well; `if TYPE_CHECKING` blocks do not run and are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# package prefix -> rank; the longest prefix counts; equal rank and another package: refused.
SPECCTL = {
    "specctl.contract": 0,
    "specctl.draft": 1,
    "specctl.checkpoint": 1,
    "specctl.formats": 2,
    "specctl.checks": 2,
    "specctl.tokenmap": 2,
    "specctl.convert": 3,
    "specctl.verdicts": 3,
    "specctl.embedding": 3,  # the look-up under a name that stays
    "specctl.ops": 4,
    "specctl.cli": 5,
    "specctl.__main__": 6,
}
RUNTIME = {
    "runtime.batch": 0,
    "runtime.config": 0,
    "runtime.kv": 0,
    "runtime.kernels": 1,
    "runtime.parallel": 1,
    "runtime.models.layers": 2,
    "runtime.models": 3,
    "runtime.spec": 4,
    "runtime.graphs": 4,
    "runtime.loading": 4,
    "runtime.disagg": 5,
    "runtime.engine": 6,
    "runtime.server": 7,
    "runtime.bench": 7,
    "runtime.main": 8,
}
RANKS = SPECCTL | RUNTIME
SHARED_LEAVES = {"runtime.batch", "runtime.config", "runtime.kv"}
HANDOVER = {
    f"specctl/cli/commands/{name}.py" for name in ("serve", "route", "bench", "generate", "doctor")
}
CONTRACT_NEEDS = {"msgspec", "yaml"}
NEVER_IN_SPECCTL = {"torch", "transformers", "triton", "fastapi", "uvicorn"}
LAZY_IN_SPECCTL = {"rich", "yaml", "tokenizers", "huggingface_hub", "modelscope", "ray"}
LAZY_IN_SPECCTL |= {"numpy", "pyarrow"}  # of the extra `tokenmap` only
# No module imports one of these at its top, but they each other.
LOADED_ON_DEMAND = {
    "specctl/contract/yaml_text.py",
    "specctl/tokenmap/byte_pairs.py",
    "specctl/tokenmap/encoding.py",
    "specctl/tokenmap/scan.py",
    "specctl/tokenmap/token_ids.py",
}


class Import:
    """One imported module and where the statement stands."""

    def __init__(self, file: Path, module: str, line: int, is_top: bool) -> None:
        self.file = file.relative_to(ROOT).as_posix()
        self.module = module
        self.line = line
        self.is_top = is_top

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def python_files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, is_top: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        yield child, is_top
        is_body = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from walk(child, is_top and not is_body)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def imports_of(file: Path) -> list[Import]:
    found: list[Import] = []
    for node, is_top in walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [Import(file, alias.name, node.lineno, is_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_ours = base.partition(".")[0] in ("specctl", "runtime") and is_module(full)
                found.append(Import(file, full if is_ours else base, node.lineno, is_top))
    return found


IMPORTS = [found for file in python_files("specctl", "runtime") for found in imports_of(file)]


def package_of(module: str) -> str | None:
    parts = module.split(".")
    names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((name for name in names if name in RANKS), None)


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_every_module_has_a_rank() -> None:
    names = [
        module_name(f.relative_to(ROOT).as_posix()) for f in python_files("specctl", "runtime")
    ]
    unranked = [n for n in names if package_of(n) is None and n not in ("specctl", "runtime")]
    assert not unranked, f"add to the table, with its arrows: {unranked}"


def breaks_the_order(found: Import) -> bool:
    source, target = package_of(module_name(found.file)), package_of(found.module)
    if found.module in ("specctl", "runtime") or source == target or target is None:
        return False
    if source is None:
        return True
    if source in SHARED_LEAVES and target in SHARED_LEAVES:
        return False
    return RANKS[target] >= RANKS[source]


def test_arrows_point_down_inside_each_package() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.file.partition("/")[0] == found.module.partition(".")[0]
        and breaks_the_order(found)
    ]
    assert not wrong, "\n".join(wrong)


def test_runtime_sees_only_the_contract() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.file.startswith("runtime/")
        and found.module.partition(".")[0] == "specctl"
        and package_of(found.module) != "specctl.contract"
    ]
    assert not wrong, "\n".join(wrong)


def test_specctl_hands_over_through_one_module_lazily() -> None:
    crossings = [
        found
        for found in IMPORTS
        if found.file.startswith("specctl/") and found.module.partition(".")[0] == "runtime"
    ]
    wrong = [
        str(found)
        for found in crossings
        if found.is_top or found.file not in HANDOVER or found.module != "runtime.main"
    ]
    assert not wrong, "\n".join(wrong)


def test_contract_imports_nobody() -> None:
    import sys

    allowed = CONTRACT_NEEDS | set(sys.stdlib_module_names) | {"specctl"}
    wrong = [
        str(found)
        for found in IMPORTS
        if found.file.startswith("specctl/contract/")
        and (
            found.module.partition(".")[0] not in allowed
            or (found.module.startswith("specctl") and "specctl.contract" not in found.module)
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_specctl_never_imports_torch_and_imports_heavy_packages_lazily() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.file.startswith("specctl/")
        and (
            found.module.partition(".")[0] in NEVER_IN_SPECCTL
            or (
                found.is_top
                and found.module.partition(".")[0] in LAZY_IN_SPECCTL
                and found.file not in LOADED_ON_DEMAND
            )
        )
    ]
    on_demand = {module_name(file) for file in LOADED_ON_DEMAND}
    wrong += [
        str(found)
        for found in IMPORTS
        if found.is_top and found.module in on_demand and found.file not in LOADED_ON_DEMAND
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "module", "is_wrong"),
    [
        ("specctl/ops/x.py", "specctl.cli.output", True),
        ("specctl/checks/x.py", "specctl.formats.names", True),
        ("specctl/convert/x.py", "specctl.formats.writing", False),
        ("specctl/convert/x.py", "specctl.ops.load", True),
        ("specctl/formats/x.py", "specctl.checkpoint", False),
        ("runtime/kernels/x.py", "runtime.models", True),
        ("runtime/models/layers/x.py", "runtime.models.target", True),
        ("runtime/models/x.py", "runtime.models.layers", False),
        ("runtime/spec/x.py", "runtime.loading", True),
        ("runtime/kv.py", "runtime.batch", False),
        ("runtime/batch.py", "runtime.kernels", True),
        ("runtime/bench/x.py", "runtime.server", True),
    ],
)
def test_the_rule_itself(file: str, module: str, is_wrong: bool) -> None:
    assert breaks_the_order(Import(ROOT / file, module, 1, True)) is is_wrong
