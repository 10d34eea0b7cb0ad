"""Say which format a checkpoint is in, from config and tensor names only.

Invariants: total and unique: every checkpoint gives one format, or no format and one error. The
path is never looked at (vLLM issues 42376 and 47486: methods guessed from directory names).
Order: layouts that are recognised but not read, then `speculators_model_type`, then draft tensors,
then the target's embedding; two answers at one step are a conflict, not a preference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import DraftFormat
from specctl.draft import Detection, Role, TargetFormat
from specctl.formats.deepseek_mtp import layer_indexes
from specctl.formats.embedding import find_embedding
from specctl.formats.fields import CONFIG
from specctl.formats.model_types import ARCHITECTURES

SPECULATORS_TYPES: Mapping[str, DraftFormat] = {
    "eagle3": "speculators-eagle3",
    "dspark": "speculators-dspark",
    "mtp": "speculators-mtp",
}

# Layouts that a draft's tensors can show, and the formats that use each.
LAYOUT_FORMATS: Mapping[str, tuple[DraftFormat, ...]] = {
    "eagle3": ("speculators-eagle3", "safeailab-eagle3"),
    "dspark": ("speculators-dspark",),
    "speculators-mtp": ("speculators-mtp",),
    "deepseek-mtp": ("deepseek-mtp",),
}
_FLAT_FORMATS: Mapping[str, DraftFormat] = {
    "eagle3": "safeailab-eagle3",
    "deepseek-mtp": "deepseek-mtp",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Foreign:
    """A layout that is recognised and not read."""

    name: str
    config_keys: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    key_pattern: str | None = None


FOREIGN: tuple[_Foreign, ...] = (
    _Foreign(name="P-EAGLE", architectures=("PEagleDraftModel",), key_pattern=r"mask_hidden"),
    _Foreign(
        name="DFlash2",
        architectures=("DFlash2DraftModel",),
        key_pattern=r"candidate_selector\..*",
    ),
    _Foreign(
        name="Domino",
        architectures=("DominoDraftModel",),
        key_pattern=r"(logit_head\.)?prefix_gru\..*",
    ),
    _Foreign(
        name="DeepSpec DSpark",
        config_keys=("dspark_config", "dspark_block_size"),
        architectures=("Qwen3DSparkModel", "Gemma4DSparkModel", "Qwen3OmniDSparkModel"),
    ),
    _Foreign(name="z-lab DFlash", config_keys=("dflash_config",)),
    _Foreign(name="MLA EAGLE-3", architectures=("Eagle3DeepseekV2ForCausalLM",)),
    _Foreign(name="Medusa", config_keys=("medusa_num_heads",)),
    _Foreign(name="Hydra", config_keys=("hydra_num_heads",)),
    _Foreign(name="MLPSpeculator", key_pattern=r"speculator\.emb\.0\.weight"),
    _Foreign(name="Speculators eagle (EAGLE-1)", key_pattern=r"fusion_fc\.weight"),
)


def detect(checkpoint: Checkpoint) -> Detection:
    """Return role and format of a checkpoint, or the reason why there is none.

    Diagnostics: SD201 (unknown), SD202 (contradictory), SD205 (recognised, not read).
    """
    found = _detect(checkpoint)
    placed = tuple(
        msgspec.structs.replace(d, where=mark_place(d.where, checkpoint)) for d in found.diagnostics
    )
    return replace(found, diagnostics=placed)


def mark_place(mark: str, checkpoint: Checkpoint) -> str:
    """Return the place of a piece of evidence: a tensor with its file, or a config key."""
    name = mark.removeprefix("tensor ").split(" = ")[0]
    entry = checkpoint.tensors.get(name)
    return name if entry is None else entry.describe()


def _detect(checkpoint: Checkpoint) -> Detection:
    config = checkpoint.config or {}
    keys = checkpoint.tensors
    declared = config.get("speculators_model_type")
    foreign = _foreign(config, keys, declared)
    if foreign is not None:
        return foreign
    layouts = {name: mark for name, find in _LAYOUTS.items() if (mark := find(keys))}
    if isinstance(declared, str):
        return _declared(declared, layouts)
    if "dspark" in layouts or "speculators-mtp" in layouts:
        return _headless(layouts)
    target = _target_mark(checkpoint, layouts)
    if target is not None and "deepseek-mtp" in layouts:
        # The prediction layer is bundled with its trunk; the target's reader sets it apart.
        layouts = {name: mark for name, mark in layouts.items() if name != "deepseek-mtp"}
    marks = [*layouts.values(), *([target] if target else [])]
    if len(marks) > 1:
        return _failed("SD202", f"tensor names of two layouts: {' and '.join(marks)}", marks)
    if target is not None:
        return _found("target", "huggingface", marks)
    if layouts:
        return _found("draft", _FLAT_FORMATS[next(iter(layouts))], marks)
    return _without_marks(checkpoint, config)


def _declared(declared: str, layouts: Mapping[str, str]) -> Detection:
    mark = f"{CONFIG}#/speculators_model_type = {declared}"
    format = SPECULATORS_TYPES.get(declared)
    if format is None:
        return _failed(
            "SD205", f"Speculators type `{declared}` is not read by this version", [mark]
        )
    other = [seen for name, seen in layouts.items() if format not in LAYOUT_FORMATS[name]]
    if other:
        return _failed("SD202", f"the config says `{declared}`, the tensors say {other[0]}", [mark])
    return _found("draft", format, [mark, *layouts.values()])


def _headless(layouts: Mapping[str, str]) -> Detection:
    name = "dspark" if "dspark" in layouts else "speculators-mtp"
    return _failed(
        "SD205",
        f"{layouts[name]}, but the config has no `speculators_model_type`",
        [layouts[name]],
    )


def _without_marks(checkpoint: Checkpoint, config: Mapping[str, object]) -> Detection:
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    mark = f"{CONFIG}#/architectures/0 = {first}"
    if not checkpoint.tensors and first in ARCHITECTURES and "draft_vocab_size" not in config:
        return _found("target", "huggingface", [mark])
    if not checkpoint.tensors and "draft_vocab_size" in config:
        return _found("draft", "safeailab-eagle3", [f"{CONFIG}#/draft_vocab_size"])
    if "fc.weight" in checkpoint.tensors:
        if "hidden_norm.weight" in checkpoint.tensors:
            return _failed("SD205", "the names are those of a z-lab DFlash draft", [mark])
        return _failed("SD205", "the names are those of an EAGLE-1 or EAGLE-2 draft", [mark])
    count = len(checkpoint.tensors)
    return _failed("SD201", f"none of the {count} tensor names belongs to a known layout", [mark])


def _foreign(
    config: Mapping[str, object], keys: Mapping[str, object], declared: object
) -> Detection | None:
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    for entry in FOREIGN:
        mark = _foreign_mark(entry, config, keys, first)
        if mark is None:
            continue
        if isinstance(declared, str) and declared in SPECULATORS_TYPES:
            said = f"the config says `{declared}`, and {mark} belongs to {entry.name}"
            return _failed("SD202", said, [mark])
        return _failed("SD205", f"{mark}: {entry.name} is not read by this version", [mark])
    return None


def _foreign_mark(
    entry: _Foreign,
    config: Mapping[str, object],
    keys: Mapping[str, object],
    architecture: object,
) -> str | None:
    for key in entry.config_keys:
        if key in config:
            return f"{CONFIG}#/{key}"
    if architecture in entry.architectures:
        return f"{CONFIG}#/architectures/0 = {architecture}"
    if entry.key_pattern is not None:
        return _first_match(keys, entry.key_pattern)
    return None


def _target_mark(checkpoint: Checkpoint, layouts: Mapping[str, str]) -> str | None:
    embedding = find_embedding(checkpoint.tensors, None)
    if embedding is None:
        return None
    # A draft may carry an embedding spelled like a target's; it has no trunk layers beside it.
    if layouts and not _has_trunk(checkpoint, embedding.key.split(".")[0]):
        return None
    return f"tensor {embedding.key}"


def _has_trunk(checkpoint: Checkpoint, prefix: str) -> bool:
    trunk = re.compile(re.escape(prefix) + r"\.(?:.*\.)?(?:layers|h|blocks)\.(\d+)\..*")
    own = set(layer_indexes(checkpoint.tensors))
    matches = (trunk.fullmatch(key) for key in checkpoint.tensors)
    return any(match is not None and int(match[1]) not in own for match in matches)


def _first_match(keys: Mapping[str, object], pattern: str) -> str | None:
    found = next((key for key in sorted(keys) if re.fullmatch(pattern, key)), None)
    return None if found is None else f"tensor {found}"


def _eagle3_mark(keys: Mapping[str, object]) -> str | None:
    return _first_match(keys, r"midlayer\..*|layers\.0\.hidden_norm\.weight")


def _dspark_mark(keys: Mapping[str, object]) -> str | None:
    return _first_match(keys, r"markov_head\..*|markov_w1\.weight|confidence_head\..*")


def _speculators_mtp_mark(keys: Mapping[str, object]) -> str | None:
    return _first_match(keys, r"mtp_layers\.\d+\..*")


def _deepseek_mtp_mark(keys: Mapping[str, object]) -> str | None:
    indexes = layer_indexes(keys)
    return f"tensor model.layers.{indexes[0]}.eh_proj.weight" if indexes else None


_LAYOUTS: Mapping[str, Callable[[Mapping[str, object]], str | None]] = {
    "eagle3": _eagle3_mark,
    "dspark": _dspark_mark,
    "speculators-mtp": _speculators_mtp_mark,
    "deepseek-mtp": _deepseek_mtp_mark,
}


def _found(role: Role, format: DraftFormat | TargetFormat, marks: list[str]) -> Detection:
    return Detection(role=role, format=format, evidence=tuple(marks), diagnostics=())


def _failed(code: str, message: str, marks: list[str]) -> Detection:
    finding: Diagnostic = diagnose(
        code,
        where=marks[0],
        message=message,
        expected="one known layout",
        found=", ".join(marks),
    )
    return Detection(role=None, format=None, evidence=tuple(marks), diagnostics=(finding,))
