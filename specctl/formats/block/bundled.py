"""DSpark inside a DeepSeek-V4 target: stages `mtp.{i}.` and `dspark_` keys in the target's config.

Foreign conventions undone: `main_proj` fuses the captured states and stands in the first stage,
the heads stand in the last; `dspark_noise_token_id` is the mask token; `dspark_target_layer_ids`
counts outputs (V4) or the layers that read the state (V4.1). The number of stages is counted from
the names. A stage's own tensors are those of the target's layers; they are listed, not checked.
*Source:* deepseek-ai DeepSeek-V4-*-DSpark checkpoints; vLLM and SGLang `deepseek_v4_dspark.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from specctl.checkpoint import Checkpoint
from specctl.contract.roles import DSPARK_ROLES, LAYER_ROLES, relaxed
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import assemble, is_whole, main_file
from specctl.formats.block import facts
from specctl.formats.block.flat_aux import read_flat_aux
from specctl.formats.block.heads import read_heads
from specctl.formats.block.places import open_sections
from specctl.formats.fields import ReaderFindings, root_fields
from specctl.formats.names import Ignored, Name, NameTable
from specctl.formats.vocabulary import read_vocabulary

KEYS = (
    "architectures",
    "model_type",
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_markov_head_type",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "n_mtp_layers",
)
"""Fields that are read; the others describe the target."""

_STAGE = re.compile(r"mtp\.(\d{1,5})\.((?:attn|ffn|attn_norm|ffn_norm)\..+|hc_.+)")
ROLES = relaxed(tuple(role for role in DSPARK_ROLES if role not in LAYER_ROLES), "confidence.bias")


def stage_count(keys: Iterable[str]) -> int:
    """Return one more than the highest stage, 0 without stages."""
    found = (re.match(r"mtp\.(\d{1,5})\.", key) for key in keys)
    return max((int(match[1]) for match in found if match), default=-1) + 1


def names_of(keys: Iterable[str]) -> NameTable:
    """Return the name table of a file's stages.

    A stage's inner names depend on the target's experts, so they are taken from the file.
    """
    keys = tuple(keys)
    last = max(stage_count(keys) - 1, 0)
    stages = (
        Name(role=f"layers.{match[1]}.{match[2]}", keys=(key,))
        for key in keys
        if (match := _STAGE.fullmatch(key)) and not match[2].startswith("hc_head")
    )
    end = f"mtp.{last}."
    return NameTable(
        names=(
            Name(role="fc.weight", keys=("mtp.0.main_proj.weight",)),
            Name(role="fc.scale", keys=("mtp.0.main_proj.scale",)),
            Name(role="hidden_norm", keys=("mtp.0.main_norm.weight",)),
            Name(role="norm", keys=(f"{end}norm.weight",)),
            *(
                Name(role=f"stream_head.{part}", keys=(f"{end}hc_head_{part}",))
                for part in ("fn", "base", "scale")
            ),
            Name(role="markov_w1", keys=(f"{end}markov_head.markov_w1.weight",)),
            Name(role="markov_w2", keys=(f"{end}markov_head.markov_w2.weight",)),
            Name(role="confidence.weight", keys=(f"{end}confidence_head.proj.weight",)),
            Name(role="confidence.bias", keys=(f"{end}confidence_head.proj.bias",)),
            *stages,
        ),
        ignored=(
            Ignored(
                pattern=r"mtp\.\d+\.(emb\.tok_emb|head)\.weight",
                reason="a copy of the target's weights; engines take the target's",
            ),
        ),
    )


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    checkpoint = _own_part(checkpoint)
    root = root_fields(checkpoint.config, ReaderFindings())
    sections = open_sections(root)
    names = names_of(checkpoint.tensors)
    matched = names.match(checkpoint.tensors, root.findings)
    root.raw("n_mtp_layers")
    heads = read_heads("dspark", sections, matched, root)
    place, size = facts.settle_block(sections.places("dspark_block_size"))
    num_target_layers = root.integer("num_hidden_layers")
    aux = read_flat_aux(sections, num_target_layers=num_target_layers, default_states=None)
    hidden = root.integer("hidden_size", is_required=True)
    root.findings.derived(
        "draft.target_hidden_size", root.where("hidden_size"), "a bundled draft has its width"
    )
    anchor = facts.read_anchor(
        sections.places("sample_from_anchor"),
        default=True,
        rule="DeepSpec trains every slot to predict",
    )
    if is_whole(checkpoint):
        names.report_missing(
            ROLES,
            matched,
            root.findings,
            conditions=heads.conditions,
            num_layers=stage_count(checkpoint.tensors),
            num_aux_states=aux.num_states or 0,
            file=main_file(checkpoint),
        )
    mask = sections.places("dspark_noise_token_id")
    return assemble(
        checkpoint,
        format="deepseek-v4-dspark",
        algorithm="dspark",
        roles=ROLES,
        root=root,
        layers=root,
        matched=matched,
        decoder=None,
        target_hidden_size=hidden,
        target_num_layers=num_target_layers,
        aux=aux,
        vocabulary=read_vocabulary(checkpoint, matched, root=root, layers=root),
        num_speculative_tokens=None,
        geometry=facts.read_geometry(
            root.findings,
            size=size,
            anchor=anchor,
            tokens=None,
            size_where=place.where,
            tokens_where=place.where,
        ),
        block=heads.block(
            mask_token_id=facts.read_mask_token(mask, ()),
            sample_from_anchor=anchor,
            draft_block_size=size,
        ),
        sizes={**heads.sizes, **({} if hidden is None else {"H": hidden})},
        details={"num_stages": stage_count(checkpoint.tensors)},
    )


def _own_part(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without the target around the stages."""
    config = checkpoint.config
    own = {key: entry for key, entry in checkpoint.tensors.items() if key.startswith("mtp.")}
    kept = None if config is None else {key: config[key] for key in KEYS if key in config}
    return replace(checkpoint, tensors=own, config=kept)
