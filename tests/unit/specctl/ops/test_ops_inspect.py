"""What `inspect` reports, on fixtures whose facts are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import msgspec
import pytest

from specctl.contract.vocabulary_map import map_digest, offsets_to_absolute
from specctl.ops.inspect import inspect, part_of
from specctl.ops.report import InspectReport, json_schema

ROOT = Path(__file__).parents[4]
Named = Callable[[str], str]
PUBLISHED = ["format", "roles", "geometry", "vocabulary", "aux_hidden", "sharing", "details",
             "bundled", "engines", "tensors", "diagnostics"]  # fmt: skip


def as_json(report: InspectReport) -> dict[str, object]:
    value: dict[str, object] = json.loads(msgspec.json.encode(report))
    return value


def test_published_keys(checkpoint: Named) -> None:
    report = as_json(inspect(checkpoint("speculators-eagle3-clean")))
    assert list(report) == PUBLISHED
    broken = as_json(inspect(checkpoint("speculators-eagle3-clean"), checkpoint("hf-llama-wide")))
    findings = broken["diagnostics"]
    assert isinstance(findings, list)
    assert list(findings[0]) == ["code", "severity", "slug", "where", "message", "expected",
                                 "found", "help", "notes", "fixable"]  # fmt: skip


def test_eagle3_alone_and_with_its_target(checkpoint: Named) -> None:
    alone = inspect(checkpoint("speculators-eagle3-clean"))
    assert alone.format == "speculators-eagle3"
    assert (alone.roles.source.role, alone.roles.target) == ("draft", None)
    assert alone.geometry is not None
    gamma = alone.geometry.num_speculative_tokens
    assert gamma is not None
    assert (alone.geometry.draft_width, alone.geometry.verify_width) == (1, gamma + 1)
    assert alone.geometry.decided_by is not None
    assert alone.aux_hidden is not None
    assert alone.aux_hidden.numbering == "boundary"
    assert alone.aux_hidden.read_ids is not None
    assert alone.aux_hidden.output_layer_ids == tuple(i - 1 for i in alone.aux_hidden.read_ids)
    with_target = inspect(checkpoint("speculators-eagle3-clean"), checkpoint("hf-llama-clean"))
    assert with_target.roles.target is not None
    assert with_target.roles.target.role == "target"
    assert with_target.vocabulary.tokenizer_size == 64
    assert with_target.diagnostics == ()


def test_map_digest_is_over_absolute_ids(checkpoint: Named) -> None:
    from specctl.checkpoint import open_checkpoint

    source = checkpoint("speculators-eagle3-clean")
    vocabulary = inspect(source).vocabulary
    ids = offsets_to_absolute(open_checkpoint(source).read_ints("d2t"))
    assert vocabulary.map_digest == map_digest(ids)
    assert (vocabulary.map_kind, vocabulary.draft_vocab_size) == ("reduced", len(ids))
    assert vocabulary.map_tensor is not None
    assert vocabulary.mask_tensor is not None


def test_open_facts_are_null_and_named(checkpoint: Named) -> None:
    alone = inspect(checkpoint("safeailab-eagle3-clean"))
    assert alone.geometry is not None
    assert alone.geometry.num_speculative_tokens is None
    assert alone.aux_hidden is not None
    assert alone.aux_hidden.output_layer_ids is None
    assert {d.code for d in alone.diagnostics} == {"SD301", "SD306"}
    with_target = inspect(checkpoint("safeailab-eagle3-clean"), checkpoint("hf-llama-clean"))
    assert with_target.aux_hidden is not None
    assert with_target.aux_hidden.output_layer_ids == (1, 3, 4), "[2, n//2, n-3] of 8 layers"
    assert "n = 8" in (with_target.aux_hidden.decided_by or "")
    assert {d.code for d in with_target.diagnostics} == {"SD301"}


def test_block_and_mtp_geometry(checkpoint: Named) -> None:
    dspark = inspect(checkpoint("speculators-dspark-clean"))
    assert dspark.geometry is not None
    assert dspark.geometry.sample_from_anchor is not None
    assert dspark.geometry.draft_block_size is not None
    mtp = inspect(checkpoint("speculators-mtp-clean"))
    assert mtp.aux_hidden is None
    assert mtp.sharing.head is not None
    assert (mtp.sharing.head.origin, mtp.sharing.head.tensor) == ("target", None)


def test_shared_tensors_come_from_the_target(checkpoint: Named) -> None:
    report = inspect(checkpoint("speculators-mtp-clean"), checkpoint("hf-llama-clean"))
    assert report.sharing.embedding is not None
    assert report.sharing.embedding.origin == "target"
    assert report.sharing.embedding.tensor is not None
    assert report.sharing.embedding.tensor.key == "model.embed_tokens.weight"


def test_targets(checkpoint: Named) -> None:
    own = inspect(checkpoint("hf-llama-clean"))
    tied = inspect(checkpoint("hf-llama-tied"))
    assert own.sharing.head is not None
    assert tied.sharing.head is not None
    assert (own.sharing.head.origin, tied.sharing.head.origin) == ("own", "tied")
    assert (own.geometry, own.aux_hidden) == (None, None)
    sharded = inspect(checkpoint("hf-llama-sharded"))
    assert sharded.tensors.num_files == 2
    assert {t.file for t in sharded.tensors.list} == {
        f"model-0000{i}-of-00002.safetensors" for i in (1, 2)
    }


def test_bytes_add_up(checkpoint: Named) -> None:
    tensors = inspect(checkpoint("hf-llama-clean")).tensors
    assert sum(part.num_bytes for part in tensors.parts) == tensors.num_bytes
    assert sum(part.num_tensors for part in tensors.parts) == tensors.num_tensors
    assert len(tensors.list) == tensors.num_tensors
    assert [p.num_bytes for p in tensors.parts] == sorted(
        (p.num_bytes for p in tensors.parts), reverse=True
    )
    assert {"embedding", "head", "layers", "norms"} == {p.name for p in tensors.parts}


@pytest.mark.parametrize(
    ("role", "part"),
    [(None, "unmapped"), ("layers.3.q_proj.weight", "layers"), ("d2t", "vocabulary map"),
     ("fc.weight", "fc"), ("fc_norm.1", "norms"), ("norm", "norms"), ("markov_w1", "markov"),
     ("markov_gate.bias", "markov"), ("confidence.weight", "confidence")],
)  # fmt: skip
def test_parts(role: str | None, part: str) -> None:
    assert part_of(role) == part


def test_places_name_the_file_from_where_the_user_stands(
    checkpoint: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    source = "fixtures/checkpoints/container-truncated"
    places = [d.where for d in inspect(source).diagnostics]
    assert places
    for place in places:
        assert Path(place.partition("::")[0].partition("#")[0]).exists()


def test_wrong_roles_are_reported(checkpoint: Named) -> None:
    report = inspect(checkpoint("hf-llama-clean"), checkpoint("speculators-eagle3-clean"))
    assert [d.code for d in report.diagnostics].count("SD201") == 2


def test_nothing_to_open(checkpoint: Named, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    for report in (inspect(absent), inspect(checkpoint("hf-llama-clean"), absent)):
        assert [d.code for d in report.diagnostics] == ["SD119"]
        assert (report.format, report.tensors.list) == (None, ())


def test_every_fixture_gives_a_valid_document() -> None:
    schema = json_schema(InspectReport)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    checked = 0
    for directory in sorted((ROOT / "fixtures" / "checkpoints").iterdir()):
        validator.validate(as_json(inspect(str(directory))))
        checked += 1
    assert checked > 100
