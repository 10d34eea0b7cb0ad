"""Tiny drafts whose tables over target ids have other rows of padding than the target's."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from runtime.engine.text import load_tokenizer
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import World
from tests.tiny import (
    TOKENIZER_SIZE,
    VOCAB_SIZE,
    write_json,
    write_tiny_eagle3,
    write_tiny_target,
)
from tests.tiny_block import BlockCase, write_tiny_block
from tests.tiny_manifest import load_tiny
from tests.tiny_pair import edit_tensors

FEWER, MORE = TOKENIZER_SIZE + 1, VOCAB_SIZE + 16  # the row after the tokens is the mask's
BLOCKS = {
    "dspark": BlockCase(draft_vocab_size=None, has_own_embedding=True),
    "dflash2": BlockCase(
        markov=None,
        has_selector=True,
        sample_from_anchor=False,
        draft_vocab_size=None,
        has_own_embedding=True,
    ),
}
DRAFTS = ("eagle3", *BLOCKS)


def padded_world(directory: Path, name: str, num_rows: int) -> World:
    """Write and load a two-layer target of `VOCAB_SIZE` rows and a draft that counts `num_rows`.

    Args:
        directory: where both are written.
        name: one of `DRAFTS`; it has an embedding and a head of its own and no map.
        num_rows: of every table over ids; those beyond `VOCAB_SIZE` would win every argmax.
    """
    target = write_tiny_target(directory / "target", num_layers=2, layer_gain=0.08)
    draft = directory / "draft"
    if name == "eagle3":
        write_tiny_eagle3(
            draft, target, draft_vocab_size=None, has_own_embedding=True, boundary_ids=(0, 1, 2)
        )
    else:
        write_tiny_block(draft, target, BLOCKS[name])
    edit_tensors(draft, partial(_of_rows, num_rows))
    config = json.loads((draft / "config.json").read_text("utf-8"))
    config["transformer_layer_config"]["vocab_size"] = num_rows
    config["draft_vocab_size"] = num_rows
    write_json(draft / "config.json", config)
    manifest = emit_manifest(str(target), str(draft), manifest_dir=Path("/"))
    return World(manifest=manifest, models=load_tiny(manifest), tokenizer=load_tokenizer(target))


def _of_rows(num_rows: int, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if value.shape[0] == VOCAB_SIZE:
            added = value.new_full((max(0, num_rows - VOCAB_SIZE), *value.shape[1:]), 50.0)
            tensors[name] = torch.cat((value, added))[:num_rows].contiguous()
