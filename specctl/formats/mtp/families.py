"""The table of prediction-layer families; registry rows and the generic reader are made from it.

*Source:* each row names its own. Where the hidden state is taken: DeepSeek-V3 modelling code, vLLM
pull requests 45895 and 47448 (recycled state after the layer's last norm), LightLLM issue 1402.
"""

from __future__ import annotations

from dataclasses import replace

from specctl.formats.mtp.family import MtpFamily

_TRUNK_ROOTS = ("model.", "model.language_model.", "language_model.model.", "")
_MTP_ROOTS = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.", "")
_FIRST_NORMS = (("embedding_norm", "layers.{i}.enorm.weight"),)
_ENORM_HNORM = (*_FIRST_NORMS, ("hidden_norm", "layers.{i}.hnorm.weight"))
_EH_PROJ = ("fc.weight", "layers.{i}.eh_proj.weight")
_OWN_EMBEDDING = ("embedding", "layers.{i}.embed_tokens.weight")

DEEPSEEK = MtpFamily(
    name="deepseek-mtp",
    title="MTP, DeepSeek-V3 family",
    source="DeepSeek-V3 layer 61; transformers 5.24 deepseek_v3, deepseek_v32",
    layout="deepseek-mtp",
    marker=r"layers\.\{i\}\.eh_proj\.weight",
    roots=_TRUNK_ROOTS,
    names=(
        _EH_PROJ,
        *_ENORM_HNORM,
        ("norm", "layers.{i}.shared_head.norm.weight"),
        _OWN_EMBEDDING,
        ("head", "layers.{i}.shared_head.head.weight"),
    ),
    block="layers.{i}.",
    is_after_trunk=True,
    is_served=True,
)
GLM = replace(
    DEEPSEEK,
    name="glm-mtp",
    title="MTP, GLM-4.5, GLM-4.6, GLM-5, GLM-OCR",
    source="transformers 5.24 glm4_moe, glm_moe_dsa, glm_ocr; vLLM pull requests 49869, 57631",
    model_types=(
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm4v_moe_text",
        "glm_moe_dsa",
        "glm_ocr",
        "glm_ocr_text",
        "glm5_next",
    ),
)
KIMI_K3 = replace(
    DEEPSEEK,
    name="kimi-k3-mtp",
    title="MTP, Kimi-K3",
    source="vLLM's count-field table; the names are those of DeepSeek's layout",
    roots=("language_model.model.", "model.", "model.language_model.", ""),
    model_types=("kimi_k3", "kimi_k3_text"),
)
STEP3P5 = replace(
    DEEPSEEK,
    name="step3p5-mtp",
    title="MTP, Step-3.5",
    source="stepfun-ai Step-3.5-Flash layers 45 to 47; vLLM step3p5_mtp",
    names=(
        _EH_PROJ,
        *_ENORM_HNORM,
        ("norm", "layers.{i}.transformer.shared_head.norm.weight"),
        ("head", "layers.{i}.transformer.shared_head.output.weight"),
        _OWN_EMBEDDING,
    ),
    norm_weight="1 + weight",
    has_usual_heads=False,
    model_types=("step3p5", "step3p7", "step3p7_text"),
    is_served=False,
)
HUNYUAN = replace(
    DEEPSEEK,
    name="hunyuan-mtp",
    title="MTP, Hunyuan Hy3",
    source="transformers 5.24 hy_v3; vLLM hunyuan MTP loader",
    names=(
        _EH_PROJ,
        *_ENORM_HNORM,
        ("norm", "layers.{i}.final_layernorm.weight"),
        _OWN_EMBEDDING,
        ("head", "layers.{i}.shared_head.head.weight"),
    ),
    aliases=(("mlp.router.gate.", "mlp.gate."),),
    model_types=("hy_v3", "hunyuan_v1_moe", "hunyuan_v1_dense"),
    is_served=False,
)
BAILING = replace(
    HUNYUAN,
    name="bailing-mtp",
    title="MTP, Ling and Bailing MoE",
    source="inclusionAI Ling 2.x; transformers 5.24 bailing_hybrid",
    aliases=(),
    block_style="own",
    has_usual_heads=False,
    model_types=("bailing_moe", "bailing_moe_v2", "bailing_hybrid", "bailing_moe_linear"),
)
QWEN = MtpFamily(
    name="qwen-mtp",
    title="MTP, Qwen3-Next, Qwen3.5, Qwen3.6",
    source="Speculators 0.9 convert/mtp; transformers 5.24 qwen3_next, qwen3_5",
    layout="qwen-mtp",
    marker=r"pre_fc_norm_(?:embedding|hidden)\.weight",
    roots=_MTP_ROOTS,
    names=(
        ("fc.weight", "fc.weight"),
        ("embedding_norm", "pre_fc_norm_embedding.weight"),
        ("hidden_norm", "pre_fc_norm_hidden.weight"),
        ("norm", "norm.weight"),
        ("embedding", "embed_tokens.weight"),
        ("head", "lm_head.weight"),
    ),
    block="layers.{i}.",
    norm_weight="1 + weight",
    is_gated=True,
    count_fields=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
)
QWEN4 = replace(
    QWEN,
    name="qwen4-mtp",
    title="MTP, Qwen3.8-Flash-Next (qwen4_exp)",
    source="transformers 5.24 qwen4_exp; published sidecar of 31 tensors",
    names=(
        ("fc_embedding.weight", "fc_embedding.weight"),
        ("fc_hidden.weight", "fc_hidden.weight"),
        *QWEN.names[1:],
    ),
    optional=("norm",),  # the mixer of the streams is the last norm
    extras=r"hyper_connection_mixer\..+",
    block_style="own",
    concat_order="separate matrices",
    has_usual_heads=False,
)
EXAONE = replace(
    QWEN,
    name="exaone-mtp",
    title="MTP, EXAONE-MoE and EXAONE-4.x",
    source="transformers 5.24 exaone_moe, exaone4_5; vLLM exaone_moe_mtp",
    norm_weight="weight",
    is_gated=False,
    count_fields=("num_nextn_predict_layers",),
    model_types=("exaone_moe", "exaone4", "exaone4_5", "exaone4_5_text"),
)
MIMO = MtpFamily(
    name="mimo-mtp",
    title="MTP, MiMo-7B",
    source="XiaomiMiMo MiMo-7B modeling_mimo.py",
    layout="mimo-mtp",
    marker=r"mtp_layers\.\{i\}\.input_proj\.weight",
    roots=("model.", "language_model.model.", "model.language_model."),
    names=(
        ("fc.weight", "mtp_layers.{i}.input_proj.weight"),
        ("embedding_norm", "mtp_layers.{i}.token_layernorm.weight"),
        ("hidden_norm", "mtp_layers.{i}.hidden_layernorm.weight"),
        ("norm", "mtp_layers.{i}.final_layernorm.weight"),
    ),
    block="mtp_layers.{i}.",
    concat_order="hidden, embedding",
)
MIMO_V2 = MtpFamily(
    name="mimo-v2-mtp",
    title="MTP, MiMo-V2",
    source="XiaomiMiMo MiMo-V2-Flash model_mtp.safetensors; transformers 5.24 mimo_v2_flash",
    layout="mimo-v2-mtp",
    marker=r"layers\.\{i\}\.enorm\.weight",
    roots=("model.mtp.",),
    names=(_EH_PROJ, *_ENORM_HNORM, ("norm", "layers.{i}.final_layernorm.weight")),
    block="layers.{i}.",
    aliases=(("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),),
    has_usual_heads=False,
    count_fields=(),
)
LONGCAT = MtpFamily(
    name="longcat-mtp",
    title="MTP, LongCat-Flash",
    source="meituan LongCat-Flash; transformers 5.24 longcat_flash; SGLang longcat_flash_nextn",
    layout="longcat-mtp",
    marker=r"layers\.\{i\}\.enorm\.m\.weight",
    roots=("model.mtp.",),
    names=(
        _EH_PROJ,
        ("embedding_norm", "layers.{i}.enorm.m.weight"),
        ("hidden_norm", "layers.{i}.hnorm.m.weight"),
        ("norm", "norm.weight"),
        ("embedding", "embed_tokens.weight"),
    ),
    block="layers.{i}.",
    aliases=(("transformer_layer.mlp.", "mlp."),),
    has_usual_heads=False,
    count_fields=(),
)
ERNIE = MtpFamily(
    name="ernie-mtp",
    title="MTP, ERNIE-4.5",
    source="baidu ERNIE-4.5; transformers 5.24 ernie4_5_moe; vLLM ernie_mtp",
    layout="ernie-mtp",
    marker=r"mtp_linear_proj\.\{i\}\.weight",
    roots=("model.", "language_model.model.", "model.language_model."),
    names=(
        ("fc.weight", "mtp_linear_proj.{i}.weight"),
        ("embedding_norm", "mtp_emb_norm.{i}.weight"),
        ("hidden_norm", "mtp_hidden_norm.{i}.weight"),
    ),
    block="mtp_block.{i}.",
)
NEMOTRON_H = MtpFamily(
    name="nemotron-h-mtp",
    title="MTP, Nemotron-H and Nemotron-3",
    source="transformers 5.24 nemotron_h; vLLM nemotron_h_mtp",
    layout="nemotron-h-mtp",
    marker=r"layers\.\{i\}\.eh_proj\.weight",
    roots=("mtp.", "language_model.mtp."),
    names=(
        _EH_PROJ,
        *_ENORM_HNORM,
        ("norm", "layers.{i}.final_layernorm.weight"),
        ("head", "lm_head.weight"),
    ),
    block="layers.{i}.",
    block_style="own",
    has_usual_heads=False,
)
DEEPSEEK_V4 = MtpFamily(
    name="deepseek-v4-mtp",
    title="MTP, DeepSeek-V4",
    source="DeepSeek-V4 inference code; transformers 5.24 deepseek_v4; vLLM issue 43459",
    layout="deepseek-v4-mtp",
    marker=r"\{i\}\.e_proj\.weight",
    roots=("mtp.", "model.mtp."),
    names=(
        ("fc_embedding.weight", "{i}.e_proj.weight"),
        ("fc_hidden.weight", "{i}.h_proj.weight"),
        ("embedding_norm", "{i}.enorm.weight"),
        ("hidden_norm", "{i}.hnorm.weight"),
        ("norm", "{i}.norm.weight"),
        ("embedding", "{i}.emb.tok_emb.weight"),
        ("head", "{i}.head.weight"),
    ),
    block="{i}.",
    block_style="own",
    concat_order="separate matrices",
    hidden_input="target's last state, one row for each hyper-connection stream",
    recycled="output of the layer, one row for each hyper-connection stream",
    has_usual_heads=False,
    count_fields=("num_nextn_predict_layers", "n_mtp_layers"),
)

SPECULATORS = MtpFamily(
    name="speculators-mtp",
    title="MTP, Speculators",
    source="Speculators 0.6 to 0.9 MTPDraftModel",
    layout="speculators-mtp",
    marker=r"\{i\}\..*",
    roots=("mtp_layers.",),
    names=(
        ("fc.weight", "{i}.input_proj.weight"),
        ("embedding_norm", "{i}.token_layernorm.weight"),
        ("hidden_norm", "{i}.hidden_layernorm.weight"),
        ("norm", "{i}.final_layernorm.weight"),
    ),
    block="{i}.",
    is_served=True,
)
"""Never bundled: its own config describes the layer."""

FAMILIES: tuple[MtpFamily, ...] = (
    DEEPSEEK,
    GLM,
    KIMI_K3,
    STEP3P5,
    HUNYUAN,
    BAILING,
    QWEN,
    QWEN4,
    EXAONE,
    MIMO,
    MIMO_V2,
    LONGCAT,
    ERNIE,
    NEMOTRON_H,
    DEEPSEEK_V4,
)
BY_NAME = {family.name: family for family in FAMILIES}
COUNT_FIELDS: tuple[str, ...] = tuple(
    dict.fromkeys((*(key for family in FAMILIES for key in family.count_fields), "num_mtp_modules"))
)
"""Every config field that promises prediction layers; the last is MiniMax's, which ships none."""
