"""The look-up of embedding and head: spellings, copies, ties, containers, byte ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.checkpoint import Checkpoint, open_checkpoint, write_safetensors
from specctl.embedding import EMBEDDING_KEYS, HEAD_KEYS, locate, read_rows

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
ROWS, WIDTH = 4, 3


def opened(name: str) -> Checkpoint:
    return open_checkpoint(CHECKPOINTS / name)


def made(tmp_path: Path, config: dict[str, object], *keys: str) -> Checkpoint:
    """Return a checkpoint with a matrix [4, 3] of F32 for each key; bytes name key and row."""
    tensors = {
        key: ("F32", (ROWS, WIDTH), b"".join(_row(key, row) for row in range(ROWS))) for key in keys
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return open_checkpoint(tmp_path)


def _row(key: str, row: int) -> bytes:
    return f"{key[:10]:<10}{row:>2}".encode()


@pytest.mark.parametrize("key", EMBEDDING_KEYS)
def test_every_spelling_of_the_embedding_is_found(key: str, tmp_path: Path) -> None:
    found = locate(made(tmp_path, {}, key))
    assert found.embedding is not None
    assert found.embedding.key == key
    assert (found.is_tied, found.head) == (True, found.embedding)


@pytest.mark.parametrize("key", HEAD_KEYS)
def test_every_spelling_of_the_head_is_found(key: str, tmp_path: Path) -> None:
    found = locate(made(tmp_path, {}, "model.embed_tokens.weight", key))
    assert found.head is not None
    assert (found.head.key, found.is_tied) == (key, False)


@pytest.mark.parametrize(
    "copy",
    [
        "model.layers.61.embed_tokens.weight",
        "mtp.embed_tokens.weight",
        "model.mtp.embed_tokens.weight",
        "mtp.0.emb.tok_emb.weight",
        "nextn.embed_tokens.weight",
        "eagle_module.embed_tokens.weight",
        "draft.model.embed_tokens.weight",
        "model.mtp_block.0.embed_tokens.weight",
    ],
)
def test_a_copy_is_never_picked_even_when_it_is_alone(copy: str, tmp_path: Path) -> None:
    alone = locate(made(tmp_path, {}, copy))
    assert alone.embedding is None
    both = locate(made(tmp_path, {}, copy, "model.language_model.embed_tokens.weight"))
    assert both.embedding is not None
    assert both.embedding.key == "model.language_model.embed_tokens.weight"
    assert [ref.key for ref in both.decoys] == [copy]


def test_a_copy_that_comes_first_in_the_file_is_passed_over(tmp_path: Path) -> None:
    """Speculators resolves by suffix and can hit the copy (vLLM's DeepSeek checkpoints)."""
    keys = ("a.layers.8.embed_tokens.weight", "model.language_model.embed_tokens.weight")
    found = locate(made(tmp_path, {}, *keys))
    assert found.embedding is not None
    assert found.embedding.key == keys[1]


def test_deepseek_v4_spells_both_without_a_module() -> None:
    """Vllm issue 43459: `embed.weight`, `head.weight`, prediction layers below `mtp.0.`."""
    found = locate(opened("hf-deepseek-v4-mtp"))
    assert found.embedding is not None
    assert found.head is not None
    assert (found.embedding.key, found.head.key) == ("embed.weight", "head.weight")
    assert found.decoys == ()


@pytest.mark.parametrize("name", ["hf-llama-sharded", "hf-llama-bin"])
def test_index_and_torch_archives_give_the_same_rows(name: str) -> None:
    checkpoint = opened(name)
    found = locate(checkpoint)
    assert found.embedding is not None
    assert found.embedding.file in {file.file for file in checkpoint.files}
    single = opened("hf-llama-tied")
    other = locate(single).embedding
    assert other is not None
    assert read_rows(checkpoint, found.embedding, 5, 9) == read_rows(single, other, 5, 9)
    assert found.embedding.file.endswith(".bin" if name.endswith("bin") else ".safetensors")


def test_shards_without_an_index_are_searched(tmp_path: Path) -> None:
    for file, key in (("a", "model.embed_tokens.weight"), ("b", "lm_head.weight")):
        tensor = ("F32", (ROWS, WIDTH), bytes(4 * ROWS * WIDTH))
        write_safetensors(tmp_path / f"{file}.safetensors", {key: tensor})
    found = locate(open_checkpoint(tmp_path))
    assert found.embedding is not None
    assert found.head is not None
    assert (found.embedding.file, found.head.file) == ("a.safetensors", "b.safetensors")


def test_rows_are_read_by_their_own_range(tmp_path: Path) -> None:
    key = "model.embed_tokens.weight"
    checkpoint = made(tmp_path, {}, "a.weight", key)
    ref = locate(checkpoint).embedding
    assert ref is not None
    assert read_rows(checkpoint, ref, 2, 4) == _row(key, 2) + _row(key, 3)
    assert read_rows(checkpoint, ref, 4, 4) == b""
    with pytest.raises(ValueError, match="not inside"):
        read_rows(checkpoint, ref, 3, 5)


@pytest.mark.parametrize(
    ("config", "is_tied", "codes"),
    [
        ({"tie_word_embeddings": True}, True, []),
        ({"tie_word_embeddings": False}, False, []),
        ({"text_config": {"tie_word_embeddings": True}}, True, []),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}, False, []),
        (
            {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            True,
            ["SD418"],
        ),
        ({}, False, []),
    ],
)
def test_the_roots_flag_wins_and_a_contradiction_is_reported(
    config: dict[str, object], is_tied: bool, codes: list[str], tmp_path: Path
) -> None:
    found = locate(made(tmp_path, config, "model.embed_tokens.weight", "lm_head.weight"))
    assert found.is_tied is is_tied
    assert found.head == (found.embedding if is_tied else found.stored_head)
    assert [d.code for d in found.diagnostics] == codes


def test_two_genuine_spellings_are_reported(tmp_path: Path) -> None:
    found = locate(made(tmp_path, {}, "model.embed_tokens.weight", "tok_embeddings.weight"))
    assert [d.code for d in found.diagnostics] == ["SD505"]


def test_an_unknown_spelling_is_taken_when_it_is_the_only_one(tmp_path: Path) -> None:
    found = locate(made(tmp_path, {}, "thinker.model.embed_tokens.weight"))
    assert found.embedding is not None
    assert found.embedding.key == "thinker.model.embed_tokens.weight"
    two = ("thinker.model.embed_tokens.weight", "talker.model.embed_tokens.weight")
    assert locate(made(tmp_path, {}, *two)).embedding is None


def test_a_checkpoint_without_either_says_so(tmp_path: Path) -> None:
    found = locate(made(tmp_path, {}, "fc.weight"))
    assert (found.embedding, found.head, found.is_tied) == (None, None, None)


def test_a_drafts_own_embedding_is_found() -> None:
    found = locate(opened("speculators-eagle3-own-embedding"))
    assert found.embedding is not None
    assert found.embedding.key == "embed_tokens.weight"


def test_the_guide_prints_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    root = CHECKPOINTS.parents[1]
    text = (root / "docs" / "how-to" / "find-the-embedding.md").read_text("utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    shown: list[str] = []
    monkeypatch.chdir(root)
    exec(code, {"print": lambda *values: shown.append(" ".join(map(str, values)))})
    said = [line.partition("# ")[2] for line in code.splitlines() if line.startswith("print(")]
    assert shown == said
