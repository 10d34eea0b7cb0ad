"""Name tables of the block drafts; the first spelling of a role is the one that is written.

Foreign spellings undone: older SpecForge files hold the heads under `logit_head.`, older DFlash2
files end a codebook in `.weight` (exllamav3 issue 390), engine dumps call `fc` and `hidden_norm`
`encoder.fc` and `encoder.output_norm_enc`, ModelOpt writes DSpark's heads without their modules.
"""

from __future__ import annotations

from specctl.formats.eagle.eagle3 import VOCABULARY_NAMES
from specctl.formats.names import IGNORED_KEYS, Name, NameTable, layer_names

_ATTENTION = "layers.{i}.self_attn."
_LINEAR = ("weight", "bias")

_BACKBONE: tuple[Name, ...] = (
    *VOCABULARY_NAMES,
    Name(role="fc.weight", keys=("fc.weight", "encoder.fc.weight")),
    Name(role="hidden_norm", keys=("hidden_norm.weight", "encoder.output_norm_enc.weight")),
    Name(role="norm", keys=("norm.weight",)),
    *layer_names("layers.{i}."),
    Name(role="layers.{i}.attention_sink", keys=(f"{_ATTENTION}attention_sink_bias",)),
)

# Layers that are read and cannot be run: fused projections, latent attention, Gemma's norms.
_OTHER_LAYERS: tuple[Name, ...] = (
    Name(role="fc_norm.{i}", keys=("aux_hidden_norms.{i}.weight",)),
    Name(role="layers.{i}.qkv_proj.weight", keys=(f"{_ATTENTION}qkv_proj.weight",)),
    Name(role="layers.{i}.head_gate.weight", keys=(f"{_ATTENTION}g_proj.weight",)),
    Name(role="layers.{i}.q_a_proj.weight", keys=(f"{_ATTENTION}q_a_proj.weight",)),
    Name(role="layers.{i}.q_a_norm", keys=(f"{_ATTENTION}q_a_layernorm.weight",)),
    Name(role="layers.{i}.q_b_proj.weight", keys=(f"{_ATTENTION}q_b_proj.weight",)),
    Name(role="layers.{i}.kv_a_proj.weight", keys=(f"{_ATTENTION}kv_a_proj_with_mqa.weight",)),
    Name(role="layers.{i}.kv_a_norm", keys=(f"{_ATTENTION}kv_a_layernorm.weight",)),
    Name(role="layers.{i}.kv_b_proj.weight", keys=(f"{_ATTENTION}kv_b_proj.weight",)),
    Name(
        role="layers.{i}.pre_feedforward_norm",
        keys=("layers.{i}.pre_feedforward_layernorm.weight",),
    ),
    Name(
        role="layers.{i}.post_feedforward_norm",
        keys=("layers.{i}.post_feedforward_layernorm.weight",),
    ),
    Name(role="layers.{i}.layer_scalar", keys=("layers.{i}.layer_scalar",)),
)


def _with_prefix(role: str, key: str) -> Name:
    return Name(role=role, keys=(key, f"logit_head.{key}"))


_MARKOV: tuple[Name, ...] = (
    _with_prefix("markov_w1", "markov_head.markov_w1.weight"),
    _with_prefix("markov_w2", "markov_head.markov_w2.weight"),
    *(_with_prefix(f"markov_gate.{kind}", f"markov_head.gate_proj.{kind}") for kind in _LINEAR),
    *(_with_prefix(f"markov_joint.{kind}", f"markov_head.joint_proj.{kind}") for kind in _LINEAR),
    *(_with_prefix(f"confidence.{kind}", f"confidence_head.proj.{kind}") for kind in _LINEAR),
)
_FLAT_MARKOV: tuple[Name, ...] = (
    Name(role="markov_w1", keys=("markov_w1.weight",)),
    Name(role="markov_w2", keys=("markov_w2.weight",)),
    *(Name(role=f"markov_gate.{kind}", keys=(f"gate_proj.{kind}",)) for kind in _LINEAR),
    *(Name(role=f"markov_joint.{kind}", keys=(f"joint_proj.{kind}",)) for kind in _LINEAR),
    *(Name(role=f"confidence.{kind}", keys=(f"confidence_proj.{kind}",)) for kind in _LINEAR),
)
_SELECTOR = "candidate_selector."
_CONVOLUTIONS: tuple[Name, ...] = (
    *(
        row
        for name in ("attention_conv", "mlp_conv")
        for row in (
            Name(
                role=f"layers.{{i}}.{name}.base_kernel", keys=(f"layers.{{i}}.{name}.base_kernel",)
            ),
            Name(
                role=f"layers.{{i}}.{name}.kernel_projection",
                keys=(f"layers.{{i}}.{name}.kernel_projection.weight",),
            ),
        )
    ),
    Name(role="selector.hidden_projection", keys=(f"{_SELECTOR}hidden_projection.weight",)),
    *(
        Name(
            role=f"selector.{name}",
            keys=(f"{_SELECTOR}{name}_codebook", f"{_SELECTOR}{name}_codebook.weight"),
        )
        for name in ("predecessor", "successor")
    ),
)
_PREFIX_GRU: tuple[Name, ...] = (
    _with_prefix("prefix_gru.input", "prefix_gru.weight_ih_l0"),
    _with_prefix("prefix_gru.hidden", "prefix_gru.weight_hh_l0"),
    _with_prefix("prefix_embedding.in", "embed_proj.0.weight"),
    _with_prefix("prefix_embedding.out", "embed_proj.2.weight"),
)
_REFINER: tuple[Name, ...] = (
    Name(role="refiner.token_embedding", keys=("refiner_head.token_embed.weight",)),
    Name(role="refiner.down_hidden", keys=("refiner_head.down_h.weight",)),
    Name(role="refiner.down_block", keys=("refiner_head.down_g.weight",)),
    Name(role="refiner.mix", keys=("refiner_head.mix_l",)),
    *(
        Name(role=f"refiner.{name}", keys=(f"refiner_head.{name}.weight",))
        for name in ("in_proj", "mlp_gate", "mlp_up", "mlp_down", "readout")
    ),
)

DFLASH_NAMES = NameTable(names=(*_BACKBONE, *_OTHER_LAYERS), ignored=IGNORED_KEYS)
DFLASH2_NAMES = NameTable(names=(*DFLASH_NAMES.names, *_CONVOLUTIONS), ignored=IGNORED_KEYS)
DOMINO_NAMES = NameTable(names=(*DFLASH_NAMES.names, *_PREFIX_GRU), ignored=IGNORED_KEYS)
XPRESS_NAMES = NameTable(names=(*DFLASH_NAMES.names, *_REFINER), ignored=IGNORED_KEYS)
DSPARK_NAMES = NameTable(names=(*DFLASH_NAMES.names, *_MARKOV), ignored=IGNORED_KEYS)
FLAT_DSPARK_NAMES = NameTable(names=(*DFLASH_NAMES.names, *_FLAT_MARKOV), ignored=IGNORED_KEYS)
