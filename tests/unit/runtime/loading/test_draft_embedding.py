"""Where a last stage takes its draft's input embedding from: every case of the source document.

The manifests are emitted from directories, so the look-up (index first, no index, `.bin`, decoys)
and the load are tested together.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config import Overrides, resolve_config
from runtime.loading import load_models, read_draft
from runtime.loading.draft_embedding import embedding_origin
from runtime.loading.files import WeightFiles
from runtime.loading.load_format import dummy_weight
from runtime.loading.shards import Shard
from runtime.models import TargetModel
from runtime.parallel.ranks import ThreadExchange
from specctl.checkpoint import open_checkpoint
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest, TensorRef
from specctl.contract.stage_split import Stage, split_stages
from specctl.embedding import locate
from specctl.ops.emit_manifest import emit_manifest
from tests.tiny import VOCAB_SIZE, write_tiny_eagle3, write_tiny_target
from tests.tiny_last_state import write_mtp
from tests.tiny_manifest import CPU

EMBEDDING = "model.embed_tokens.weight"
DECOY = "model.layers.61.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A target and a draft on disk."""

    root: Path
    target: Path
    draft: Path

    def manifest(self) -> Manifest:
        return emit_manifest(
            str(self.target), str(self.draft), manifest_dir=self.root, num_speculative_tokens=3
        )


def place(root: Path, *, num_shards: int = 1, is_tied: bool = False) -> Place:
    target = write_tiny_target(
        root / "target", num_layers=2, num_shards=num_shards, is_tied=is_tied
    )
    draft = write_tiny_eagle3(root / "draft", target, boundary_ids=(0, 1, 2))
    return Place(root=root, target=target, draft=draft)


def last_of(manifest: Manifest, num_stages: int = 2) -> Stage:
    return split_stages(manifest, num_stages)[-1]


def load_last(where: Place, manifest: Manifest | None = None) -> tuple[TargetModel, torch.Tensor]:
    """Return the last of two stages and its draft's embedding rows."""
    manifest = manifest or where.manifest()
    models = load_models(
        manifest, where.root, device=CPU, dtype=torch.float32, stage=last_of(manifest)
    )
    assert models.draft is not None
    return models.target, models.draft.embedding.weight_RD


def stored(where: Place) -> torch.Tensor:
    """Return the embedding as some file of the target stores it."""
    for path in sorted(where.target.glob("*.safetensors")):
        tensors = load_file(path)
        if EMBEDDING in tensors:
            rows: torch.Tensor = tensors[EMBEDDING].float()
            return rows
    raise AssertionError("no embedding")


