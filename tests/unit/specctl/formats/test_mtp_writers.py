"""Prediction layers written: slices, Speculators and back, and what a stitch changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl import formats
from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.formats.mtp.config import with_count
from specctl.formats.mtp.merge import Merge, merge
from specctl.formats.registry import BY_NAME
from specctl.formats.written import (
    Copy,
    Joined,
    Span,
    TensorSource,
    WriteRequest,
    Written,
    num_bytes,
)
from specctl.ops.convert import convert
from specctl.ops.given import Given
from specctl.ops.load import load
from tests.unit.specctl.formats.edits import CHECKPOINTS, draft, opened, target
from tests.unit.specctl.formats.test_mtp_families import BUNDLED

GIVEN = Given(num_speculative_tokens=3, target_name="example/target")
QWEN = ("hf-qwen3-next-mtp", "hf-qwen35-mtp", "hf-qwen35-moe-mtp")


def source_bytes(checkpoint: Checkpoint, source: TensorSource) -> bytes:
    """Return the bytes that a described tensor would have."""
    if isinstance(source, Copy):
        return checkpoint.read_range(source.ref.file, source.ref.begin, source.ref.end)
    if isinstance(source, Joined):
        return b"".join(checkpoint.read_range(p.file, p.begin, p.end) for p in source.parts)
    assert isinstance(source, Span)
    begin = source.ref.begin + source.begin_bytes
    return checkpoint.read_range(source.ref.file, begin, begin + num_bytes(source))


def converted(source: Path, to: str, out: Path, *allow: str, other: Path | None = None) -> Path:
    report = convert(
        str(source),
        to=to,
        out=str(out),
        given=GIVEN,
        allow=allow,
        target=None if other is None else str(other),
    )
    assert out.is_dir(), [d.message for d in report.diagnostics if d.severity == "error"]
    return out


def same_tensors(one: Checkpoint, other: Checkpoint, keys: set[str]) -> None:
    assert set(other.tensors) == keys
    for key in keys:
        assert one.tensors[key].shape == other.tensors[key].shape
        assert one.read_bytes(key) == other.read_bytes(key)


def write(name: str, format: str, **request: object) -> Written:
    writer = BY_NAME[format].write
    assert writer is not None
    read = formats.with_given(draft(name), num_speculative_tokens=3)
    return writer(WriteRequest(draft=read, target_name="example/target", **request))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_a_slice_has_the_targets_bytes_and_reads_as_the_bundled_draft(
    name: str, tmp_path: Path
) -> None:
    whole = opened(name)
    bundled = formats.read_draft(whole)
    out = converted(CHECKPOINTS / name, bundled.format, tmp_path / "slice")
    alone = open_checkpoint(out)
    same_tensors(whole, alone, {ref.key for ref in bundled.tensors.values()})
    assert formats.detect(alone).format == bundled.format
    assert alone.config == whole.config


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("qwen4-mtp-no-prefix", ""), ("qwen-mtp-nested-prefix", "model.language_model.mtp.")],
)
def test_a_slice_is_written_with_the_usual_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    source = opened(name)
    read = formats.read_draft(source)
    out = open_checkpoint(converted(CHECKPOINTS / name, read.format, tmp_path / "usual"))
    assert set(out.tensors) == {"mtp." + key.removeprefix(prefix) for key in source.tensors}
    assert formats.detect(out).format == read.format
    again = converted(tmp_path / "usual", read.format, tmp_path / "again")
    assert set(open_checkpoint(again).tensors) == set(out.tensors)


@pytest.mark.parametrize("name", ["hf-qwen35-mtp-unannounced", "hf-qwen35-mtp-count"])
def test_a_slice_says_how_many_layers_it_has(name: str, tmp_path: Path) -> None:
    out = open_checkpoint(converted(CHECKPOINTS / name, "qwen-mtp", tmp_path / "slice"))
    assert out.config == opened("hf-qwen35-mtp").config
    assert [d.code for d in formats.read_draft(out).diagnostics] == ["SD301"]


@pytest.mark.parametrize("name", QWEN)
def test_qwen_to_speculators_and_back_is_the_same(name: str, tmp_path: Path) -> None:
    whole = opened(name)
    there = converted(CHECKPOINTS / name, "speculators-mtp", tmp_path / "there")
    back = open_checkpoint(converted(there, "qwen-mtp", tmp_path / "back"))
    own = {ref.key for ref in formats.read_draft(whole).tensors.values()}
    same_tensors(whole, back, own)
    text = (back.config or {}).get("text_config", back.config)
    wanted = (whole.config or {}).get("text_config", whole.config)
    dropped = ("torch_dtype", "architectures")
    assert {k: v for k, v in text.items() if k not in dropped} == {
        k: v for k, v in wanted.items() if k not in dropped
    }


@pytest.mark.parametrize("name", QWEN)
def test_speculators_files_have_the_librarys_names(name: str, tmp_path: Path) -> None:
    """Names of Speculators 0.9 `MTPDraftModel`: input_proj, three norms, experts in stacks."""
    there = open_checkpoint(converted(CHECKPOINTS / name, "speculators-mtp", tmp_path / "there"))
    names = {key.removeprefix("mtp_layers.0.") for key in there.tensors}
    norms = {f"{n}_layernorm.weight" for n in ("token", "hidden", "final", "input")}
    assert {"input_proj.weight", "post_attention_layernorm.weight", *norms} <= names
    assert not [name for name in names if "experts.0" in name]
    if name != "hf-qwen35-mtp":
        stack = there.tensors["mtp_layers.0.mlp.experts.gate_up_proj"]
        assert stack.shape == (3, 4, 6)


def test_experts_are_stacked_gate_rows_first() -> None:
    checkpoint = opened("hf-qwen3-next-mtp")
    written = write("hf-qwen3-next-mtp", "speculators-mtp")
    stack = written.tensors["mtp_layers.0.mlp.experts.gate_up_proj"]
    assert isinstance(stack, Joined)
    prefix = "mtp.layers.0.mlp.experts"
    expected = [f"{prefix}.{e}.{n}_proj.weight" for e in range(3) for n in ("gate", "up")]
    assert [part.key for part in stack.parts] == expected
    assert source_bytes(checkpoint, stack) == b"".join(map(checkpoint.read_bytes, expected))


def test_a_dense_layer_goes_to_deepseeks_layout_and_back(tmp_path: Path) -> None:
    name, other = CHECKPOINTS / "speculators-mtp-clean", CHECKPOINTS / "hf-llama-clean"
    there = converted(name, "deepseek-mtp", tmp_path / "there", other=other)
    checkpoint = open_checkpoint(there)
    assert "model.layers.8.eh_proj.weight" in checkpoint.tensors
    assert formats.read_draft(checkpoint).target_num_layers == 8
    back = open_checkpoint(converted(there, "speculators-mtp", tmp_path / "back"))
    source = open_checkpoint(name)
    same_tensors(source, back, set(source.tensors))


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("hf-mimo-mtp", "speculators-mtp", "input order"),
        ("hf-mimo-v2-mtp", "speculators-mtp", "one prediction layer"),
        ("hf-deepseek-v3-mtp", "speculators-mtp", "no class for"),
        ("deepseek-mtp-clean", "speculators-mtp", "no class for"),
        ("hf-glm46-mtp", "deepseek-mtp", "are not those of"),
        ("speculators-mtp-clean", "qwen-mtp", "holds gated layers"),
        ("speculators-mtp-clean", "deepseek-mtp", "numbered after its target's"),
        ("speculators-mtp-experts", "mimo-mtp", "are not those of"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(name: str, format: str, message: str) -> None:
    written = write(name, format)
    assert not written.tensors
    assert any(message in d.message for d in written.diagnostics if d.code == "SD602")


def test_experts_that_are_not_alike_are_not_stacked() -> None:
    key = "mtp.layers.0.mlp.experts.1.up_proj.weight"
    for edits in ({"drop": (key,)}, {"drop": (key,), "add": {key: (3, 6)}}):
        read = formats.with_given(draft("hf-qwen3-next-mtp", **edits), num_speculative_tokens=3)
        writer = BY_NAME["speculators-mtp"].write
        assert writer is not None
        written = writer(WriteRequest(draft=read, target_name="example/target"))
        assert [d.code for d in written.diagnostics] == ["SD602"]
        found = merge(read, opened("hf-qwen35-moe-mtp"), depth=None, is_copy=bool)
        assert "mtp.layers.0.mlp.experts.0.up_proj.weight" in found.tensors


def test_copies_are_a_named_loss() -> None:
    edited = draft("hf-qwen35-mtp", add={"mtp.embed_tokens.weight": (12, 6)})
    writer = BY_NAME["speculators-mtp"].write
    assert writer is not None
    read = formats.with_given(edited, num_speculative_tokens=3)
    written = writer(WriteRequest(draft=read, target_name="example/target"))
    assert [d.expected for d in written.diagnostics] == ["--allow embedding"]
    assert not [key for key in written.tensors if "embed" in key]


# --- stitching


def stitched(found: Merge, source: Checkpoint) -> dict[str, bytes]:
    return {key: source_bytes(source, entry) for key, entry in found.tensors.items()}


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_putting_back_what_was_taken_out_changes_nothing(name: str, tmp_path: Path) -> None:
    whole = opened(name)
    bundled = formats.read_draft(whole)
    alone = open_checkpoint(converted(CHECKPOINTS / name, bundled.format, tmp_path / "slice"))
    found = merge(formats.read_draft(alone), whole, depth=1, is_copy=bool)
    assert found.diagnostics == ()
    own = {ref.key for ref in bundled.tensors.values()}
    assert set(found.replaced) == set(found.tensors) == own
    assert stitched(found, alone) == {key: whole.read_bytes(key) for key in own}


@pytest.mark.parametrize("name", QWEN)
def test_a_speculators_draft_is_put_back_in_the_targets_form(name: str, tmp_path: Path) -> None:
    """The inverse of Speculators' renaming; `stitch-mtp` does the same for one form of experts."""
    whole = opened(name)
    there = open_checkpoint(converted(CHECKPOINTS / name, "speculators-mtp", tmp_path / "there"))
    found = merge(formats.read_draft(there), whole, depth=None, is_copy=bool)
    own = {ref.key for ref in formats.read_draft(whole).tensors.values()}
    assert (found.diagnostics, set(found.tensors)) == ((), own)
    assert stitched(found, there) == {key: whole.read_bytes(key) for key in own}


