"""Manifest text: strict reading, readable writing, round trip."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.contract.codec import (
    dump_manifest,
    load_manifest,
    manifest_json_schema,
    parse_manifest,
)
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.contract.manifest import Manifest, Origin


def refuse(text: str, *, is_json: bool = False) -> tuple[Diagnostic, ...]:
    with pytest.raises(DiagnosticError) as caught:
        parse_manifest(text, name="m.yaml", is_json=is_json)
    return caught.value.diagnostics


def codes(text: str) -> list[str]:
    return [d.code for d in refuse(text)]


def test_round_trip_in_yaml_and_json(manifest: Manifest) -> None:
    assert parse_manifest(dump_manifest(manifest), name="m.yaml") == manifest
    as_json = msgspec.json.encode(manifest).decode()
    assert parse_manifest(as_json, name="m.json", is_json=True) == manifest
    assert parse_manifest(as_json, name="m.yaml") == manifest, "JSON is YAML"


def test_dump_is_deterministic_ascii_and_in_schema_order(manifest: Manifest) -> None:
    text = dump_manifest(manifest)
    assert text == dump_manifest(parse_manifest(text, name="m.yaml"))
    assert text.isascii()
    heads = [line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()]
    assert heads == list(Manifest.__struct_fields__)
    assert "    fc: {key: fc.weight, file: model.safetensors" in text, "one tensor, one line"


awkward = st.one_of(
    st.sampled_from(
        ["", "no", "yes", "null", "~", "1e5", "1e-05", "0x1F", "012", "1:30", "2024-01-01", "<<",
         "=", "true", ".inf", "- a", "a: b", "#", "a #b", "'", '"', "\\", "\t", "a\nb", " a ",
         "{}", "[]", "&a", "*a", "!t", "%", "@", "\x85", "\u2028", "\ufeff", "\U0001f600"]
    ),
    st.text(st.characters(blacklist_categories=("Cs",)), max_size=12),
)  # fmt: skip
numbers = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)


@settings(deadline=None, max_examples=80)
@given(text=awkward, theta=st.floats(1e-300, 1e300), values=st.dictionaries(awkward, numbers))
def test_any_text_and_number_survives(
    manifest_parts: Manifest, text: str, theta: float, values: dict[str, float]
) -> None:
    target = manifest_parts.target
    rope = msgspec.structs.replace(target.decoder.rope, theta=theta, parameters=values)
    decoder = msgspec.structs.replace(target.decoder, rope=rope)
    changed = msgspec.structs.replace(
        manifest_parts,
        target=msgspec.structs.replace(target, source=text, decoder=decoder),
        origins={**manifest_parts.origins, "target.source": Origin(kind="given", where=text)},
    )
    from specctl.contract import strict, yaml_text

    read = yaml_text.parse(dump_manifest(changed), name="m.yaml", is_json=False)
    assert strict.convert(read, Manifest, name="m.yaml") == changed


def test_duplicate_keys_are_refused_with_both_lines(manifest: Manifest) -> None:
    text = dump_manifest(manifest).replace("  hidden_size: 16\n", "", 0)
    text = text.replace("  vocab_size: 64\n", "  vocab_size: 64\n  vocab_size: 65\n")
    (found,) = refuse(text)
    assert found.code == "SD704"
    assert found.where.startswith("m.yaml:")
    assert "`vocab_size`" in found.message
    broken = (
        msgspec.json.encode(manifest)
        .decode()
        .replace('"vocab_size":64', '"vocab_size":64,"vocab_size":65')
    )
    assert [d.code for d in refuse(broken, is_json=True)] == ["SD704"]


def test_unknown_key_names_its_place_and_nearest_match(manifest: Manifest) -> None:
    text = dump_manifest(manifest).replace("  verify_width: 4", "  verify_widht: 4")
    missing_or_unknown = {d.code: d for d in refuse(text)}
    assert set(missing_or_unknown) == {"SD705", "SD707"}
    unknown = missing_or_unknown["SD705"]
    assert unknown.where == "m.yaml#/geometry/verify_widht"
    assert unknown.help == "did you mean `verify_width`?"
    assert missing_or_unknown["SD707"].where == "m.yaml#/geometry"


def test_every_problem_is_reported_at_once(manifest: Manifest) -> None:
    text = dump_manifest(manifest)
    text = text.replace("hidden_size: 16", "hidden_size: '16'", 1)
    text = text.replace("is_head_tied: false", "is_head_tied: no")
    text = text.replace("verify_width: 4", "verify_width: 0")
    text = text.replace("map_kind: reduced", "map_kind: reducd")
    found = {d.where: d for d in refuse(text)}
    assert {d.code for d in found.values()} == {"SD706"}
    assert set(found) == {
        "m.yaml#/target/decoder/hidden_size",
        "m.yaml#/target/is_head_tied",
        "m.yaml#/geometry/verify_width",
        "m.yaml#/vocabulary/map_kind",
    }
    size = found["m.yaml#/target/decoder/hidden_size"]
    assert (size.expected, size.found) == ("integer >= 1", '"16" (text)')
    assert found["m.yaml#/geometry/verify_width"].found == "0 (integer)"
    assert found["m.yaml#/target/is_head_tied"].found == '"no" (text)'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("theta: 10000.0", "theta: .inf"),
        ("theta: 10000.0", "theta: .nan"),
        ("theta: 10000.0", "theta: true"),
        ("bos_token_id: 1", "bos_token_id: 1.0"),
        ("bos_token_id: 1", "bos_token_id: true"),
        ("eos_token_ids: [2]", "eos_token_ids: 2"),
        ("eos_token_ids: [2]", "eos_token_ids: [2, null]"),
        ("begin: 100", "begin: -1"),
        ("vocab_size: 64", "vocab_size: "),
    ],
)
def test_wrong_types(manifest: Manifest, old: str, new: str) -> None:
    text = dump_manifest(manifest)
    assert old in text
    assert codes(text.replace(old, new, 1)) == ["SD706"]


def test_yaml_integers_are_decimal_and_floats_need_no_dot(manifest: Manifest) -> None:
    text = dump_manifest(manifest).replace("theta: 10000.0", "theta: 1e4")
    assert parse_manifest(text, name="m.yaml").target.decoder.rope.theta == 10000.0
    text = dump_manifest(manifest).replace("bos_token_id: 1", "bos_token_id: 0o1")
    assert codes(text) == ["SD706"]


@pytest.mark.parametrize(
    "text",
    ["", "- a\n- b\n", "just text", "a: [", "a: &x 1\nb: *x\n", "a: !!str 1",
     "<<: {a: 1}\nb: !!python/name:os.x\n", "? [a]\n: b\n", "\x00", "%YAML 9.9\n---\na: 1",
     "[" * 5000, "a: 1\n---\nb: 2\n", "\ta: 1", "a: b: c"],
)  # fmt: skip
def test_text_that_is_no_mapping(text: str) -> None:
    assert codes(text) == ["SD703"]


@pytest.mark.parametrize("text", ["{", "[]", '"a"', "NaN", '{"a": 1} x', "[" * 200_000])
def test_json_that_is_no_mapping(text: str) -> None:
    assert [d.code for d in refuse(text, is_json=True)] == ["SD703"]


def test_newer_schema_is_named_before_its_unknown_keys() -> None:
    (found,) = refuse("schema_version: 2\nnew_section: {}\n")
    assert (found.code, found.where) == ("SD701", "m.yaml#/schema_version")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, data in (("absent.yaml", None), ("latin.yaml", b"a: \xff"), ("dir.yaml", None)):
        if path == "dir.yaml":
            (tmp_path / path).mkdir()
        if data is not None:
            (tmp_path / path).write_bytes(data)
        with pytest.raises(DiagnosticError) as caught:
            load_manifest(tmp_path / path)
        assert [d.code for d in caught.value.diagnostics] == ["SD703"]
        assert path in caught.value.diagnostics[0].where
        has_text = path == "latin.yaml"
        assert ("the line named above" in str(caught.value.diagnostics[0].help)) is has_text


def test_json_schema_accepts_what_the_codec_writes(manifest: Manifest) -> None:
    schema = manifest_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(msgspec.json.encode(manifest))
    jsonschema.validate(document, schema)
    document["geometry"]["verify_widht"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)
