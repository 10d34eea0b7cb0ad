"""Read a token map in any form, and what is stored beside it about its origin.

Forms: a JSON list of target ids; a `.pt` list or 1-d tensor (SGLang, vLLM, FR-Spec's `freq_N.pt`);
safetensors with `d2t` I64 offsets and a `t2d` BOOL mask. Nothing in a pickle is executed.
*Source:* vLLM and SGLang read a plain list (JSON or `.pt`); d2t offset and t2d mask as SafeAILab
EAGLE-3 and Speculators store them; FR-Spec publishes a pickled list in order of frequency.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.checkpoint import read_pt_ints
from specctl.checkpoint.json_text import MAX_JSON_BYTES
from specctl.checkpoint.safetensors_header import read_header
from specctl.checkpoint.sources import LocalStore
from specctl.checkpoint.tensor_entry import TensorEntry, shown, unpack_ints
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.contract.findings import Findings
from specctl.contract.vocabulary_map import offsets_to_absolute

JSON_FILE = "token_map.json"
PT_FILE = "token_map.pt"
SAFETENSORS_FILE = "token_map.safetensors"
PROVENANCE_FILE = "token_map.provenance.json"
SUFFIXES = (".json", ".pt", ".pth", ".safetensors")

METADATA_KEY = "specctl.token_map"
METADATA_NAMES = (
    "schema", "map_digest", "tokenizer_digest", "tokenizer_size", "target_vocab_size",
    "corpus_digest",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What is stored beside or in a map about its origin; None and empty where it is silent.

    Args:
        file: name of the file that says it.
        target_vocab_size: embedding rows of the target.
        tokenizer_size: ids that the tokenizer has.
        map_digest: over the ids in draft-id order.
        files: file name -> `sha256:` of its bytes.
    """

    file: str
    tokenizer_digest: str | None
    tokenizer_size: int | None
    target_vocab_size: int | None
    corpus_digest: str | None
    map_digest: str | None
    files: Mapping[str, str]


def find_provenance(path: Path) -> Provenance | None:
    """Return what is known of the origin of a map file; None: nothing is.

    The side file of its directory counts when it lists the map's name; a safetensors file also
    says it in its own metadata.
    """
    beside = read_provenance(path.parent / PROVENANCE_FILE)
    if beside is not None and path.name in beside.files:
        return beside
    if path.suffix != ".safetensors":
        return None
    text = _metadata(path).get(METADATA_KEY)
    return _provenance(text, path.name) if isinstance(text, str) else None


def _metadata(path: Path) -> dict[str, Any]:
    """Return the free metadata of a safetensors file; empty when the file is not sound."""
    findings = Findings()
    _, record = read_header(LocalStore(path.parent), path.name, findings)
    if record is None or has_errors(findings.result()):
        return {}
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(length)).get("__metadata__") or {}


