"""No gate of pipeline, tensor or prefill/decode parallelism asks which architecture a model is.

What a stage, a rank or a role needs is a fact of the manifest (layers, heads, where an embedding
is); a list of architecture names would refuse models that have those facts.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GATES = (
    "runtime/parallel",
    "runtime/disagg",
    "runtime/engine",
    "runtime/server",
    "runtime/config/parallel.py",
    "runtime/config/stages.py",
    "runtime/loading/draft_embedding.py",
    "runtime/loading/load.py",
    "runtime/models/staged.py",
    "specctl/contract/stage_split.py",
    "specctl/contract/rank_split.py",
    "specctl/ops/plan.py",
)
NAMES = ("architecture", "model_type", "family")


def gate_files() -> list[Path]:
    paths = [ROOT / name for name in GATES]
    return [
        file
        for path in paths
        for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))
    ]


@pytest.mark.parametrize("file", gate_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_gate_reads_an_architecture(file: Path) -> None:
    """Neither the facts that name one, nor a text that looks like the name of a model class."""
    tree = ast.parse(file.read_text("utf-8"))
    read = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in NAMES
    ]
    named = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and ("ForCausalLM" in node.value or "ForConditionalGeneration" in node.value)
    ]
    assert (read, named) == ([], []), file
