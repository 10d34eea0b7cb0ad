"""Family 7: manifest."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD701",
        slug="schema-too-new",
        severity="error",
        summary="The manifest's `schema_version` is newer than this specctl understands.",
        why="A newer schema may have moved or redefined a fact; reading it with the old meaning "
        "would run a wrong value instead of failing.",
        fix="Upgrade with `pip install --upgrade specctl`, or write the manifest again with this "
        "version: `specctl manifest TARGET DRAFT -o manifest.yaml`",
    ),
    Code(
        code="SD702",
        slug="digest-mismatch",
        severity="error",
        summary="A file that the manifest points to has another size or digest than was recorded.",
        why="The facts in the manifest were read from other bytes. Offsets, shapes, the vocabulary "
        "map or the configuration may have changed since, and a tensor read at the recorded "
        "offsets would hold other weights without any error.",
        fix="Restore the file that was recorded, or write the manifest again with "
        "`specctl manifest`",
    ),
    Code(
        code="SD703",
        slug="manifest-unreadable",
        severity="error",
        summary="The manifest is not a YAML or JSON mapping that can be read.",
        why="Nothing can be concluded from the file: it is missing, not UTF-8, not YAML, uses "
        "anchors or tags that a manifest never needs, or its top level is not a mapping.",
        fix="Correct the line named above, or write the manifest again with `specctl manifest`",
    ),
    Code(
        code="SD704",
        slug="manifest-duplicate-key",
        severity="error",
        summary="A mapping in the manifest has the same key twice.",
        why="YAML and JSON readers keep the last value and say nothing, so which of the two facts "
        "is used depends on the order of lines.",
        fix="Keep one of the two lines",
        source="YAML 1.2.2, 3.2.1.3: the keys of a mapping are unique",
    ),
    Code(
        code="SD705",
        slug="manifest-unknown-key",
        severity="error",
        summary="The manifest has a key that the schema does not know.",
        why="A misspelled key would otherwise be ignored, and the setting it was meant for would "
        "silently keep another value.",
        fix="Rename or remove the key; `specctl manifest --schema` prints every known key",
    ),
    Code(
        code="SD706",
        slug="manifest-value-type",
        severity="error",
        summary="A value in the manifest has the wrong type or lies outside its range.",
        why="YAML turns `no`, `1e5` or `07` into surprising types in some readers; a value is used "
        "only when it is exactly what the schema asks for.",
        fix="Write a value of the expected type; `specctl manifest --schema` prints the types",
    ),
    Code(
        code="SD707",
        slug="manifest-key-missing",
        severity="error",
        summary="A key that the schema requires is not in the manifest.",
        why="Every fact is written down; a missing one has no default, because a guessed default "
        "runs with a wrong value instead of failing.",
        fix="Write the manifest again with `specctl manifest`, or add the key",
    ),
    Code(
        code="SD708",
        slug="origin-missing",
        severity="error",
        summary="A fact in the manifest has no entry in `origins`.",
        why="Each fact says whether it was read from a file, derived by a named rule or given by "
        "the user; without that a wrong value cannot be traced to its source.",
        fix="Add an entry for the path, or for a section that contains it, under `origins`",
    ),
    Code(
        code="SD709",
        slug="origin-unmatched",
        severity="error",
        summary="An entry in `origins` names no fact of the manifest.",
        why="The path is misspelled or its fact was removed, so the origin that was meant for "
        "another fact is not recorded.",
        fix="Correct or remove the path under `origins`",
    ),
    Code(
        code="SD710",
        slug="manifest-inconsistent",
        severity="error",
        summary="Two facts in the manifest contradict each other, or one contradicts its file.",
        why="One of them is wrong, usually after an edit by hand. Using either would run with "
        "shapes, widths or ids that do not belong together.",
        fix="Correct the fact, or write the manifest again with `specctl manifest`",
    ),
    Code(
        code="SD711",
        slug="fingerprint-stale",
        severity="error",
        summary="The manifest's `fingerprint` does not belong to its facts.",
        why="Two processes compare fingerprints before they exchange state. A stale one lets them "
        "agree although their facts differ, or refuse each other although they are equal.",
        fix="Write the manifest again with `specctl manifest`; after an edit by hand, set "
        "`fingerprint` to the expected value",
    ),
    Code(
        code="SD712",
        slug="manifest-file-missing",
        severity="error",
        summary="A file or directory that the manifest points to does not exist.",
        why="Relative paths count from the manifest's own directory; moving the manifest or the "
        "checkpoint breaks them.",
        fix="Restore the file, or write the manifest again with `specctl manifest`",
    ),
    Code(
        code="SD713",
        slug="given-overrides-file",
        severity="warning",
        summary="A value given on the command line differs from what the checkpoint's file says.",
        why="The given value is used and recorded as `given`. When it is wrong nothing crashes: "
        "the draft is fed or read differently than it was trained, and accept length sinks.",
        fix="Leave the option out to use the value of the file",
    ),
    Code(
        code="SD714",
        slug="draft-option-without-draft",
        severity="error",
        summary="An option that states a fact of a draft was given without a draft.",
        why="The option would have no effect, and the manifest would decode with the target alone.",
        fix="Name the draft as the second argument, or leave the option out",
    ),
    Code(
        code="SD715",
        slug="token-map-unusable",
        severity="error",
        summary="The token map does not fit the draft's head, or selects nothing.",
        why="Draft id i is row i of the draft's head. With another map each proposed word is "
        "another one; nothing crashes and accept length falls to 1.",
        fix="Build a map with `specctl build-token-map`, or leave `--token-map` out",
    ),
    Code(
        code="SD716",
        slug="not-served",
        severity="error",
        summary="A manifest was asked for a target or draft that the runtime does not compute.",
        why="A manifest describes dense llama, mistral, qwen2 or qwen3 layers and the drafts "
        "eagle3, dspark and mtp with one such layer. For another one it would describe another "
        "model.",
        fix="`specctl inspect`, `validate` and `convert` work on it; serve it with another engine",
    ),
)
