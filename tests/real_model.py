"""The real target and draft for tests: SmolLM2-135M-Instruct and its drafts.

The target is made by `fixtures/smollm2.py` before pytest runs. Absent, its tests skip with that
reason, and fail under CI=true. Drafts other than the bundled one live outside the repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fixtures.smollm2 import target_dir
from runtime.batch import PreparedBatch
from runtime.config import Overrides
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestInput
from runtime.kv import KVPool
from runtime.loading import load_models
from runtime.models import TargetModel
from runtime.spec.types import SamplingParams
from specctl.contract.codec import dump_manifest, load_manifest
from specctl.ops.emit_manifest import emit_manifest

ROOT = Path(__file__).resolve().parents[1]
DRAFT = ROOT / "fixtures" / "drafts" / "smollm2-135m-eagle3"
PROMPTS = ROOT / "fixtures" / "prompts"
SHARED = Path(os.environ.get("SPECCTL_SHARED", ROOT.parent / "shared"))


def target() -> Path:
    """Return the target's directory, or skip (fail under CI) when it was not made."""
    found = target_dir()
    if not (found / "config.json").is_file():
        reason = "no SmolLM2 target: run `python fixtures/smollm2.py` first"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def shared_draft(name: str) -> Path:
    """Return a draft that is not in the repository, or skip."""
    found = SHARED / "models" / name
    if not found.is_dir():
        pytest.skip(f"no draft {name}: set SPECCTL_SHARED to the folder that holds models/{name}")
    return found


def write_manifest(directory: Path, draft: Path = DRAFT, *, gamma: int = 4) -> Path:
    """Emit the manifest of the real target and a draft."""
    manifest = emit_manifest(
        str(target()), str(draft), manifest_dir=directory, num_speculative_tokens=gamma
    )
    path = directory / f"{draft.name}.yaml"
    path.write_text(dump_manifest(manifest), encoding="utf-8")
    return path


def first_eight() -> tuple[list[list[int]], list[list[int]]]:
    """Return ids of the first eight MT-Bench first turns and their float32 greedy answers."""
    ids = json.loads((PROMPTS / "smollm2_mt_bench_first8_ids.json").read_text("utf-8"))
    texts = json.loads((PROMPTS / "smollm2_mt_bench_first8_greedy128.json").read_text("utf-8"))
    return ids["mt_bench"], texts["f32"]


def shared_prompts() -> Path:
    """Return the folder of the 80-prompt set, or skip."""
    folder = SHARED / "data" / "prompts"
    if not folder.is_dir():
        pytest.skip("no prompt set: set SPECCTL_SHARED to the folder that holds data/prompts")
    return folder


def figures_folder(default: Path) -> Path:
    """Return where figures of a run are kept: $SPECCTL_FIGURES, else `default`."""
    return Path(os.environ.get("SPECCTL_FIGURES", default))


def all_eighty() -> tuple[list[list[int]], list[list[int]]]:
    """Return all 80 prompts and their float32 answers, or skip."""
    folder = shared_prompts()
    ids = json.loads((folder / "smollm2_prompt_ids.json").read_text("utf-8"))
    texts = json.loads((folder / "smollm2_mt_bench_greedy128.json").read_text("utf-8"))
    return ids["mt_bench"], texts["f32"]


def load_target(
    manifest: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> TargetModel:
    """Load the target alone."""
    return load_models(
        load_manifest(manifest),
        manifest.parent,
        device=torch.device(device),
        dtype=dtype,
        with_draft=False,
    ).target


def prompt_logits(target: TargetModel, ids_target_N: torch.Tensor) -> torch.Tensor:
    """Return fp32 logits [N, V] of every position of one prompt, through paged prefill."""
    rows, size = ids_target_N.shape[0], 16
    blocks = -(-rows // size)
    pool = KVPool(
        target.kv_specs,
        num_blocks=blocks + 1,
        kv_block_size=size,
        dtype=target.dtype,
        device=target.device,
    )
    positions = torch.arange(rows, device=target.device)
    batch = PreparedBatch(
        ids_target_N=ids_target_N.to(target.device),
        positions_N=positions,
        slots_N=positions + size,
        row_request_N=torch.zeros(rows, dtype=torch.int32, device=target.device),
        block_tables_BT=torch.arange(1, blocks + 1, dtype=torch.int32, device=target.device)[None],
        max_length=rows,
    )
    return target.logits(target.forward(batch, pool.layers).hidden_ND)


def answer(
    llm: LLM,
    prompts: list[list[int]],
    *,
    max_tokens: int = 128,
    params: SamplingParams | None = None,
) -> tuple[Completion, ...]:
    """Run prompts through an engine."""
    return llm.generate(
        [
            RequestInput(
                request_id=str(number),
                prompt_ids_target=tuple(ids),
                params=params or SamplingParams(),
                max_tokens=max_tokens,
            )
            for number, ids in enumerate(prompts)
        ]
    )


def load(
    manifest: Path,
    *,
    speculative: bool,
    device: str = "cpu",
    dtype: str | None = None,
    concurrency: int = 8,
) -> LLM:
    """Load one arm of the manifest."""
    return LLM.from_manifest(
        manifest,
        Overrides(
            proposer=None if speculative else "none",
            device=device,
            dtype=dtype,
            max_num_requests=concurrency,
        ),
    )
