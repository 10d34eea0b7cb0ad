"""What an EAGLE writer describes without an error reads back with the facts that were written."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specctl import formats
from specctl.checkpoint import Checkpoint, open_checkpoint, write_safetensors
from specctl.checkpoint.tensor_entry import DTYPE_BITS
from specctl.contract.diagnostics import has_errors
from specctl.contract.vocabulary_map import absolute_to_offsets, pack_int64, target_mask
from specctl.draft import DraftCheckpoint
from specctl.formats.registry import DRAFT_FORMATS
from specctl.formats.written import Copy, Rows, TensorSource, Values, WriteRequest

H, HEADS, KV, DIM, INNER, VOCAB = 4, 2, 1, 3, 5, 12
LAYERS = 9
FACTS = (
    "algorithm",
    "decoder",
    "target_hidden_size",
    "aux_layer_ids",
    "draft_vocab_size",
    "target_vocab_size",
    "has_fc_bias",
    "has_norm_before_residual",
    "has_norm_before_fc",
    "has_fc_norm",
    "has_norm_output",
    "mask_token_id",
)
Tensor = tuple[str, tuple[int, ...], bytes]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A drawn draft: its choices, in the spelling of `layers.` and a nested or flat config."""

    is_nested: bool
    is_parallel: bool
    family: str
    num_layers: int
    aux: tuple[int, ...]
    target_hidden: int
    ids: tuple[int, ...] | None
    flags: tuple[str, ...]
    biases: tuple[str, ...]

    def tensors(self) -> dict[str, Tensor]:
        rows = len(self.ids) if self.ids is not None else VOCAB
        width = len(self.aux) * self.target_hidden
        shapes = {
            "fc.weight": (H, width),
            "norm.weight": (H,),
            "lm_head.weight": (rows, H),
            "embed_tokens.weight": (VOCAB, H),
            "layers.0.hidden_norm.weight": (H,),
        }
        for index in range(self.num_layers):
            shapes |= self._layer(f"layers.{index}.", 2 * H if index == 0 else H)
        if "norm_before_fc" in self.flags:
            shapes["input_norm.weight"] = (width,)
        if "fc_norm" in self.flags:
            shapes |= {f"fc_norm.{i}.weight": (self.target_hidden,) for i in range(len(self.aux))}
        if self.is_parallel:
            shapes["mask_hidden"] = (1, 1, width) if self.is_nested else (1, width)
        found: dict[str, Tensor] = {
            key: ("BF16", shape, key.encode().ljust(2 * math.prod(shape), b"#")[: _size(shape)])
            for key, shape in shapes.items()
        }
        if self.ids is not None:
            offsets = pack_int64(absolute_to_offsets(self.ids))
            found["d2t"] = ("I64", (rows,), offsets)
            found["t2d"] = ("BOOL", (VOCAB,), target_mask(self.ids, VOCAB))
        return found

    def _layer(self, prefix: str, source: int) -> dict[str, tuple[int, ...]]:
        query, key = HEADS * DIM, KV * DIM
        outs = {"q_proj": query, "k_proj": key, "v_proj": key}
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}self_attn.{name}.weight": (rows, source) for name, rows in outs.items()
        }
        shapes |= {
            f"{prefix}self_attn.o_proj.weight": (H, query),
            f"{prefix}mlp.gate_proj.weight": (INNER, H),
            f"{prefix}mlp.up_proj.weight": (INNER, H),
            f"{prefix}mlp.down_proj.weight": (H, INNER),
            f"{prefix}input_layernorm.weight": (H,),
            f"{prefix}post_attention_layernorm.weight": (H,),
        }
        if "qkv" in self.biases:
            shapes |= {f"{prefix}self_attn.{n}.bias": (rows,) for n, rows in outs.items()}
        if "o" in self.biases:
            shapes[f"{prefix}self_attn.o_proj.bias"] = (H,)
        if self.family == "qwen3":
            shapes |= {f"{prefix}self_attn.{n}_norm.weight": (DIM,) for n in "qk"}
        return shapes

    def config(self) -> dict[str, Any]:
        layer = {
            "model_type": self.family,
            "hidden_size": H,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV,
            "head_dim": DIM,
            "num_hidden_layers": self.num_layers,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "vocab_size": VOCAB,
        }
        if set(self.biases) == {"qkv", "o"}:
            layer["attention_bias"] = True
        kind = "peagle" if self.is_parallel else "eagle3"
        common: dict[str, Any] = {
            "draft_vocab_size": VOCAB if self.ids is None else len(self.ids),
            "target_hidden_size": self.target_hidden,
            **dict.fromkeys(self.flags, True),
        }
        if self.is_nested:
            return {
                **common,
                "speculators_model_type": kind,
                "norm_before_residual": "norm_before_residual" in self.flags,
                "eagle_aux_hidden_state_layer_ids": [index + 1 for index in self.aux],
                "mask_token_id": 3,
                "speculators_config": {
                    "algorithm": kind,
                    "default_proposal_method": "greedy",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                    "verifier": {"name_or_path": "example/tiny", "architectures": []},
                },
                "transformer_layer_config": layer,
            }
        parallel = {"parallel_drafting": True, "ptd_token_id": 3} if self.is_parallel else {}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **common,
            **parallel,
            "num_depths": 3,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.aux)},
        }


