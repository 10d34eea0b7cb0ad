"""Heads cut by a token map: rows, ids and bits, for drafts that share the target's head or own one.

Also what is refused, and that nothing changes without a map.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.loading import load_models
from runtime.loading.vocabulary import read_draft_to_target
from runtime.models import Eagle1Model, Eagle3Model, MtpModel
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.tiny import EOS_ID, TOKENIZER_SIZE, VOCAB_SIZE, write_tiny_eagle3, write_tiny_target
from tests.tiny_last_state import write_eagle1, write_mtp
from tests.tiny_manifest import CPU
from tests.tiny_pair import edit_tensors

IDS = [EOS_ID, 90, 7, 50, 11, 64, 3]  # in the order of a frequency list
Draft = Eagle1Model | Eagle3Model | MtpModel


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


def write_map(directory: Path, suffix: str, ids: list[int]) -> Path:
    path = directory / f"map{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(ids), "utf-8-sig")
    elif suffix == ".safetensors":
        save_file({"d2t": torch.tensor(ids) - torch.arange(len(ids))}, path)
    else:
        torch.save(ids, path)
    return path


def emit(target: Path, draft: Path, token_map: Path | None) -> Manifest:
    return emit_manifest(
        str(target),
        str(draft),
        num_speculative_tokens=3,
        token_map=None if token_map is None else str(token_map),
    )


def load(manifest: Manifest, dtype: torch.dtype = torch.float32) -> tuple[Draft, torch.Tensor]:
    """Return the draft and the target's head."""
    models = load_models(manifest, Path("/"), device=CPU, dtype=dtype)
    assert isinstance(models.draft, Eagle1Model | Eagle3Model | MtpModel)
    return models.draft, models.target.head_VD


