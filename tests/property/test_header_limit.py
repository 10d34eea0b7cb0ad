"""Legal headers as long as the format allows: at most 12 times their size and 10 seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.contract.digests import MAX_HEADER_BYTES
from tests.fuzz_entry import Cost, check_cpu

MAX_TIMES = 12
MAX_CPU_S = 10
ROOT = Path(__file__).parents[2]
MEASURE = """
import json, sys
from pathlib import Path
from tests.fuzz_entry import measured_once
measured_once(Path("fixtures/checkpoints/hf-llama-clean"), None)
report, cost = measured_once(Path(sys.argv[1]), None)
codes = sorted({item.code for item in report.diagnostics})
print(json.dumps([cost.cpu_s, cost.growth_bytes, report.tensors.num_tensors, codes]))
"""


def entries(form: Callable[[int], bytes], first: bytes = b"") -> bytes:
    """Return a header of `form`'s entries, as long as the format allows."""
    parts = [first] if first else []
    used = len(first) + 2
    while True:
        part = form(len(parts))
        used += len(part) + 1
        if used > MAX_HEADER_BYTES:
            return b"{" + b",".join(parts) + b"}"
        parts.append(part)


def _one_byte(number: int) -> bytes:
    return b'"%x":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}' % (number, number, number + 1)


def _expert(number: int) -> bytes:
    return (
        b'"model.layers.%d.mlp.experts.%d.down_proj.weight":'
        b'{"dtype":"U8","shape":[8,4],"data_offsets":[%d,%d]}'
    ) % (number // 256, number % 256, number * 32, number * 32 + 32)


def _accent(number: int) -> bytes:
    return b'"\xc3\xa9%x":{"dtype":"U8","shape":[],"data_offsets":[0,0]}'.replace(b"[]", b"[0]") % (
        number,
    )


def _empty(number: int) -> bytes:
    return b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number


def _metadata() -> bytes:
    whole = entries(lambda i: b'"%x":""' % i)
    return b'{"__metadata__":' + whole[: whole.rindex(b",", 0, -20)] + b"}}"


LLAMA = b'"model.embed_tokens.weight":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HEADERS: dict[str, Callable[[], bytes]] = {
    "shortest entries": lambda: entries(_empty),
    "one byte each": lambda: entries(_one_byte),
    "experts": lambda: entries(_expert),
    "accents": lambda: entries(_accent),
    "names that the format does not know": lambda: entries(_empty, LLAMA),
    "one long shape": lambda: (
        b'{"a":{"dtype":"U8","shape":[' + b"1," * 49_000_000 + b'1],"data_offsets":[0,1]}}'
    ),
    "metadata": _metadata,
}


@pytest.mark.slow
@pytest.mark.parametrize("title", HEADERS)
def test_a_legal_header_is_affordable(title: str) -> None:
    text = HEADERS[title]()
    assert 0.85 * MAX_HEADER_BYTES < len(text) <= MAX_HEADER_BYTES
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (root / "config.json").write_text(json.dumps(config))
        with (root / "model.safetensors").open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.flush()
            os.truncate(out.fileno(), 8 + len(text) + data_bytes(text))
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    cpu_s, growth, num_tensors, codes = json.loads(done.stdout)
    assert "SD101" not in codes
    assert num_tensors > 0 or title == "metadata"
    check_cpu(Cost(cpu_s=cpu_s, growth_bytes=growth), MAX_CPU_S)
    assert growth <= MAX_TIMES * len(text), f"{growth / len(text):.1f} times"


def data_bytes(text: bytes) -> int:
    """Return where the last entry of a header ends; 0 for metadata alone."""
    tail = text[text.rfind(b"[") + 1 : text.rfind(b"]")]
    return int(tail.rpartition(b",")[2]) if text.endswith(b"]}}") else 0
