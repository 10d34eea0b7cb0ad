"""Family 5: tensors: names, shapes, dtypes, what is missing and what is left over."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD501",
        slug="tensor-missing",
        severity="error",
        summary="A tensor that the format requires is not in the files.",
        why="Loaders that do not insist leave it at random values: acceptance 1.00, no error.",
        fix="Export the checkpoint again and check that the tensor is written",
    ),
    Code(
        code="SD502",
        slug="tensor-unmapped",
        severity="warning",
        summary="A tensor has a name that the format does not define; it is not used.",
        why="Either the file holds more than the draft, or a part of the draft is misnamed.",
        fix="Rename it to the format's spelling, or remove it",
    ),
    Code(
        code="SD503",
        slug="tensor-shape",
        severity="error",
        summary="A tensor's shape does not follow from the config.",
        why="The config belongs to other weights, or the tensor to another model.",
        fix="Take config and weights from the same training run",
    ),
    Code(
        code="SD504",
        slug="embedding-decoy-ignored",
        severity="info",
        summary="A tensor is named like the target's embedding but lies inside a layer or draft.",
        why="Loaders that match by suffix pick such copies; this one was passed over.",
        fix="Nothing to do here; compare when another engine's acceptance differs",
        source="SGLang pull request 39643; Speculators resolves by suffix",
    ),
    Code(
        code="SD505",
        slug="tensor-spelled-twice",
        severity="error",
        summary="One tensor is stored under two spellings.",
        why="Nothing tells which of the two is trained.",
        fix="Remove one spelling (`midlayer.` or `layers.0.`)",
    ),
    Code(
        code="SD506",
        slug="tensor-flag-disagrees",
        severity="warning",
        summary="A tensor is stored whose config flag is false or absent.",
        why="Readers that follow the flag leave the tensor out and compute something else. A norm "
        "or Markov head whose flag is absent is applied here; one whose flag is false is an error, "
        "because without it the draft runs and nearly every token is refused.",
        fix="Set the flag to true, or remove the tensor if it was not trained",
        source="vLLM pull request 38111",
    ),
    Code(
        code="SD507",
        slug="tensor-ignored",
        severity="info",
        summary="A tensor is known and has no use here.",
        why="Copies of the target's weights and rotary buffers are recomputed or shared.",
        fix="Nothing to do",
    ),
    Code(
        code="SD508",
        slug="tensor-dtype",
        severity="error",
        summary="A tensor's dtype is not one that its role can have.",
        why="Maps need whole numbers, and this version's runtime reads plain weights only. A "
        "quantised weight with its scales is right for engines that know its method, so it is an "
        "info; a manifest needs plain weights.",
        fix="Export weights as bf16, f16 or f32, `d2t` as int64 and `t2d` as bool",
    ),
    Code(
        code="SD509",
        slug="embedding-not-shareable",
        severity="error",
        summary="The draft has no embedding of its own and the target's has another width.",
        why="The draft's first layer needs rows of its own hidden size.",
        fix="Export the draft with `embed_tokens.weight`",
        source="SGLang issue 4716; vLLM issue 18906",
    ),
    Code(
        code="SD510",
        slug="head-borrowed",
        severity="info",
        summary="The draft has no output head; the target's rows are used.",
        why="Right for drafts trained with the target's head frozen; otherwise a tensor is lost.",
        fix="Nothing to do if the head was frozen in training; else restore `lm_head.weight`",
        source="SGLang issue 27908",
    ),
)