def _size(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    flags = draw(
        st.sets(
            st.sampled_from(
                ["norm_before_residual", "norm_output", draw(st.sampled_from(_STATE_NORMS))]
            )
        )
    )
    reduced = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=8, unique=True)
    is_nested = draw(st.booleans())
    more = draw(st.lists(st.integers(2, LAYERS - 2), max_size=3, unique=True))
    return Draft(
        is_nested=is_nested,
        is_parallel=draw(st.booleans()),
        family=draw(st.sampled_from(["llama", "qwen3"])),
        num_layers=draw(st.integers(1, 2)),
        aux=(1, *sorted(more)),  # a flat list is read as outputs by its first id only
        target_hidden=draw(st.sampled_from([H, 6])),
        ids=draw(st.none() | reduced.map(tuple)),
        flags=tuple(sorted(flags)),
        biases=draw(st.sampled_from([(), ("qkv",), ("qkv", "o")])),
    )


_STATE_NORMS = ("norm_before_fc", "fc_norm")


def stored(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return open_checkpoint(directory)


def materialised(source: TensorSource, checkpoint: Checkpoint) -> Tensor:
    if isinstance(source, Values):
        return source.dtype, source.out_shape, source.data
    assert isinstance(source, Copy | Rows)
    data = checkpoint.read_bytes(source.ref.key)
    if isinstance(source, Rows):
        row = len(data) // source.ref.shape[0]
        data = b"".join(data[i * row : (i + 1) * row] for i in source.rows)
    assert len(data) == math.prod(source.out_shape) * DTYPE_BITS[source.dtype] // 8
    return source.dtype, source.out_shape, data


@settings(max_examples=60, deadline=None)
@given(drafts())
def test_what_is_written_without_an_error_reads_back(drawn: Draft) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        checkpoint = stored(place / "source", drawn.config(), drawn.tensors())
        draft = formats.read_draft(checkpoint)
        assume(draft.draft_to_target is not None or drawn.ids is None)  # else SD403
        assert draft.aux_layer_ids == drawn.aux
        count = 0
        for entry in DRAFT_FORMATS:
            if entry.write is None or entry.algorithm != draft.algorithm:
                continue
            written = entry.write(WriteRequest(draft=draft, target_name="example/tiny"))
            if has_errors(written.diagnostics):
                continue
            count += 1
            tensors = {key: materialised(s, checkpoint) for key, s in written.tensors.items()}
            again = stored(place / entry.name, dict(written.config), tensors)
            compare(draft, formats.read_draft(again), entry.name)
        is_odd = drawn.target_hidden != H or bool(drawn.biases)
        assert count or is_odd or "norm_before_residual" in drawn.flags


def compare(draft: DraftCheckpoint, read: DraftCheckpoint, name: str) -> None:
    assert read.format == name
    assert read.unmapped == ()
    assert read.unknown_fields == ()
    for fact in FACTS:
        wanted, found = getattr(draft, fact), getattr(read, fact)
        is_open = fact == "aux_layer_ids" and found is None and name == "safeailab-eagle3"
        assert is_open or found == wanted, fact
    if draft.map_kind == "reduced" and "t2d" in read.tensors:
        assert read.draft_to_target == draft.draft_to_target