@pytest.mark.parametrize("suffix", [".json", ".pt", ".pth", ".safetensors"])
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_a_map_cuts_the_shared_head_once_at_load(
    target: Path, tmp_path: Path, kind: str, suffix: str
) -> None:
    write = write_mtp if kind == "mtp" else write_eagle1
    path = write_map(tmp_path, suffix, IDS)
    manifest = emit(target, write(tmp_path / "draft", target), path)
    vocabulary = manifest.vocabulary
    assert (vocabulary.map_kind, vocabulary.draft_vocab_size) == ("reduced", len(IDS))
    assert vocabulary.token_map_file == str(path)
    assert vocabulary.token_map_digest is not None
    assert vocabulary.forced_ids == (EOS_ID,)
    draft, head = load(manifest)
    assert draft.draft_to_target_R.tolist() == IDS
    assert torch.equal(draft.head_RH, head[IDS])
    assert draft.head_RH.data_ptr() != head.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_logits_of_kept_rows_are_the_bits_of_the_full_head(
    target: Path, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    write = write_mtp if kind == "mtp" else write_eagle1
    directory = write(tmp_path / "draft", target)
    full, _ = load(emit(target, directory, None), dtype)
    x = torch.randn(5, full.head_RH.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    for ids in (IDS, IDS[:1], list(range(2, 90))):
        cut, _ = load(emit(target, directory, write_map(tmp_path, ".json", ids)), dtype)
        logits = cut.logits(x)
        assert torch.equal(logits, full.logits(x)[:, ids])
        best = logits.argmax(dim=1)
        assert cut.propose_ids(x).tolist() == [ids[i] for i in best.tolist()]


def test_a_head_of_its_own_over_the_whole_vocabulary_is_cut_too(
    target: Path, tmp_path: Path
) -> None:
    directory = write_tiny_eagle3(
        tmp_path / "draft", target, draft_vocab_size=None, boundary_ids=(0, 1, 2)
    )
    draft, _ = load(emit(target, directory, write_map(tmp_path, ".pt", IDS)))
    stored = load_file(directory / "model.safetensors")["lm_head.weight"].float()
    assert torch.equal(draft.head_RH, stored[IDS])
    assert draft.draft_to_target_R.tolist() == IDS


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_without_a_map_the_draft_proposes_what_the_target_can_choose(
    tmp_path: Path, kind: str
) -> None:
    """C045: rows above the tokenizer only pad the matrix; one with a huge norm changes nothing."""
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    edit_tensors(target, lambda t: t["lm_head.weight"][TOKENIZER_SIZE + 1].fill_(500.0))
    if kind == "eagle3":
        directory = write_tiny_eagle3(
            tmp_path / "draft", target, draft_vocab_size=None, boundary_ids=(0, 1, 2)
        )
        edit_tensors(directory, lambda t: t["lm_head.weight"][TOKENIZER_SIZE].fill_(-500.0))
    else:
        write = write_mtp if kind == "mtp" else write_eagle1
        directory = write(tmp_path / "draft", target)
    manifest = emit(target, directory, None)
    assert manifest.vocabulary.draft_vocab_size == VOCAB_SIZE
    draft, head = load(manifest)
    x = torch.randn(64, draft.head_RH.shape[1], generator=torch.Generator().manual_seed(2))
    assert int(draft.propose_ids(x).max()) < TOKENIZER_SIZE
    assert draft.logits(x).shape[1] == TOKENIZER_SIZE
    assert torch.equal(draft.draft_to_target_R, torch.arange(TOKENIZER_SIZE))
    if kind != "eagle3":
        assert draft.head_RH.data_ptr() == head.data_ptr(), "no copy of the target's head"


def test_a_tokenizer_of_unknown_size_leaves_every_row(target: Path, tmp_path: Path) -> None:
    manifest = emit(target, write_mtp(tmp_path / "draft", target), None)
    facts = msgspec.structs.replace(manifest.target, tokenizer_size=None)
    ids = read_draft_to_target(
        msgspec.structs.replace(manifest, target=facts),
        tmp_path,
        None,  # type: ignore[arg-type] # no file is read without a map
    )
    assert torch.equal(ids, torch.arange(VOCAB_SIZE))


def refused(*, target: Path, draft: Path, token_map: Path) -> list[str]:
    with pytest.raises(DiagnosticError) as caught:
        emit(target, draft, token_map)
    return [d.code for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        ([EOS_ID, VOCAB_SIZE], "SD402"),
        ([EOS_ID, -1], "SD402"),
        ([EOS_ID, 9, 9], "SD404"),
        ([], "SD420"),
        (list(range(VOCAB_SIZE)), "SD715"),
    ],
)
def test_maps_that_do_not_fit_are_refused(
    target: Path, tmp_path: Path, ids: list[int], code: str
) -> None:
    """C037 for maps that a user gives."""
    draft = write_mtp(tmp_path / "draft", target)
    assert code in refused(target=target, draft=draft, token_map=write_map(tmp_path, ".json", ids))


def test_a_map_of_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    """C041: the provenance beside a map names its tokenizer; equal sizes do not make it fit."""
    from specctl.contract.fingerprint import digest_bytes

    draft = write_mtp(tmp_path / "draft", target)
    path = write_map(tmp_path, ".json", IDS)
    told = {"tokenizer_digest": "sha256:" + "0" * 64, "files": {}}
    beside = tmp_path / "token_map.provenance.json"
    for digest, code in ((None, "SD436"), ("sha256:" + "1" * 64, "SD437")):
        told["files"] = {path.name: digest or digest_bytes(path.read_bytes())}
        beside.write_text(json.dumps(told), encoding="utf-8")
        assert code in refused(target=target, draft=draft, token_map=path)
    told["tokenizer_digest"] = emit(target, draft, None).target.tokenizer_digest or ""
    told["files"] = {path.name: digest_bytes(path.read_bytes())}
    beside.write_text(json.dumps(told), encoding="utf-8")
    assert emit(target, draft, path).vocabulary.token_map_file == str(path)


def test_padding_rows_in_a_map_are_a_warning(target: Path, tmp_path: Path) -> None:
    """C045 for maps: such a row is never what the target chooses."""
    draft = write_mtp(tmp_path / "draft", target)
    manifest = emit(target, draft, write_map(tmp_path, ".json", [*IDS, TOKENIZER_SIZE]))
    assert [d.code for d in manifest.diagnostics] == ["SD438"]


def test_a_map_without_the_end_id_is_a_warning_in_the_manifest(
    target: Path, tmp_path: Path
) -> None:
    """C039: the draft then never proposes the end."""
    draft = write_mtp(tmp_path / "draft", target)
    manifest = emit(target, draft, write_map(tmp_path, ".json", [5, 9]))
    assert [d.code for d in manifest.diagnostics] == ["SD406"]
    assert manifest.vocabulary.forced_ids == ()


def test_a_map_that_changed_since_the_manifest_is_refused_at_load(
    target: Path, tmp_path: Path
) -> None:
    """C041 at load: the file beside the manifest is not the one that was recorded."""
    path = write_map(tmp_path, ".json", IDS)
    manifest = emit(target, write_mtp(tmp_path / "draft", target), path)
    write_map(tmp_path, ".json", [*IDS[:-1], 4])
    with pytest.raises(DiagnosticError) as caught:
        load(manifest)
    assert [d.code for d in caught.value.diagnostics] == ["SD702"]
    assert "map.json" in caught.value.diagnostics[0].where


def test_a_reduced_head_without_d2t_needs_its_map(target: Path, tmp_path: Path) -> None:
    """C035: never the first ids; with the map the rows of the head are its ids in order."""
    directory = write_tiny_eagle3(
        tmp_path / "draft", target, draft_vocab_size=len(IDS), boundary_ids=(0, 1, 2)
    )
    edit_tensors(directory, lambda t: [t.pop("d2t"), t.pop("t2d")])
    with pytest.raises(DiagnosticError) as caught:
        emit(target, directory, None)
    assert "SD401" in [d.code for d in caught.value.diagnostics]
    draft, _ = load(emit(target, directory, write_map(tmp_path, ".json", IDS)))
    stored = load_file(directory / "model.safetensors")["lm_head.weight"].float()
    assert torch.equal(draft.head_RH, stored)
    assert draft.draft_to_target_R.tolist() == IDS


def test_a_quantised_head_cannot_be_cut(target: Path, tmp_path: Path) -> None:
    """The rows of packed weights have scales of their own; they are refused, never guessed."""
    directory = write_tiny_eagle3(
        tmp_path / "draft", target, draft_vocab_size=None, boundary_ids=(0, 1, 2)
    )
    path = write_map(tmp_path, ".json", IDS)
    manifest = emit(target, directory, path)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE, 32, dtype=torch.int8)

    edit_tensors(directory, quantise)
    with pytest.raises(DiagnosticError) as caught:
        load(_as_stored(manifest, directory))
    assert [d.code for d in caught.value.diagnostics] == ["SD508"]
    assert "lm_head" in caught.value.diagnostics[0].where
    assert "SD716" in refused(target=target, draft=directory, token_map=path)


def _as_stored(manifest: Manifest, directory: Path) -> Manifest:
    """Return the manifest with the draft's files and tensors as they are now."""
    from tests.tiny_manifest import _files, tensor_refs

    assert manifest.draft is not None
    refs = tensor_refs(directory)
    tensors = {role: refs[ref.key] for role, ref in manifest.draft.tensors.items()}
    draft = msgspec.structs.replace(manifest.draft, files=_files(directory), tensors=tensors)
    return msgspec.structs.replace(manifest, draft=draft)
