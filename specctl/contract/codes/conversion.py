"""Family 6: conversion and normalization."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD601",
        slug="conversion-lossy",
        severity="error",
        summary="The target dialect cannot hold something that the source has.",
        why="What is dropped in silence is missed only when acceptance has fallen. Each loss has a "
        "name, and a conversion goes on only when the user names it.",
        fix="Pass `--allow NAME` with the name that the finding gives, or choose another dialect",
    ),
    Code(
        code="SD602",
        slug="not-representable",
        severity="error",
        summary="The draft cannot be written in that dialect, or a fact for it is missing.",
        why="The dialect has no form for it, so that any file would describe another model.",
        fix="Give the missing fact, or choose another dialect; `specctl convert --to help` lists "
        "them",
    ),
    Code(
        code="SD603",
        slug="output-exists",
        severity="error",
        summary="The output exists and is not what this command would write.",
        why="Replacing a directory deletes what is in it. An output that is equal, byte for byte, "
        "is left as it is and counts as done.",
        fix="Choose another output, or pass `--force` to replace a directory that specctl wrote",
    ),
    Code(
        code="SD604",
        slug="output-inside-source",
        severity="error",
        summary="The output is a source, lies inside one, or holds one.",
        why="A conversion never changes what it reads; writing there could destroy the only copy.",
        fix="Choose an output outside every source",
    ),
    Code(
        code="SD605",
        slug="output-refused",
        severity="error",
        summary="The system refused to write the output: no permission, or the disk is full.",
        why="Nothing was left behind: an output appears whole or not at all.",
        fix="Free space, or choose a directory that can be written",
    ),
    Code(
        code="SD606",
        slug="output-differs",
        severity="error",
        summary="The written checkpoint, read again, does not have the facts of the source.",
        why="This is a defect of specctl or a file that changed while it was read; the output was "
        "removed.",
        fix="Run the command again; if it happens again, report it with the finding's text",
    ),
    Code(
        code="SD607",
        slug="map-does-not-apply",
        severity="error",
        summary="A token map was given that cannot be applied to this draft.",
        why="Rows can be gathered only from a head over the whole target vocabulary; a head that "
        "is reduced already lacks the other rows. A reduced head without a map takes one that has "
        "an id for each of its rows, in their order.",
        fix="Convert the draft with its full head, or give a map that fits the head",
    ),
    Code(
        code="SD608",
        slug="fix-unsafe",
        severity="info",
        summary="A finding has a fix that may change what the draft computes; it was not applied.",
        why="The fix follows a guess that fits most files and not all of them.",
        fix="Check the guess, then pass `--unsafe-fixes`, or state the fact with `--set`",
    ),
    Code(
        code="SD609",
        slug="setting-unknown",
        severity="error",
        summary="`--set` names a fact that the format does not have, or a value of the wrong type.",
        why="A setting without effect would look as if it had been applied.",
        fix="Use one of the facts that the finding lists",
    ),
    Code(
        code="SD610",
        slug="loss-not-met",
        severity="warning",
        summary="`--allow` names a loss that this conversion does not have.",
        why="A list of allowed losses that is longer than needed hides a loss that comes later.",
        fix="Leave the name out",
    ),
    Code(
        code="SD611",
        slug="layers-do-not-fit",
        severity="error",
        summary="Prediction layers and target do not belong together.",
        why="The layer index, the widths and the vocabulary of a bundled draft are the target's.",
        fix="Use the target that the prediction layers were made for",
    ),
)
