"""Family 2: format detection and config fields."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD201",
        slug="format-unknown",
        severity="error",
        summary="Neither the config nor the tensor names belong to a known target or draft layout.",
        why="Without a layout no tensor has a meaning; loading by shape alone would guess.",
        fix="Check that the directory holds config.json and the weights it was published with; "
        "docs/reference/formats.md lists the layouts that are read",
    ),
    Code(
        code="SD202",
        slug="format-ambiguous",
        severity="error",
        summary="Config and tensor names, or two groups of names, point to different layouts.",
        why="Each reading gives another model; the wrong one loads and accepts next to nothing.",
        fix="Remove the files or config keys of the other layout, or export the draft again",
    ),
    Code(
        code="SD203",
        slug="architecture-unsupported",
        severity="error",
        summary="The layers' architecture is not one that this version can describe or run.",
        why="The layers compute something else than a dense Llama-family layer, so no manifest can "
        "describe them. A target is inspected all the same, and this is only a note.",
        fix="Use a dense llama, mistral, qwen2 or qwen3 checkpoint, or another engine for this one",
    ),
    Code(
        code="SD204",
        slug="remote-code-ignored",
        severity="info",
        summary="The config names Python code of its own (`auto_map`).",
        why="Loaders that follow it run code from the checkpoint. Here files are only read.",
        fix="Nothing to do here; do not enable remote code for this draft in other engines",
    ),
    Code(
        code="SD205",
        slug="format-unsupported",
        severity="error",
        summary="The layout, or a variant of it, is recognised but not read by this version.",
        why="Reading it as a near relative would drop tensors or change the arithmetic.",
        fix="Convert it with the library that wrote it to one of the supported layouts",
    ),
    Code(
        code="SD206",
        slug="config-field-missing",
        severity="error",
        summary="A config field is absent and no rule of the format gives its value.",
        why="Library defaults belong to another model; a guessed dimension fails late or silently.",
        fix="Add the field from the training configuration",
    ),
    Code(
        code="SD207",
        slug="config-field-invalid",
        severity="error",
        summary="A config field has the wrong type or a value outside its range.",
        why="Readers coerce such values differently.",
        fix="Correct the field in config.json",
    ),
    Code(
        code="SD208",
        slug="config-conflict",
        severity="error",
        summary="The config states one fact in two places with different values.",
        why="Engines read different places, so the same file behaves differently in each.",
        fix="Keep one of the two, or make them equal",
        source="rope in two spellings: vLLM issue 51092; ids at two levels: vLLM issue 48932",
    ),
    Code(
        code="SD209",
        slug="target-name-missing",
        severity="warning",
        summary="A Speculators config does not name the target it was trained for.",
        why="vLLM refuses such a file, and nobody can tell later which target it belongs to.",
        fix="Set `speculators_config.verifier.name_or_path` to the target's hub id",
    ),
    Code(
        code="SD210",
        slug="proposal-method-unknown",
        severity="error",
        summary="`default_proposal_method` names no entry of `proposal_methods`.",
        why="The token count is read from that entry; without it the geometry is undefined.",
        fix="Make the name equal to the `proposal_type` of one entry",
    ),
    Code(
        code="SD211",
        slug="config-field-unknown",
        severity="info",
        summary="A config field is none that the format defines, and nothing reads it.",
        why="It may be a note of the trainer, or a switch that changes the arithmetic in the "
        "engine it was written for.",
        fix="Remove the field, or check what it does in the library that wrote it; `--strict` "
        "makes every such field an error",
    ),
    Code(
        code="SD212",
        slug="engine-refuses",
        severity="error",
        summary="An engine named with `--engine` does not load this draft.",
        why="The statement was read in the engine's sources; the note names release and file.",
        fix="Convert the draft to a dialect that the engine reads: `specctl convert DRAFT --to "
        "sglang` or `--to vllm`; `--to help` lists all",
    ),
    Code(
        code="SD213",
        slug="engine-runs-wrong",
        severity="error",
        summary="An engine named with `--engine` loads this draft and runs something else.",
        why="The target still verifies every token, so nothing fails: only the accept length "
        "drops.",
        fix="State the field that the message names, or convert the draft to a dialect whose "
        "meaning the engine shares",
    ),
    Code(
        code="SD220",
        slug="format-retired",
        severity="warning",
        summary="The layout was dropped by the engines and libraries that once read it.",
        why="Engines of today refuse it, or take it for another model.",
        fix="Convert it: `specctl convert SOURCE --to eagle` writes the layout that is still read",
        source="vLLM issues 11126 and 11417; Speculators 0.7 dropped the type `eagle`",
    ),
    Code(
        code="SD221",
        slug="map-beside-weights",
        severity="warning",
        summary="The vocabulary map lies in a file of its own, not in the weights.",
        why="Engines read the weights only and then take draft id i for target id i: acceptance "
        "collapses, nothing fails.",
        fix="Store the map in the weights: `specctl normalize` does",
        source="NeMo Automodel issue 2447; Model-Optimizer `d2t.pt`",
    ),
    Code(
        code="SD222",
        slug="map-not-ascending",
        severity="info",
        summary="A draft's map is not in ascending order of target ids.",
        why="Engines take any order, and Model-Optimizer writes the order of frequency. All other "
        "trainers write ascending ids: a head that one of them trained, under a map in another "
        "order, proposes other tokens than it means. Speculators' own training gathers the "
        "target's head by the mask, in ascending order.",
        fix="Nothing to do when map and head were reordered together; `specctl validate --deep "
        "--target TARGET` compares the head's rows (SD532)",
        source="Speculators 0.9 `load_verifier_weights`; Model-Optimizer writes rank order",
    ),
    Code(
        code="SD223",
        slug="mask-missing",
        severity="warning",
        summary="A Speculators draft has a map and no mask `t2d`.",
        why="The library wants both or neither and stops; engines read the map alone.",
        fix="Add `t2d`, which follows from the map: `specctl normalize` does",
        source="Speculators 0.9 `load_verifier_weights`; Model-Optimizer's vLLM form has no mask",
    ),
    Code(
        code="SD240",
        slug="bundled-layout-unknown",
        severity="info",
        summary="A target holds prediction layers in a layout that this version does not read.",
        why="The target is read as usual; the layers are counted and not described.",
        fix="Nothing to do for the target; docs/reference/formats.md lists the layouts",
    ),
    Code(
        code="SD230",
        slug="latent-attention-listed",
        severity="info",
        summary="The layers of a block draft have latent attention (MLA).",
        why="Names and shapes are checked against the config. What the layers compute is not "
        "described by a manifest, and no other dialect has a form for it.",
        fix="Nothing to do here; such a draft can be inspected and validated, and not converted",
        source="SpecForge pull request 758; SGLang pull request 35901",
    ),
)