def test_layers_are_added_to_a_target_without_any() -> None:
    bare = opened("hf-llama-clean")
    read = draft("deepseek-mtp-clean")
    found = merge(read, bare, depth=8, is_copy=bool)
    assert (found.replaced, found.count) == ((), 1)
    assert "model.layers.8.eh_proj.weight" in found.tensors
    assert found.count_pointer == "/num_nextn_predict_layers"
    config = with_count(bare.config or {}, found.count_pointer, found.count)
    assert config["num_nextn_predict_layers"] == 1
    assert "num_nextn_predict_layers" not in (bare.config or {})


def test_the_count_is_set_where_the_text_models_fields_are() -> None:
    whole = opened("hf-qwen35-mtp-unannounced")
    found = merge(draft("qwen-mtp-clean"), whole, depth=None, is_copy=bool)
    assert found.count_pointer == "/text_config/mtp_num_hidden_layers"
    changed = with_count(whole.config or {}, found.count_pointer, found.count)
    assert changed == opened("hf-qwen35-mtp").config


def test_layers_of_another_shape_or_family_do_not_fit() -> None:
    whole = opened("hf-qwen35-mtp")
    narrow = draft("qwen-mtp-clean", drop=("mtp.norm.weight",), add={"mtp.norm.weight": (5,)})
    narrowed = merge(narrow, whole, depth=None, is_copy=bool)
    assert [d.code for d in narrowed.diagnostics] == ["SD611"]
    assistant = draft("gemma4-assistant-clean")
    assert [d.code for d in merge(assistant, whole, depth=None, is_copy=bool).diagnostics] == [
        "SD611"
    ]
    deep = merge(draft("deepseek-mtp-clean"), whole, depth=None, is_copy=bool)
    assert [d.code for d in deep.diagnostics] == ["SD611"]
    assert deep.tensors == {}