def add_decoy(where: Place, *, in_first_shard: bool) -> None:
    """Store another matrix as `layers.61.embed_tokens`, as DeepSeek's files do."""
    files = sorted(where.target.glob("*.safetensors"))
    path = files[0] if in_first_shard else files[-1]
    tensors = load_file(path)
    tensors[DECOY] = torch.full((VOCAB_SIZE, 32), 7.0, dtype=torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    index = where.target / "model.safetensors.index.json"
    if index.is_file():
        document = json.loads(index.read_text("utf-8"))
        document["weight_map"][DECOY] = path.name
        index.write_text(json.dumps(document), encoding="utf-8")


def test_one_stage_shares_the_target_s(tmp_path: Path) -> None:
    where = place(tmp_path)
    models = load_models(where.manifest(), tmp_path, device=CPU, dtype=torch.float32)
    assert models.draft is not None
    assert models.draft.embedding is models.target.embedding


@pytest.mark.parametrize("in_first_shard", [True, False])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_index_and_no_index_over_a_decoy_inside_a_layer(
    tmp_path: Path, num_shards: int, in_first_shard: bool
) -> None:
    """Three shards have an index; one file has none."""
    where = place(tmp_path, num_shards=num_shards)
    add_decoy(where, in_first_shard=in_first_shard)
    assert (where.target / "model.safetensors.index.json").is_file() is (num_shards > 1)
    manifest = where.manifest()
    assert manifest.target.embedding.key == EMBEDDING
    target, rows = load_last(where, manifest)
    assert target.embedding is None
    assert torch.equal(rows, stored(where))


@pytest.mark.parametrize("in_first_shard", [True, False])
def test_shards_whose_index_is_gone_are_looked_through_and_not_served(
    tmp_path: Path, in_first_shard: bool
) -> None:
    """The look-up reads every shard before it chooses; what to serve would be a guess."""
    where = place(tmp_path, num_shards=3)
    add_decoy(where, in_first_shard=in_first_shard)
    (where.target / "model.safetensors.index.json").unlink()
    found = locate(open_checkpoint(str(where.target)))
    assert found.embedding is not None
    assert found.embedding.key == EMBEDDING
    assert [decoy.key for decoy in found.decoys] == [DECOY]
    with pytest.raises(DiagnosticError, match="SD122"):
        where.manifest()


def test_a_checkpoint_of_bin_files_only(tmp_path: Path) -> None:
    where = place(tmp_path)
    expected = stored(where)
    path = where.target / "model.safetensors"
    torch.save(load_file(path), where.target / "pytorch_model.bin")
    path.unlink()
    manifest = where.manifest()
    assert manifest.target.embedding.file == "pytorch_model.bin"
    assert torch.equal(load_last(where, manifest)[1], expected)


def test_the_full_vocabulary_reaches_the_sharded_load(tmp_path: Path) -> None:
    """Every rank cuts its rows of the whole matrix; together they are all of it."""
    where = place(tmp_path)
    manifest = where.manifest()
    assert manifest.target.embedding.shape == (VOCAB_SIZE, 32)
    parts = []
    for ranks in ThreadExchange(2).ranks():
        draft, _ = read_draft(
            manifest, tmp_path, target=None, device=CPU, dtype=torch.float32, ranks=ranks
        )
        assert draft.embedding.weight_RD.shape == (VOCAB_SIZE // 2, 32)
        parts.append(draft.embedding.weight_RD)
    assert torch.equal(torch.cat(parts), stored(where))


def test_a_tied_head_serves_as_the_embedding_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = place(tmp_path, is_tied=True)
    reads = count_reads(monkeypatch)
    target, rows = load_last(where)
    assert target.head is not None
    assert rows is target.head.weight_RD
    assert torch.equal(rows, stored(where))
    assert reads["target", EMBEDDING] == 1


@pytest.mark.parametrize("num_stages", [1, 2])
def test_each_embedding_byte_is_read_once_on_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    where = place(tmp_path)
    manifest = where.manifest()
    reads = count_reads(monkeypatch)
    for stage in split_stages(manifest, num_stages):
        reads.clear()
        load_models(manifest, tmp_path, device=CPU, dtype=torch.float32, stage=stage)
        assert set(reads.values()) == {1}, reads
        assert reads["target", EMBEDDING] == 1


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    reads: Counter[tuple[str, str]] = Counter()
    read = WeightFiles.read

    def counted(
        self: WeightFiles, key: str, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        reads[self.tensors[key].file.parent.name, key] += 1
        return read(self, key, dtype, shard)

    monkeypatch.setattr(WeightFiles, "read", counted)
    return reads


def test_the_last_stage_logs_what_it_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = place(tmp_path, num_shards=3)
    file = where.manifest().target.embedding.file
    with caplog.at_level(logging.INFO, logger="runtime.loading"):
        load_last(where)
    (line,) = [record.getMessage() for record in caplog.records]
    for part in ("embedding.weight_RD", EMBEDDING, file, f"[{VOCAB_SIZE}, 32]", "from the target"):
        assert part in line


def test_a_draft_s_own_embedding_stays_its_own(tmp_path: Path) -> None:
    where = place(tmp_path)
    write_tiny_eagle3(
        tmp_path / "own", where.target, has_own_embedding=True, boundary_ids=(0, 1, 2)
    )
    own = Place(root=tmp_path, target=where.target, draft=tmp_path / "own")
    manifest = own.manifest()
    assert last_of(manifest).draft_embedding == "own"
    rows = load_last(own, manifest)[1]
    assert torch.equal(
        rows, load_file(own.draft / "model.safetensors")["embed_tokens.weight"].float()
    )


def own_embedding(manifest: Manifest) -> Manifest:
    """State that the draft has an embedding of its own; the caller says which, or none."""
    sharing = manifest.sharing
    assert sharing is not None
    return msgspec.structs.replace(
        manifest,
        sharing=msgspec.structs.replace(
            sharing, embedding_single_stage="own", embedding_multi_stage="own"
        ),
    )


@pytest.mark.parametrize("has_head", [True, False])
def test_a_draft_without_an_embedding_or_with_only_a_head_is_refused(
    tmp_path: Path, has_head: bool
) -> None:
    where = place(tmp_path)
    if not has_head:
        edit(where.draft, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(DiagnosticError) as caught:
        load_last(where, own_embedding(where.manifest()))
    (problem,) = caught.value.diagnostics
    assert problem.code == "SD801"
    assert (problem.found == "a head, which is no embedding") is has_head


def test_a_draft_with_two_candidates_is_refused(tmp_path: Path) -> None:
    where = place(tmp_path)
    draft = write_tiny_eagle3(
        tmp_path / "two", where.target, has_own_embedding=True, boundary_ids=(0, 1, 2)
    )
    manifest = Place(root=tmp_path, target=where.target, draft=draft).manifest()
    edit(draft, lambda t: t.update({"model.tok_embeddings.weight": t["embed_tokens.weight"] + 1}))
    with pytest.raises(DiagnosticError) as caught:
        read_draft(manifest, tmp_path, target=None, device=CPU, dtype=torch.float32)
    (problem,) = caught.value.diagnostics
    assert problem.code == "SD858"
    assert "tok_embeddings" in str(problem.found)
    assert "embed_tokens" in str(problem.found)


def test_a_manifest_that_names_a_copy_inside_a_layer_is_refused(tmp_path: Path) -> None:
    where = place(tmp_path)
    manifest = where.manifest()
    ref: TensorRef = msgspec.structs.replace(manifest.target.embedding, key=DECOY)
    manifest = msgspec.structs.replace(
        manifest, target=msgspec.structs.replace(manifest.target, embedding=ref)
    )
    with pytest.raises(DiagnosticError, match="SD801"):
        read_draft(manifest, tmp_path, target=None, device=CPU, dtype=torch.float32)


def edit(directory: Path, change: object) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path, metadata={"format": "pt"})


class Torn:
    """A target whose missing attribute has nothing to do with an embedding on another stage."""

    @property
    def embedding(self) -> torch.Tensor:
        raise AttributeError("'Adapter' object has no attribute 'base_layer'")


def test_an_unrelated_attribute_error_is_let_through(tmp_path: Path) -> None:
    where = place(tmp_path)
    with pytest.raises(AttributeError, match="base_layer"):
        read_draft(
            where.manifest(),
            tmp_path,
            target=Torn(),  # type: ignore[arg-type]
            device=CPU,
            dtype=torch.float32,
        )


def test_a_dummy_skips_the_read_and_every_stage_makes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = place(tmp_path)
    manifest = where.manifest()
    first, last = (
        load_models(
            manifest, tmp_path, device=CPU, dtype=torch.float32, stage=stage, load_format="dummy"
        )
        for stage in split_stages(manifest, 2)
    )
    assert first.target.embedding is not None
    assert last.draft is not None
    rows = last.draft.embedding.weight_RD
    assert torch.equal(rows, first.target.embedding.weight_RD)
    assert torch.equal(rows, dummy_weight(EMBEDDING, (VOCAB_SIZE, 32)))
    assert not torch.equal(rows, stored(where))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("runai_streamer", "streams"),
        ("remote", "streams"),
        ("sharded_state", "other tensors"),
        ("gguf", "other tensors"),
        ("pigeon", "does not know"),
    ],
)
def test_streaming_and_unknown_load_formats_are_refused_by_name(
    tmp_path: Path, name: str, word: str
) -> None:
    manifest = place(tmp_path).manifest()
    with pytest.raises(DiagnosticError) as caught:
        resolve_config(manifest, Overrides(device="cpu", pipeline_parallel=2, load_format=name))
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.where, problem.found) == ("SD857", "--load-format", name)
    assert word in problem.message


