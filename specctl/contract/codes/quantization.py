"""Family 5, continued: quantised weights, their scales, and what the configs say of them."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD511",
        slug="scale-missing",
        severity="error",
        summary="A weight is stored quantised and no scale is stored for it.",
        why="Without its scale the stored numbers are not the weight; a loader that takes them as "
        "they are computes with values hundreds of times too large.",
        fix="Export again with the scales, or export the weight in bf16",
        source="vLLM issue 28435",
    ),
    Code(
        code="SD512",
        slug="scale-without-weight",
        severity="warning",
        summary="A scale is stored for a weight that is absent or not quantised.",
        why="One half of a pair was replaced or left out on export; engines either stop at the "
        "unexpected name or scale a weight that needs no scale.",
        fix="Export weight and scale together, or remove the scale of a bf16 weight",
        source="vLLM issue 28435",
    ),
    Code(
        code="SD513",
        slug="scale-shape",
        severity="error",
        summary="A scale's shape belongs to no way of dividing its weight.",
        why="A scale holds one number for the tensor, for each row, or for each block; another "
        "count applies numbers to the wrong elements.",
        fix="Take weight and scale from the same export; the block size is in "
        "`quantization_config`",
    ),
    Code(
        code="SD514",
        slug="quantization-not-stored",
        severity="warning",
        summary="The config declares quantised weights where the files hold plain ones.",
        why="Engines build quantised layers by the config and wait for scales that never come; the "
        "layers stay at their initial values or loading stops.",
        fix="Remove `quantization_config`, or name the plain modules in its ignore list",
        source="SGLang issue 35797; vLLM issue 26402",
    ),
    Code(
        code="SD515",
        slug="quantization-not-declared",
        severity="error",
        summary="The files hold quantised weights and no config declares how.",
        why="Nothing tells the method, the block size or which scale belongs to what.",
        fix="Restore `quantization_config` from the export",
    ),
    Code(
        code="SD516",
        slug="quantization-list-unmatched",
        severity="warning",
        summary="An entry of the quantisation ignore list names no module of the files.",
        why="A list written with fused names (`qkv_proj`, `gate_up_proj`) does not match files "
        "that hold the parts, and the reverse; engines that compare names then quantise what must "
        "stay plain.",
        fix="List the names as the files spell them",
        source="SGLang issues 35797 and 35887",
    ),
    Code(
        code="SD517",
        slug="quantization-sources-disagree",
        severity="warning",
        summary="config.json and hf_quant_config.json describe different quantisation.",
        why="TensorRT-LLM and SGLang read the second, vLLM and transformers the first.",
        fix="Keep the one that fits the stored weights, or make them equal",
    ),
    Code(
        code="SD518",
        slug="quantization-draft-layer-unlisted",
        severity="warning",
        summary="The prediction layer's precision is not what the target's quantisation config "
        "says of it.",
        why="Exporters leave prediction layers in bf16 and forget them in the ignore list, or list "
        "them under another prefix: the engine then builds a quantised layer for plain weights.",
        fix="Name the prediction layer's modules in the ignore list, as the files spell them",
        source="SGLang issue 17166; vLLM issue 26411",
    ),
    Code(
        code="SD519",
        slug="quantization-differs-from-target",
        severity="info",
        summary="The draft's weights are plain and the target's are quantised.",
        why="Legal, and each is loaded by its own config; engines that pass the target's method "
        "on to the draft fail or round its weights.",
        fix="State the draft's method on its own where the engine has such an option",
        source="SGLang issue 28196",
    ),
    Code(
        code="SD531",
        slug="weights-file-name-unusual",
        severity="info",
        summary="The index names a weight file that common file patterns do not match.",
        why="Loaders that collect `model*.safetensors` instead of following the index miss it, and "
        "report its tensors as absent.",
        fix="Nothing to do for engines that follow the index; else rename the file and the index "
        "entries",
        source="omlx issue 2062",
    ),
)
