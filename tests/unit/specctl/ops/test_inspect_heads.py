"""What `inspect` says of drafts made of heads: no captured states, and whose matrices they use."""

from __future__ import annotations

import pytest

from specctl.ops.inspect import inspect
from tests.unit.specctl.formats.edits import CHECKPOINTS


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("medusa-clean", None, "0.1.weight"),
        ("hydra-clean", "target", "hydra_lm_head.0.1.weight"),
        ("mlp-speculator-clean", "speculator.emb.0.weight", "speculator.head.0.weight"),
        ("pard-tied", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_where_embedding_and_head_come_from(name: str, embedding: str | None, head: str) -> None:
    report = inspect(str(CHECKPOINTS / name))
    assert report.aux_hidden is None
    shared = report.sharing.embedding
    if embedding is None:
        assert shared is None
    else:
        assert shared is not None
        own = shared.origin if shared.tensor is None else shared.tensor.key
        assert own == embedding
    assert report.sharing.head is not None
    assert report.sharing.head.tensor is not None
    assert report.sharing.head.tensor.key == head


@pytest.mark.parametrize(
    ("name", "has_list"),
    [
        ("eagle-clean", False),
        ("gemma4-assistant-clean", False),
        ("speculators-mtp-clean", False),
        ("speculators-eagle3-clean", True),
        ("speculators-peagle-clean", True),
        ("zlab-dflash-clean", True),
    ],
)
def test_captured_states_are_listed_for_drafts_that_read_some(name: str, has_list: bool) -> None:
    assert (inspect(str(CHECKPOINTS / name)).aux_hidden is not None) is has_list
