"""Hypothesis strategies for broken checkpoints: generated texts, and fixtures changed in places."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from specctl.checkpoint import Checkpoint
from specctl.checkpoint.tensor_entry import DTYPE_BITS

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
MAX_INPUT_BYTES = 1 << 20
Files = dict[str, bytes]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 10**12, 10**30, -(10**30), 1.5, 1e308, -1e308, 1e-300),
    *((1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63) - 1),
    *("", "x", "eagle3", "mtp", "\x00", "\ud800", "../x", "a" * 5000, "{i}", "\u202e", "\n"),
    *([], {}, [[]], {"a": {}}, [1, 2, 3], [None], [-1, 10**20], ["a", "b"], [[1], [2]]),
    [0] * 300,
    {str(number): number for number in range(300)},
    json.loads("[" * 60 + "]" * 60),
)

# Copies: a value that is put into a config may be changed there.
scalars = (
    st.sampled_from(ODD_VALUES).map(deepcopy) | st.integers() | st.floats() | st.text(max_size=6)
)
anything: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def encode(value: Any) -> bytes:
    """Return JSON text, half surrogate pairs included where a value has them."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def with_length(text: bytes, data: bytes = b"") -> bytes:
    """Return a weight file with this header."""
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def mutated(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> bytes:
    """Cut, overwrite, insert or repeat a few bytes of `source`."""
    raw = bytearray(draw(source))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(raw)))
        action = draw(st.sampled_from(["cut", "set", "insert", "repeat", "flip"]))
        piece = draw(st.binary(max_size=9) | st.sampled_from([b"NaN", b"\xef\xbb\xbf", b"\\ud800"]))
        if action == "cut":
            del raw[place:]
        elif action == "set":
            raw[place : place + len(piece)] = piece
        elif action == "insert":
            raw[place:place] = piece
        elif action == "repeat":
            raw[place:place] = raw[max(0, place - 12) : place]
        elif place < len(raw):
            raw[place] ^= 1 << draw(st.integers(0, 7))
    return bytes(raw)


numbers = st.integers(-1, 40) | st.sampled_from([1 << 62, 1 << 63, 1 << 64])
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | scalars,
        "shape": st.lists(numbers, max_size=3) | anything,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | anything,
        "extra": scalars,
    },
)
names = st.sampled_from(["a", "b", "fc.weight", "__metadata__", "d2t", "t2d", "x/y~z"]) | st.text(
    max_size=3
)
weight_files = mutated(
    st.builds(
        lambda header, data: with_length(encode(header), data),
        st.dictionaries(names, entries | anything, max_size=4),
        st.binary(max_size=40),
    )
)
indexes = mutated(
    st.builds(
        lambda weights, metadata: encode({"weight_map": weights, "metadata": metadata}),
        st.dictionaries(
            names,
            st.sampled_from(["a.safetensors", WEIGHTS, "../a", "m-1-of-3.safetensors"]) | scalars,
            max_size=4,
        )
        | anything,
        st.fixed_dictionaries({}, optional={"total_size": scalars}) | anything,
    )
)
configs = mutated(st.builds(encode, st.dictionaries(names, anything, max_size=3) | anything))


@cache
def fixture(name: str) -> Files:
    """Return the files of one fixture."""
    return {path.name: path.read_bytes() for path in (CHECKPOINTS / name).iterdir()}


@cache
def fixtures() -> tuple[str, ...]:
    """Return the names of the fixtures that consist of plain files, sorted."""
    return tuple(
        sorted(
            path.name
            for path in CHECKPOINTS.iterdir()
            if all(item.is_file() for item in path.iterdir())
        )
    )


def _holders(value: Any) -> list[Any]:
    """Return all containers that have something in them."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (dict, list)) and item:
            found.append(item)
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return found


@st.composite
def edited(draw: st.DrawFn, value: Any) -> Any:
    """Change, drop, add or copy up to three values of a JSON value, in place."""
    for _ in range(draw(st.integers(1, 3))):
        holders = _holders(value)
        if not holders:
            return draw(anything)
        holder = holders[draw(st.integers(0, len(holders) - 1))]
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = keys[draw(st.integers(0, len(keys) - 1))]
        action = draw(st.sampled_from(["set", "set", "drop", "add", "copy", "nudge"]))
        if action == "drop":
            del holder[key]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(names)] = draw(scalars)
        elif action == "copy":
            holder[key] = holder[keys[draw(st.integers(0, len(keys) - 1))]]
        elif action == "nudge" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-8, -1, 1, 8]))
        else:
            holder[key] = draw(scalars)
    return value


@st.composite
def edited_json(draw: st.DrawFn, raw: bytes) -> bytes:
    """Change values of a JSON text, or bytes of it where it is none."""
    try:
        value = json.loads(raw)
    except ValueError:
        return draw(mutated(st.just(raw)))
    return draw(mutated(st.just(encode(draw(edited(value))))) | st.just(encode(value)))


@st.composite
def edited_weights(draw: st.DrawFn, raw: bytes) -> bytes:
    """Change the header of a weight file, or bytes of it where it has none."""
    length = int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8 : 8 + length])
    except ValueError:
        return draw(mutated(st.just(raw)))
    if draw(st.integers(0, 3)) == 0 and isinstance(header, dict):
        header = draw(renumbered(header))
    return with_length(encode(draw(edited(header))), raw[8 + length :])


@st.composite
def renumbered(draw: st.DrawFn, header: dict[str, Any]) -> dict[str, Any]:
    """Write another index into one of the names."""
    places = [(key, m) for key in header for m in re.finditer(r"(?<![^.])\d+(?=\.|$)", key)]
    if not places:
        return header
    old, found = places[draw(st.integers(0, len(places) - 1))]
    index = draw(
        st.sampled_from(["1", "007", "99999", "999999999", "9" * 30, "9" * 5000, "\u0663"])
    )
    new = old[: found.start()] + index + old[found.end() :]
    return {new if key == old else key: value for key, value in header.items()}


@st.composite
def edited_fixtures(draw: st.DrawFn) -> Files:
    """Return a fixture's files of which one or two were changed."""
    names_of_all = fixtures()
    files = dict(fixture(names_of_all[draw(st.integers(0, len(names_of_all) - 1))]))
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(files)))
        editor: Callable[[bytes], st.SearchStrategy[bytes]] = (
            edited_json if name.endswith(".json") else edited_weights
        )
        change = draw(st.integers(0, 9))
        files[name] = draw(editor(files[name]) if change else mutated(st.just(files[name])))
    return files


