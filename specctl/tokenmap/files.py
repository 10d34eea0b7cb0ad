"""Write a token map in every form that engines read, and read any of them back.

Invariants: all files of one map appear together or not at all; the same map gives the same bytes.
Files: `token_map.json` (JSON list of target ids), `token_map.pt` (pickled list),
`token_map.safetensors` (`d2t` I64 offsets, `t2d` BOOL mask), `token_map.provenance.json`.
*Source:* vLLM and SGLang read a plain list (JSON or `.pt`); d2t offset and t2d mask as SafeAILab
EAGLE-3 and Speculators store them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from specctl.checkpoint import atomic_write, read_pt_ints
from specctl.checkpoint.json_text import MAX_JSON_BYTES
from specctl.checkpoint.safetensors_header import read_header
from specctl.checkpoint.sources import LocalStore
from specctl.checkpoint.tensor_entry import TensorEntry, shown, unpack_ints
from specctl.checkpoint.writing import stream_safetensors
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.findings import Findings
from specctl.contract.vocabulary_map import (
    absolute_to_offsets,
    offsets_to_absolute,
    pack_int64,
    target_mask,
)
from specctl.tokenmap.pt_file import stream_pt_ints

JSON_FILE = "token_map.json"
PT_FILE = "token_map.pt"
SAFETENSORS_FILE = "token_map.safetensors"
PROVENANCE_FILE = "token_map.provenance.json"


def write_token_map(
    directory: Path,
    ids_target: Sequence[int],
    *,
    target_vocab_size: int,
    provenance: Mapping[str, Any],
) -> tuple[Path, ...]:
    """Write all files of a map; returns their paths.

    Args:
        directory: made when absent; removed again when nothing could be written.
        ids_target: [R] target ids in draft-id order.
        target_vocab_size: length of `t2d`.
        provenance: JSON values that say what the map was made from; no times, no machine paths.

    Raises:
        OSError: the directory cannot be made or written.
    """
    offsets = pack_int64(absolute_to_offsets(ids_target))
    mask = target_mask(ids_target, target_vocab_size)
    paths = tuple(
        directory / name for name in (JSON_FILE, PT_FILE, SAFETENSORS_FILE, PROVENANCE_FILE)
    )
    made = _make_directories(directory)
    try:
        # Each file is renamed into place only after the last one was written to disk.
        with ExitStack() as stack:
            as_json, as_pt, as_safetensors, as_provenance = (
                stack.enter_context(atomic_write(path)) for path in paths
            )
            as_json.write(_list_text(ids_target).encode())
            stream_pt_ints(as_pt, ids_target)
            stream_safetensors(
                as_safetensors,
                {
                    "d2t": ("I64", (len(ids_target),), offsets),
                    "t2d": ("BOOL", (target_vocab_size,), mask),
                },
                {"format": "pt"},
            )
            text = json.dumps(provenance, indent=2, sort_keys=True, ensure_ascii=False)
            as_provenance.write(f"{text}\n".encode())
    except BaseException:
        with suppress(OSError):  # a directory with other files stays
            for path in made:
                path.rmdir()
        raise
    return paths


def _make_directories(directory: Path) -> tuple[Path, ...]:
    """Make `directory` and its parents; return those that were missing, deepest first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return tuple(missing)


def _list_text(ids_target: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, ids_target)) + "]\n"


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
    readers = {".json": _read_json, ".pt": read_pt_ints, ".safetensors": _read_safetensors}
    reader = readers.get(path.suffix)
    if reader is None:
        raise _unreadable(
            path,
            f"the suffix `{path.suffix}` is not one of a token map",
            expected=", ".join(readers),
            found=path.suffix or "no suffix",
        )
    ids_target = reader(path)
    problems = check_ids(ids_target, where=path.name, target_vocab_size=target_vocab_size)
    if problems:
        raise DiagnosticError(problems)
    return ids_target


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