def test_more_layers_than_the_target_has_do_not_fit() -> None:
    deep = draft("speculators-mtp-experts", add={"mtp_layers.1.mlp.gate.weight": (3, 6)})
    found = merge(deep, opened("hf-qwen35-moe-mtp"), depth=None, is_copy=bool)
    assert [d.code for d in found.diagnostics] == ["SD611"]
    split = merge(draft("hf-nemotron-h-mtp"), opened("hf-llama-clean"), depth=8, is_copy=bool)
    assert split.count == 1
    assert "mtp.layers.1.final_layernorm.weight" in split.tensors


def test_a_copy_that_the_target_does_not_have_is_left_out() -> None:
    whole = opened("hf-glm46-mtp")
    found = merge(draft("hf-glm45-mtp"), whole, depth=1, is_copy=bool)
    assert [d.code for d in found.diagnostics] == ["SD507", "SD507"]
    assert not [key for key in found.tensors if "embed" in key or "shared_head.head" in key]


def test_a_manifest_refuses_what_is_not_served() -> None:
    from specctl.contract.diagnostics import DiagnosticError
    from specctl.ops.emit_manifest import emit_manifest

    cases = {
        ("hf-qwen35-mtp", None): "hidden size 6",
        ("hf-llama-tiny", "speculators-mtp-experts"): "gated attention, 3 experts",
        ("hf-llama-tiny", "gemma4-assistant-clean"): "`gemma4_assistant`",
        ("hf-qwen35-mtp", "qwen-mtp-clean"): "gated attention",
    }
    for (model, other), words in cases.items():
        source = None if other is None else str(CHECKPOINTS / other)
        with pytest.raises(DiagnosticError) as caught:
            emit_manifest(str(CHECKPOINTS / model), source, num_speculative_tokens=2)
        found = [d for d in caught.value.diagnostics if d.code == "SD716"]
        assert any(words in d.message for d in found), (model, other, caught.value)


def test_targets_of_any_architecture_are_read_without_an_error() -> None:
    for name in BUNDLED:
        loaded = load(str(CHECKPOINTS / name))
        assert not [d for d in loaded.diagnostics if d.severity != "info"], name
    read = target("hf-gpt2-unsupported")
    assert [d.severity for d in read.diagnostics if d.code == "SD203"] == ["info"]
    odd = target("hf-llama-clean", {"layer_types": ["linear_attention"] * 8})
    assert [d.severity for d in odd.diagnostics if d.code == "SD203"] == ["info"]
    assert odd.decoder is None