PIECES: tuple[bytes, ...] = (
    *(b"[]", b"{}", b'{"":0}', b'"a"', b"0", b"null", b"[[]]", b'{"a":[]}', b"1e9", b"-1"),
    *(b'"k%d":{}', b'"k%d":0', b'"k%d":"s%d"', b'"k":0', b'"k%d":[]', b'"layers.%d.w":null'),
    *(b'"\xc3\xa9%d":0', b'"\xf0\x9f\x98\x80":1', b'"\\u00e9%d":0', b'"\\ud83d\\ude00%d":1'),
    b'"k%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    b'"k%d":{"dtype":"U9","shape":[0],"data_offsets":[0,0]}',
    b'"k%d":{"dtype":"U8","shape":[1],"data_offsets":[0,0]}',
    b'"k%d":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}',
    b'"k%d":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}',
    b'"k%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":0}',
    b'"model.layers.%d.mlp.x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    b'"midlayer.k%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    b'"model.layers.%d.eh_proj.weight":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    b'"model.layers.%d.mlp.up_proj.weight":{"dtype":"F8_E4M3","shape":[0],"data_offsets":[0,0]}',
    b'"k%d.weight_scale":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}',
    *(
        b'"re:.*a%d"',
        b'"re:(a+)+%d"',
        b'"*.a%d*"',
        b"%d",
        b'{"id":%d,"content":"t%d"}',
        b'"t%d":%d',
    ),
)
FRAMES: tuple[tuple[bytes, bytes], ...] = (
    *((b"{", b"}"), (b"[", b"]"), (b'{"a":[', b"]}"), (b'{"a":{', b"}}"), (b'{"a":"', b'"}')),
    (b'{"weight_map":{', b"}}"),
    (b'{"__metadata__":{', b"}}"),
    (b'{"k":{"dtype":"U8","data_offsets":[0,1],"shape":[', b"]}}"),
    (b'{"architectures":["LlamaForCausalLM"],', b"}"),
    (b'{"speculators_model_type":"eagle3",', b"}"),
    (b'{"speculators_model_type":"dspark","eagle_aux_hidden_state_layer_ids":[', b"]}"),
    (b'{"model.embed_tokens.weight":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', b"}"),
    (b'{"architectures":["LlamaForCausalLM"],"eos_token_id":[', b"]}"),
    (b'{"architectures":["LlamaForCausalLM"],"layer_types":[', b"]}"),
    (b'{"quantization_config":{"quant_method":"fp8","ignore":[', b"]}}"),
    (b'{"model":{"vocab":{', b"}}}"),
    (b'{"model":{"vocab":{}},"added_tokens":[', b"]}"),
)


def stretched(frame: tuple[bytes, bytes], piece: bytes, separator: bytes, size: int) -> bytes:
    """Return `piece` again and again inside a frame; `%d` counts."""
    room = size - len(frame[0]) - len(frame[1])
    parts: list[bytes] = []
    count = piece.count(b"%d")
    used = 0
    while True:
        part = piece % ((len(parts),) * count) if count else piece
        used += len(part) + len(separator)
        if used > room:
            return frame[0] + separator.join(parts) + frame[1]
        parts.append(part)


class LongFile(NamedTuple):
    """How to make a directory with one long text; short to print."""

    base: str
    place: str
    frame: tuple[bytes, bytes]
    piece: bytes
    separator: bytes

    def files(self) -> Files:
        """Return the directory."""
        text = stretched(self.frame, self.piece, self.separator, MAX_INPUT_BYTES - 8)
        files = dict(fixture(self.base))
        files[self.place] = with_length(text) if self.place == WEIGHTS else text
        return files


long_files = st.builds(
    LongFile,
    base=st.sampled_from(["hf-llama-clean", "speculators-eagle3-clean"]),
    place=st.sampled_from([CONFIG, INDEX, WEIGHTS, "tokenizer.json", "tokenizer_config.json"]),
    frame=st.sampled_from(FRAMES),
    piece=st.sampled_from(PIECES),
    separator=st.sampled_from([b",", b",", b",", b", ", b"", b"["]),
)


@st.composite
def edited_tensors(
    draw: st.DrawFn, checkpoint: Checkpoint, *, renamed: Callable[[str], str]
) -> Checkpoint:
    """Drop, reshape or rename a few entries of a tensor table."""
    tensors = dict(checkpoint.tensors)
    for key in draw(st.lists(st.sampled_from(sorted(tensors)), max_size=4, unique=True)):
        entry = tensors.pop(key)
        shape = draw(st.lists(st.integers(0, 40), max_size=3))
        edits = {
            "drop": None,
            "shape": msgspec.structs.replace(entry, shape=tuple(shape)),
            "name": msgspec.structs.replace(entry, key=renamed(key)),
        }
        edited = edits[draw(st.sampled_from(sorted(edits)))]
        if edited is not None:
            tensors[edited.key] = edited
    return replace(checkpoint, tensors=tensors)
