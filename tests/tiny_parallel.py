"""A tiny P-EAGLE draft in the layout of Speculators: EAGLE-3, a mask token and its state."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from runtime.engine.text import load_tokenizer
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import World
from tests.tiny import TOKENIZER_SIZE, write_json, write_tiny_eagle3, write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_manifest import CPU, load_tiny

MASK_ID = TOKENIZER_SIZE  # a padding row of the embedding


def write_tiny_peagle(directory: Path, target_dir: Path, *, is_agreeing: bool = True) -> Path:
    """Write the draft: often right at its first token, or of two random layers."""
    if is_agreeing:
        write_agreeing_eagle3(directory, target_dir)
    else:
        write_tiny_eagle3(
            directory, target_dir, num_layers=2, boundary_ids=(0, 1, 2), has_norm_before_fc=True
        )
    path = directory / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(12)
    wide = tensors["fc.weight"].shape[1]
    mask = torch.randn(1, 1, wide, generator=generator).to(tensors["fc.weight"].dtype)
    save_file(tensors | {"mask_hidden": mask}, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["PEagleSpeculator"],
        "mask_token_id": MASK_ID,
        "speculators_model_type": "peagle",
    }
    config["speculators_config"]["algorithm"] = "peagle"
    write_json(directory / "config.json", config)
    return directory


def parallel_world(
    directory: Path,
    *,
    is_agreeing: bool = True,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> World:
    """Write and load a target and its draft, through `specctl manifest`."""
    layers = 4 if is_agreeing else 2
    target = write_tiny_target(directory / "target", num_layers=layers, layer_gain=0.15)
    draft = write_tiny_peagle(directory / "draft", target, is_agreeing=is_agreeing)
    manifest = emit_manifest(str(target), str(draft), num_speculative_tokens=4)
    return World(
        manifest=manifest,
        models=load_tiny(manifest, device=device, dtype=dtype),
        tokenizer=load_tokenizer(target),
    )
