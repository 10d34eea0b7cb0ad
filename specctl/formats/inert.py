"""Config fields that are no news: they cannot change a forward pass, or every reader knows them.

Fields of a decoder are known where a decoder is described; beside a section that describes it they
are as unknown as any other, because no reader looks for them there.
A field that is not in this list and that no reader asks for is SD211. Add a field here only when
its meaning is known and no engine's arithmetic depends on it.
*Source:* transformers 5.24 `PreTrainedConfig`; Speculators 0.9 and SpecForge training options.
"""

from __future__ import annotations

from collections.abc import Collection

from specctl.checkpoint.config_sections import QUANTIZATION_SECTIONS

_PROVENANCE = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "auto_map",
    "base_model_name_or_path",
    "dtype",
    "has_no_defaults_at_init",
    "model_type",
    "name",
    "speculators_version",
    "target_model_name_or_path",
    "torch_dtype",
    "transformers_version",
    "version",
)
_LIBRARY = (
    "chunk_size_feed_forward",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "position_embedding_type",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "rope_interleaved",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "use_cache",
)
# Fields of every decoder config. A reader that does not ask for one has a rule in its place (the
# layer count comes from tensors, a draft's tie flag from what is stored).
_DECODER = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "rope_type",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
)
# Read by `specctl.checks`, whatever the format.
_CHECKED = QUANTIZATION_SECTIONS
_DETECTION = ("proposal_type", "speculators_model_type")
_GENERATION = (
    "accept_tolerance",
    "do_sample",
    "max_length",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "verifier_accept_k",
)
_TRAINING = (
    "attention_dropout",
    "confidence_head_alpha",
    "embed_requires_grad",
    "freeze_lm_head",
    "gradient_checkpointing",
    "hidden_dropout",
    "loss_decay",
    "loss_decay_gamma",
    "max_anchors",
    "num_anchors",
    "resid_pdrop",
    "step_loss_decay",
    "ttt_length",
    "ttt_step_loss_decay",
    "ttt_steps",
)

_EVERYWHERE = frozenset((*_PROVENANCE, *_LIBRARY, *_CHECKED, *_DETECTION, *_GENERATION, *_TRAINING))
_BESIDE_A_DECODER = _EVERYWHERE | {"tie_word_embeddings", "vocab_size"}
_IN_A_DECODER = _EVERYWHERE | frozenset(_DECODER)


def inert_fields(names: Collection[str]) -> frozenset[str]:
    """Return the fields that are no news in a config object that holds `names`."""
    return _IN_A_DECODER if "hidden_size" in names else _BESIDE_A_DECODER
