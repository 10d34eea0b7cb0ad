"""EAGLE-3 drafts whose layer has DeepSeek-V2's latent attention (MLA).

Names and config are EAGLE-3's flat ones but for the attention; the MLP is dense. Captured layers
count boundaries in some files and outputs in others (SD303).
*Source:* Model-Optimizer's `Eagle3DeepseekV2ForCausalLM` export for Kimi-K2; SGLang pull request
25454 (lightseekorg/kimi-k2.5-eagle3-mla).
"""

from __future__ import annotations

from collections.abc import Mapping

from specctl.checkpoint import Checkpoint
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import assemble, is_whole, main_file
from specctl.formats.decoder import count_layers, report_layer_count
from specctl.formats.eagle.eagle3 import (
    SPECULATORS_NAMES,
    flag_conditions,
    read_norm_flags,
    read_target_hidden,
    settle_norms,
)
from specctl.formats.eagle.flat import (
    flat_norm_before_residual,
    note_switches,
    read_aux,
    report_norm_output,
)
from specctl.formats.eagle.roles import MLA_ROLES, NO_Q_LORA, Q_LORA
from specctl.formats.eagle.side_files import with_side_map
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.model_types import EXPERT_FIELDS, defaults_rule, flat_defaults
from specctl.formats.names import IGNORED_KEYS, Name, NameTable
from specctl.formats.rope import read_rope
from specctl.formats.speculators import report_gamma_missing
from specctl.formats.vocabulary import read_vocabulary, report_map_order

_ATTENTION: tuple[tuple[str, str], ...] = (
    ("q_a_proj.weight", "q_a_proj.weight"),
    ("q_a_norm", "q_a_layernorm.weight"),
    ("q_b_proj.weight", "q_b_proj.weight"),
    ("kv_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("kv_a_norm", "kv_a_layernorm.weight"),
    ("kv_b_proj.weight", "kv_b_proj.weight"),
)
NAMES = NameTable(
    names=(
        *SPECULATORS_NAMES.names,
        *(
            Name(role=f"layers.{{i}}.{role}", keys=(f"layers.{{i}}.self_attn.{key}",))
            for role, key in _ATTENTION
        ),
        *(
            Name(role=f"layers.0.{role}", keys=(f"midlayer.self_attn.{key}",))
            for role, key in _ATTENTION
        ),
    ),
    ignored=IGNORED_KEYS,
)

_DIMENSIONS: tuple[tuple[str, str], ...] = (
    ("H", "hidden_size"),
    ("I", "intermediate_size"),
    ("NH", "num_attention_heads"),
    ("ND", "qk_nope_head_dim"),
    ("RD", "qk_rope_head_dim"),
    ("VD", "v_head_dim"),
    ("KL", "kv_lora_rank"),
)
# Copied from the target's config; a dense draft layer has no experts.
_OF_THE_TARGET = (*EXPERT_FIELDS, "aux_loss_alpha", "num_nextn_predict_layers", "seq_aux")


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; its `decoder` is None: the layer is no Llama-family layer."""
    root = root_fields(checkpoint.config, ReaderFindings())
    root = root.with_defaults(flat_defaults("llama"), defaults_rule("llama"))
    findings = root.findings
    report_gamma_missing(root, CONFIG)
    nested = root.section("eagle_config")
    note_switches(root, nested)
    flags = read_norm_flags(
        root, has_norm_before_residual=flat_norm_before_residual(root, nested), nested=nested
    )
    if flags.has_norm_output:
        report_norm_output(root)
    for key in _OF_THE_TARGET:
        root.raw(key)
    aux = read_aux(root, nested)
    matched = NAMES.match(checkpoint.tensors, findings)
    num_layers = count_layers(matched.tensors)
    sizes = _sizes(root)
    read_rope(root, "draft.rope")
    if is_whole(checkpoint):
        report_layer_count(root, num_layers)
        flags = settle_norms(matched, flags, root)
        query = Q_LORA if "QL" in sizes else NO_Q_LORA
        NAMES.report_missing(
            MLA_ROLES,
            matched,
            findings,
            conditions=flag_conditions(flags) | {query},
            num_layers=max(num_layers, 1),
            num_aux_states=aux.num_states or 0,
            file=main_file(checkpoint),
        )
    vocabulary = read_vocabulary(checkpoint, matched, root=root, layers=root)
    report_map_order(vocabulary, matched, findings)
    return assemble(
        checkpoint,
        format="mla-eagle3",
        algorithm="eagle3",
        roles=MLA_ROLES,
        root=root,
        layers=root,
        matched=matched,
        decoder=None,
        target_hidden_size=read_target_hidden(root, root),
        target_num_layers=None,
        aux=aux,
        vocabulary=with_side_map(checkpoint, vocabulary, findings),
        num_speculative_tokens=None,
        geometry=None,
        flags=flags,
        sizes=sizes,
        details={"attention": "mla", "num_layers": num_layers},
    )


def _sizes(root: Fields) -> Mapping[str, int]:
    """Return the shape symbols of the layer; SD206 for a dimension that the config lacks."""
    sizes: dict[str, int] = {}
    for symbol, key in _DIMENSIONS:
        size = root.integer(key, f"draft.{key}", is_required=True)
        if size is not None:
            sizes[symbol] = size
    rank = root.integer("q_lora_rank", "draft.q_lora_rank")
    if rank is not None:
        sizes["QL"] = rank
    if "H" in sizes:
        sizes |= {"X": sizes["H"], "X0": 2 * sizes["H"]}
    return sizes