def read_provenance(path: Path) -> Provenance | None:
    """Return the content of a provenance file; None when it is absent or not one."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return None
        return _provenance(path.read_bytes().decode("utf-8"), path.name)
    except (OSError, ValueError):
        return None


def _provenance(text: str, file: str) -> Provenance | None:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(table, dict):
        return None
    files = table.get("files")

    def words(key: str) -> str | None:
        return table[key] if isinstance(table.get(key), str) else None

    def number(key: str) -> int | None:
        return table[key] if type(table.get(key)) is int else None

    return Provenance(
        file=file,
        tokenizer_digest=words("tokenizer_digest"),
        tokenizer_size=number("tokenizer_size"),
        target_vocab_size=number("target_vocab_size"),
        corpus_digest=words("corpus_digest"),
        map_digest=words("map_digest"),
        files={str(k): v for k, v in files.items() if isinstance(v, str)}
        if isinstance(files, dict)
        else {},
    )


def read_token_map(path: Path | str, *, target_vocab_size: int | None = None) -> tuple[int, ...]:
    """Return the absolute target ids of a map in draft-id order.

    Args:
        path: `.json` list, `.pt` list or 1-d tensor, or `.safetensors` with `d2t` offsets.
        target_vocab_size: ids must be below it; None: only negative ids are refused.

    Raises:
        DiagnosticError: SD420 for another form, SD402 for an id out of range, SD404 for an id
            that occurs twice, family 1 codes when the file itself cannot be read.
    """
    path = Path(path)
    ids_target = read_entries(path)
    problems = check_ids(ids_target, where=path.name, target_vocab_size=target_vocab_size)
    if problems:
        raise DiagnosticError(problems)
    return ids_target


def read_entries(path: Path) -> tuple[int, ...]:
    """Return the entries of a map as they are, repeated and impossible ones included.

    Raises:
        DiagnosticError: SD420 for another form, SD405 when `t2d` is not the set of `d2t`, family 1
            codes when the file itself cannot be read.
    """
    readers = {
        ".json": _read_json,
        ".pt": read_pt_ints,
        ".pth": read_pt_ints,
        ".safetensors": _read_safetensors,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise _unreadable(
            path,
            f"the suffix `{path.suffix}` is not one of a token map",
            expected=", ".join(SUFFIXES),
            found=path.suffix or "no suffix",
        )
    return reader(path)


def _unreadable(path: Path, message: str, **details: Any) -> DiagnosticError:
    return DiagnosticError(diagnose("SD420", where=path.name, message=message, **details))


def check_ids(
    ids_target: Sequence[int], *, where: str, target_vocab_size: int | None
) -> list[Diagnostic]:
    """Return what is wrong with a list of target ids: SD402, SD404, SD420, each at most once."""
    if not ids_target:
        return [diagnose("SD420", where=where, message="the map is empty")]
    limit = 1 << 63 if target_vocab_size is None else target_vocab_size
    outside: list[int] = []
    again: list[int] = []
    first: dict[int, int] = {}
    for place, token in enumerate(ids_target):
        if not 0 <= token < limit:
            outside.append(place)
        elif first.setdefault(token, place) != place:
            again.append(place)
    found = [_outside(ids_target, outside, where, limit)] if outside else []
    found += [_repeated(ids_target, again, first, where)] if again else []
    return found


def _outside(ids_target: Sequence[int], places: list[int], where: str, limit: int) -> Diagnostic:
    place, values = places[0], [ids_target[place] for place in places]
    message = f"entry {place} is target id {values[0]}, outside the vocabulary"
    if values[1:]:
        message = (
            f"{len(values)} of {len(ids_target)} entries lie outside the vocabulary, ids "
            f"{min(values)} to {max(values)}; the first is entry {place}, id {values[0]}"
        )
    return diagnose(
        "SD402",
        where=f"{where}#/{place}",
        message=message,
        expected=f"0 to {limit - 1}",
        found=values[0] if len(values) == 1 else f"{min(values)} to {max(values)}",
    )


def _repeated(
    ids_target: Sequence[int], places: list[int], first: Mapping[int, int], where: str
) -> Diagnostic:
    place, token = places[0], ids_target[places[0]]
    message = f"entries {first[token]} and {place} are both target id {token}"
    if places[1:]:
        message += f"; {len(places)} of {len(ids_target)} entries repeat an earlier one"
    return diagnose(
        "SD404",
        where=f"{where}#/{place}",
        message=message,
        expected="each target id once",
        found="twice" if len(places) == 1 else f"{len(places)} repeated",
    )


def _read_json(path: Path) -> tuple[int, ...]:
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise _unreadable(path, f"{size} bytes, more than {MAX_JSON_BYTES}")
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise DiagnosticError(
            diagnose("SD135", where=path.name, message=f"cannot be read: {error.strerror}")
        ) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"not JSON: {shown(str(error))}") from error
    if not isinstance(value, list):
        raise _unreadable(
            path,
            "the JSON is not a list",
            expected="[id, id, ...]",
            found=type(value).__name__,
        )
    for place, item in enumerate(value):
        if type(item) is not int:
            raise _unreadable(
                path,
                f"entry {place} is not an integer",
                expected="an integer",
                found=type(item).__name__,
            )
    return tuple(value)


def _read_safetensors(path: Path) -> tuple[int, ...]:
    findings = Findings()
    entries, _ = read_header(LocalStore(path.parent), path.name, findings)
    problems = [d for d in findings.result() if d.severity == "error"]
    if problems:
        raise DiagnosticError(problems)
    table = {entry.key: entry for entry in entries}
    offsets = table.get("d2t")
    if offsets is None or offsets.dtype != "I64" or len(offsets.shape) != 1:
        raise _unreadable(
            path,
            "no `d2t` tensor of offsets",
            expected="d2t[R I64]",
            found=", ".join(e.describe() for e in entries[:5]) or "no tensor",
        )
    ids_target = offsets_to_absolute(unpack_ints("I64", _read_range(path, offsets)))
    mask = table.get("t2d")
    if mask is not None and mask.dtype == "BOOL":
        _check_mask(path, mask, ids_target)
    return ids_target


def _read_range(path: Path, entry: TensorEntry) -> bytes:
    with path.open("rb") as stream:
        stream.seek(entry.begin)
        return stream.read(entry.nbytes)


def _check_mask(path: Path, entry: TensorEntry, ids_target: Sequence[int]) -> None:
    mask = _read_range(path, entry)
    marked = {i for i, bit in enumerate(mask) if bit}
    if marked != set(ids_target):
        odd = min(marked ^ set(ids_target))
        raise DiagnosticError(
            diagnose(
                "SD405",
                where=entry.describe(),
                message=f"`t2d` marks {len(marked)} ids, `d2t` reaches {len(set(ids_target))}; "
                f"target id {odd} is in one of them only",
                expected=f"{len(set(ids_target))} marked ids",
                found=f"{len(marked)} marked ids",
            )
        )
