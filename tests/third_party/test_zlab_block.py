"""The classes of dflash 0.1.0 load z-lab files, ours too, with every key in place, and agree with
the reference that the conversions are judged by.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.checkpoint import open_checkpoint
from specctl.ops.convert import convert
from tests.reference_block import Shape, block_logits
from tests.third_party.conftest import VARIABLE
from tests.third_party.zlab_files import ANCHOR, SEED, TOKENS, floats

WORKER = Path(__file__).with_name("zlab_worker.py")


def answers(target: Path, *places: Path) -> dict[str, Any]:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} does not name a Python with dflash 0.1.0")
    probe = [python, "-c", "import dflash.model"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"the Python of {VARIABLE} has no dflash 0.1.0")
    command = [python, str(WORKER), str(target), *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_zlabs_classes_load_and_compute_what_the_reference_does(
    checkpoints: Path, tmp_path: Path
) -> None:
    target = checkpoints / "hf-llama-tiny"
    ours = tmp_path / "ours"
    source = checkpoints / "speculators-dflash2-clean"
    report = convert(str(source), to="zlab-dflash2", out=str(ours), target=str(target))
    assert report.state == "written"
    places = (checkpoints / "zlab-dflash-clean", checkpoints / "zlab-dflash2-clean", ours)
    found = answers(target, *places)
    theirs = floats(target)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, 64, (TOKENS,), generator=generator)
    states = torch.randn(TOKENS, 50, generator=generator)
    for place in places:
        answer = found[str(place)]
        shapes = {
            key.removesuffix(".weight") if "_codebook" in key else key: tuple(shape)
            for key, shape in answer["shapes"].items()
        }
        assert shapes == {k: e.shape for k, e in open_checkpoint(place).tensors.items()}
        assert (answer["block_size"], answer["mask_token_id"]) == (5, 2)
        assert answer["target_layer_ids"] == [0, 1, 3, 5, 6]
        shape = Shape(
            heads=2, kv_heads=1, head_dim=6, layers=2, eps=1e-5, block=5, mask_id=2, group=5
        )
        expected = block_logits(
            floats(place),
            shape,
            embedding=theirs["model.embed_tokens.weight"],
            head=theirs["lm_head.weight"],
            ids=ids,
            states=states,
            anchor=ANCHOR,
        )
        # float32 on both sides; two orders of summation over 18 positions.
        torch.testing.assert_close(torch.tensor(answer["logits"]), expected, atol=2e-5, rtol=1e-4)
