"""Load z-lab checkpoints with the classes of dflash 0.1.0 and run one block of each.

It runs under the Python of the environment that holds the package, imports nothing of this
repository, takes a target's directory and draft directories, and prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dflash.model as zlab
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

TOKENS, ANCHOR, SEED = 40, 13, 7


def run(place: Path, target: dict[str, torch.Tensor]) -> dict[str, Any]:
    config = json.loads((place / "config.json").read_text("utf-8"))
    kind = getattr(zlab, config.pop("architectures")[0])
    model = kind(Qwen3Config(**config)).float().eval()
    stored = load_file(place / "model.safetensors")
    # The class renames bare codebooks while it loads.
    bare = {key: f"{key}.weight" for key in stored if key.endswith("_codebook")}
    state = {bare.get(key, key): value.float() for key, value in stored.items()}
    model.load_state_dict(state, strict=True)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, config["vocab_size"], (TOKENS,), generator=generator)
    states = torch.randn(TOKENS, model.fc.in_features, generator=generator)
    slots = torch.full((model.block_size,), model.mask_token_id)
    slots[0] = ids[ANCHOR]
    with torch.no_grad():
        hidden = model(
            position_ids=torch.arange(ANCHOR + model.block_size)[None],
            noise_embedding=target["model.embed_tokens.weight"].float()[slots][None],
            target_hidden=states[None, :ANCHOR],
        )
    logits = hidden[0] @ target["lm_head.weight"].float().T
    return {
        "shapes": {key: list(value.shape) for key, value in model.state_dict().items()},
        "block_size": model.block_size,
        "mask_token_id": model.mask_token_id,
        "target_layer_ids": list(model.target_layer_ids),
        "logits": logits.tolist(),
    }


def main() -> None:
    target = load_file(Path(sys.argv[1]) / "model.safetensors")
    answers = {name: run(Path(name), target) for name in sys.argv[2:]}
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
