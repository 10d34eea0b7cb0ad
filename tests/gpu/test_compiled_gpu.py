"""No request waits for a kernel to be compiled: a mixed load adds none after the start."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.llm import LLM
from tests import real_model
from tests.engine_harness import make_world
from tests.fake_graph import make_llm
from tests.mixed_load import KINDS, load, mixed_request
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)


def compiled() -> Counter[str]:
    """Return how many variants of each kernel were compiled in this process."""
    from triton.runtime import JITFunction

    counts: Counter[str] = Counter()
    for name, module in list(sys.modules.items()):
        if not name.startswith("runtime.kernels.cuda"):
            continue
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.module == name:
                kept = value.device_caches.values()
                counts[value.__name__] = sum(len(caches[0]) for caches in kept)
    return counts


@pytest.mark.parametrize("kind", ["none", "eagle3", "mtp", "dspark"])
def test_a_mixed_load_compiles_nothing(tmp_path: Path, kind: str) -> None:
    if kind == "mtp":
        world = last_state_world(tmp_path, "mtp", device=CUDA, dtype=torch.bfloat16)
    elif kind == "dspark":
        world = make_block_world(tmp_path, BlockCase(), device=CUDA, dtype=torch.bfloat16)
    else:
        world = make_world(tmp_path, device=CUDA, dtype=torch.bfloat16)
    gamma = 0 if kind == "none" else 3
    longest = min(world.models.target.max_positions, 1024)
    llm, _ = make_llm(
        world, is_eager=True, proposer=kind, num_speculative_tokens=gamma, max_num_requests=8,
        max_model_len=longest, max_num_batched_tokens=1024, prefill_buckets=(32, 64),
        batch_buckets=(1, 2, 4, 8), num_kv_blocks=8 * longest // 8 + 1,
    )  # fmt: skip
    report = llm.engine.graph_report
    assert report.num_graphs > 0
    assert report.num_warm_steps > 0
    before = compiled()
    assert before.total() > 0
    load(llm, longest=longest - 32)
    after = compiled()
    assert after == before, {
        name: n - before[name] for name, n in after.items() if n != before[name]
    }


def test_smollm2_compiles_nothing_after_the_start(tmp_path: Path) -> None:
    manifest = real_model.write_manifest(tmp_path)
    llm = LLM.from_manifest(
        manifest, Overrides(device="cuda", max_model_len=2048, max_num_requests=32)
    )
    report, before = llm.engine.graph_report, compiled()
    sys.stdout.write(
        f"\n{report.num_graphs} graphs in {report.capture_s:.1f} s, {report.num_warm_steps} eager "
        f"steps in {report.warm_up_s:.1f} s, {before.total()} kernels\n"
    )
    load(llm, longest=1500)
    many = [mixed_request(600 + i, 40 + 3 * i, KINDS[0]) for i in range(32)]
    llm.generate(many)
    llm.generate([replace(r, request_id=f"{r.request_id}s", params=KINDS[1]) for r in many])
    after = compiled()
    llm.close()
    assert after == before, {
        name: n - before[name] for name, n in after.items() if n != before[name]
    }