def test_safetensors_as_load_format_refuses_other_files(tmp_path: Path) -> None:
    where = place(tmp_path)
    path = where.target / "model.safetensors"
    torch.save(load_file(path), where.target / "pytorch_model.bin")
    path.unlink()
    manifest = where.manifest()
    for load_format in ("auto", "safetensors"):
        config = resolve_config(manifest, Overrides(device="cpu", load_format=load_format))
        assert config.load_format == load_format
    with pytest.raises(DiagnosticError, match="SD857"):
        load_models(manifest, tmp_path, device=CPU, dtype=torch.float32, load_format="safetensors")


@pytest.mark.parametrize("num_layers", [1, 2])
def test_prediction_layers_of_one_and_several(tmp_path: Path, num_layers: int) -> None:
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    draft = write_mtp(tmp_path / "draft", target, num_layers=num_layers)
    where = Place(root=tmp_path, target=target, draft=draft)
    manifest = where.manifest()
    assert embedding_origin(manifest, None) == "checkpoint"
    assert torch.equal(load_last(where, manifest)[1], stored(where))


def test_a_reduced_head_is_taken_from_the_last_stage_s_head(tmp_path: Path) -> None:
    where = place(tmp_path)
    edit(where.draft, lambda tensors: tensors.pop("lm_head.weight"))
    manifest = where.manifest()
    models = load_models(
        manifest, tmp_path, device=CPU, dtype=torch.float32, stage=last_of(manifest)
    )
    assert models.draft is not None
    assert models.target.head is not None
    ids = models.draft.draft_to_target_R
    assert ids.numel() < VOCAB_SIZE
    assert torch.equal(models.draft.head.weight_RD, models.target.head.weight_RD[ids])
