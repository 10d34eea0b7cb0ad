"""A draft beside a target of another precision (C031).

The text is that of the target served; acceptance by position tells the two targets apart.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from runtime.engine.request import RequestInput
from runtime.engine.text import load_tokenizer
from tests.engine_harness import World, prompt_of
from tests.fake_graph import ids_of, make_llm
from tests.tiny_agreeing import write_agreeing_pair
from tests.tiny_manifest import load_tiny
from tests.tiny_pair import Pair, edit_tensors

REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}", prompt_ids_target=prompt_of(index, 9), max_tokens=40,
        ignore_eos=True,
    )
    for index in range(6)
)  # fmt: skip


def round_to_three_bits(tensors: dict[str, torch.Tensor]) -> None:
    """Give each row of a layer's weights and of the head seven values."""
    for name, value in tensors.items():
        if value.dim() == 2 and "embed" not in name:
            scale = value.abs().amax(dim=1, keepdim=True).float() / 3
            tensors[name] = ((value.float() / scale).round() * scale).to(value.dtype)


def run(pair: Pair) -> tuple[dict[str, tuple[int, ...]], tuple[float, ...], float]:
    """Return the ids, acceptance by position and accept length, after comparing with no draft."""
    manifest = pair.manifest()
    world = World(
        manifest=manifest, models=load_tiny(manifest), tokenizer=load_tokenizer(pair.target)
    )
    plain, _ = make_llm(world, is_eager=True, proposer="none")
    llm, _ = make_llm(world, is_eager=True, proposer="eagle3", num_speculative_tokens=4)
    found = ids_of(llm.generate(REQUESTS))
    assert found == ids_of(plain.generate(REQUESTS))
    stats = llm.engine.stats()
    assert stats.accept_length is not None
    return found, stats.acceptance_per_position, stats.accept_length


def test_a_rounded_target_has_its_own_text_and_acceptance(tmp_path: Path) -> None:
    pair = write_agreeing_pair(tmp_path / "whole")
    rounded = replace(write_agreeing_pair(tmp_path / "rounded"), draft=pair.draft)
    edit_tensors(rounded.target, round_to_three_bits)
    ids, positions, length = run(pair)
    other_ids, other_positions, other_length = run(rounded)
    assert other_ids != ids
    assert len(other_positions) == len(positions) == 4
    assert abs(other_length - length) > 0.05
    assert all(
        abs(one - other) > 0.01 for one, other in zip(positions, other_positions, strict=True)
    )
