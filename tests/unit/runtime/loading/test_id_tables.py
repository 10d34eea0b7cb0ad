"""Tables of a draft with other rows of padding than its target's: what is read, and by whom."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from runtime.loading import load_models
from runtime.loading.id_tables import map_reach_problems
from runtime.loading.shards import shard_of
from runtime.models import BlockModel, Eagle3Model
from runtime.models.support import decoder_problems
from runtime.models.target import num_reachable_ids
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import HIDDEN_ACTS, Manifest
from specctl.contract.padding_rows import num_token_rows
from specctl.ops.emit_manifest import emit_manifest
from tests.rank_harness import on_ranks
from tests.tiny import VOCAB_SIZE
from tests.tiny_manifest import CPU, tiny_manifest
from tests.tiny_padding import FEWER, MORE, padded_world
from tests.tiny_pair import Pair

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
PLAIN, PADDED = "hf-llama-tiny", "hf-llama-tiny-padded"  # 64 and 72 rows for 64 tokens


def manifest_of(draft: str, target: str, token_map: Path | None = None) -> Manifest:
    return emit_manifest(
        str(CHECKPOINTS / target),
        str(CHECKPOINTS / draft),
        manifest_dir=Path("/"),
        token_map=None if token_map is None else str(token_map),
    )


def eagle3_of(manifest: Manifest, ranks: Ranks = ONE_RANK) -> Eagle3Model:
    draft = load_models(manifest, Path("/"), device=CPU, dtype=torch.float32, ranks=ranks).draft
    assert isinstance(draft, Eagle3Model)
    return draft


def stored(draft: str, key: str) -> torch.Tensor:
    value: torch.Tensor = load_file(CHECKPOINTS / draft / "model.safetensors")[key]
    return value.float()


def test_rows_that_are_missing_are_zeros_and_no_draft_ids() -> None:
    name = "speculators-eagle3-rows-fewer"
    draft = eagle3_of(manifest_of(name, PADDED))
    assert torch.equal(draft.embedding.weight_RD[:64], stored(name, "embed_tokens.weight"))
    assert draft.embedding.weight_RD.shape[0] == 72
    assert not draft.embedding.weight_RD[64:].any()
    assert torch.equal(draft.head_RH, stored(name, "lm_head.weight"))
    assert draft.draft_to_target_R.tolist() == list(range(64))


def test_rows_beyond_the_targets_are_no_draft_ids() -> None:
    name = "speculators-eagle3-rows-more"
    draft = eagle3_of(manifest_of(name, PLAIN))
    assert torch.equal(draft.embedding.weight_RD, stored(name, "embed_tokens.weight"))
    assert torch.equal(draft.head_RH, stored(name, "lm_head.weight")[:64])
    assert draft.draft_to_target_R.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("name", "target"),
    [("speculators-dspark-rows-fewer", PADDED), ("deepspec-dspark-rows-more", PLAIN)],
)
def test_markov_factors_have_a_row_for_each_id(name: str, target: str) -> None:
    models = load_models(manifest_of(name, target), Path("/"), device=CPU, dtype=torch.float32)
    draft = models.draft
    assert isinstance(draft, BlockModel)
    assert draft.markov is not None
    w1 = stored(name, "markov_head.markov_w1.weight")
    assert torch.equal(draft.markov.w1_VM[: w1.shape[0]], w1)
    assert draft.markov.w1_VM.shape[0] == 72
    assert not draft.markov.w1_VM[w1.shape[0] :].any()
    assert draft.markov.w2_RM.shape[0] == draft.draft_to_target_R.numel() == draft.head.num_ids


@pytest.mark.parametrize("num_rows", [FEWER, MORE])
def test_ranks_hold_the_rows_of_the_whole(num_rows: int, tmp_path: Path) -> None:
    manifest = padded_world(tmp_path, "eagle3", num_rows).manifest
    whole = eagle3_of(manifest)
    ids, states = torch.arange(VOCAB_SIZE), torch.eye(whole.head_RH.shape[1])

    def looked_up(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        draft = eagle3_of(manifest, ranks)
        return draft.embedding.rows(ids), draft.head.logits(states)

    for rows, logits in on_ranks(2, looked_up):
        assert torch.equal(rows, whole.embedding.weight_RD[:VOCAB_SIZE])
        assert torch.equal(logits, whole.head.logits(states))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    least=st.integers(0, 50),
    size=st.integers(1, 4),
    role=st.sampled_from(["embedding", "head", "markov_w1"]),
)
def test_shards_make_up_the_padded_table(rows: int, least: int, size: int, role: str) -> None:
    parts = []
    for shard in on_ranks(size, lambda ranks: shard_of(role, (rows, 3), ranks, least_rows=least)):
        if shard is None:
            parts.append((list(range(rows)), rows))
        else:
            assert 0 <= shard.start <= shard.stop <= rows
            parts.append((list(range(shard.start, shard.stop)), shard.size))
    if role == "markov_w1":
        assert parts == [(list(range(rows)), max(rows, least))] * size
        return
    assert [row for read, _ in parts for row in read] == list(range(rows))
    assert len({held for _, held in parts}) == 1
    assert sum(held for _, held in parts) >= max(rows, least)
    # Only the last ranks are padded: a row of the whole lies where its number says.
    for rank, (read, held) in enumerate(parts):
        assert read[:1] in ([], [rank * held])


def test_a_token_map_beyond_a_full_head_is_refused_before_the_load(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps([0, 1, 2, 70]), "utf-8")
    with pytest.raises(DiagnosticError) as caught:
        manifest_of("speculators-eagle3-rows-fewer", PADDED, path)
    (found,) = [d for d in caught.value.diagnostics if d.severity == "error"]
    assert (found.code, found.expected, found.found) == ("SD402", "ids below 64", "70")


def test_a_token_map_picks_rows_of_a_head_with_other_padding(tmp_path: Path) -> None:
    ids, name = [1, 0, 40, 63], "speculators-eagle3-rows-fewer"
    path = tmp_path / "map.json"
    path.write_text(json.dumps(ids), "utf-8")
    manifest = manifest_of(name, PADDED, path)
    draft = eagle3_of(manifest)
    assert torch.equal(draft.head_RH, stored(name, "lm_head.weight")[ids])
    assert draft.draft_to_target_R.tolist() == ids
    assert map_reach_problems(manifest, torch.tensor([63, 0, 1, 2])) == []
    (found,) = map_reach_problems(manifest, torch.tensor([64, 0, 1, 2]))
    assert (found.code, found.found) == ("SD402", "64")


@pytest.mark.parametrize("entries", [None, 90, 104, 200])
def test_the_target_chooses_among_the_rows_that_are_tokens(pair: Pair, entries: int | None) -> None:
    """The rule of the contract is what the target's head goes by."""
    facts = msgspec.structs.replace(pair.manifest().target, tokenizer_size=entries)
    assert num_reachable_ids(facts) == num_token_rows(facts.vocab_size, entries)


@pytest.mark.parametrize("act", [*HIDDEN_ACTS, "gelu", "gelu_pytorch_tanh", "relu", "relu2", ""])
def test_the_listed_activations_are_those_that_run(pair: Pair, act: str) -> None:
    decoder = tiny_manifest(pair.target).target.decoder
    found = decoder_problems(
        msgspec.structs.replace(decoder, hidden_act=act), where="manifest#/target/decoder"
    )
    assert [d.code for d in found] == ([] if act in HIDDEN_ACTS else ["SD813"])
