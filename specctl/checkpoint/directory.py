"""Open a checkpoint directory: choose its weight files, read every header, report every problem.

Invariants: never stops at the first problem; an exception is raised only when there is nothing to
open at all. Choice of weights, first match wins: safetensors index, `model.safetensors`, the only
other `*.safetensors`, pickle index, `pytorch_model.bin`, a heads file. What was passed over is
reported. An index decides even when none of its files is here: that is an error, and
`model.safetensors` is then read only so that the rest can be checked.
*Source:* Hugging Face file names; the index decides because readers that glob mix stray files in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specctl.checkpoint.checkpoint import Checkpoint, Container, Layout
from specctl.checkpoint.index import SHARD_NAME, Index, read_index, reconcile
from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.safetensors_header import needed_bytes, read_header
from specctl.checkpoint.sources.opening import open_store
from specctl.checkpoint.sources.store import PREFETCH_FILES, FileStore, Needed
from specctl.checkpoint.stray import report_ignored, report_stray
from specctl.checkpoint.tensor_entry import TensorEntry, shown
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.contract.file_names import CONFIG, INDEX, PICKLE_INDEX, PICKLE_SINGLE, SINGLE
from specctl.contract.findings import Findings
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import WeightFile

PICKLE_HEADS = ("medusa_lm_head.pt", "hydra_lm_head.pt")  # what these two projects name their file

_FileReader = Callable[[FileStore, str, Findings], tuple[list[TensorEntry], WeightFile | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    tensors: dict[str, TensorEntry]
    files: tuple[WeightFile, ...]
    container: Container
    layout: Layout


_INCOMPLETE = frozenset(("SD102", "SD108", "SD121", "SD122", "SD130"))
_NO_WEIGHTS = _Weights(tensors={}, files=(), container="none", layout="single")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What the user allows while a source is read.

    Args:
        offline: open no connection; a hub source is read from the client's cache.
        allow_pickle: pass over objects of unknown classes in a `.bin` (SD150) instead of refusing
            the file (SD103); nothing is executed either way.
    """

    offline: bool = False
    allow_pickle: bool = False


DEFAULT_ACCESS = Access()


def open_checkpoint(source: Path | str, *, access: Access = DEFAULT_ACCESS) -> Checkpoint:
    """Open a checkpoint and read its config and every weight header.

    Args:
        source: a directory, `hf:org/name[@revision][/subfolder]` or the same with `ms:`.
        access: what is allowed.

    Returns:
        The checkpoint with all diagnostics of family 1 found on the way.

    Raises:
        DiagnosticError: SD119 or SD120 when the path is no directory or holds neither a config
            nor weights, SD135 when it cannot be listed, SD136 to SD147 when a hub gives nothing.
    """
    store = open_store(source, offline=access.offline)
    return read_store(store, where=str(source), allow_pickle=access.allow_pickle)


def read_store(store: FileStore, *, where: str, allow_pickle: bool = False) -> Checkpoint:
    """Read the config and every weight header of a store; see `open_checkpoint`.

    Args:
        store: the files.
        where: the source, for diagnostics about all of it.
        allow_pickle: see `Access`.
    """
    findings = Findings()
    names = list(store.sizes())
    config: dict[str, Any] | None = None
    digest: str | None = None
    store.prefetch(_first_reads(names))
    if CONFIG in names:
        config, raw = read_object(store, CONFIG, findings)
        digest = None if raw is None else digest_bytes(raw)
    weights = _read_weights(store, names, findings, allow_pickle=allow_pickle)
    if store.trouble is not None:
        raise DiagnosticError(store.trouble)
    if weights.container == "none":
        if CONFIG not in names:
            raise DiagnosticError(_nothing_there(store, where, len(names)))
        findings.add(
            "SD121", where=CONFIG, message="a config without weights", expected=SINGLE, found="none"
        )
    if any(d.code in _INCOMPLETE for d in findings.result()):
        _report_unfinished(store, findings)
    return Checkpoint(
        store=store,
        file_names=tuple(names),
        config=config,
        config_digest=digest,
        tensors=MappingProxyType(weights.tensors),
        files=weights.files,
        container=weights.container,
        layout=weights.layout,
        diagnostics=findings.result(),
    )


def _first_reads(names: list[str]) -> dict[str, Needed | None]:
    """Return what is surely read: config and index, or without an index the weight headers."""
    wanted: dict[str, Needed | None] = {name: None for name in (CONFIG, INDEX) if name in names}
    if INDEX not in names:
        plain = [name for name in names if name.endswith(".safetensors")]
        wanted |= dict.fromkeys([SINGLE] if SINGLE in plain else plain, needed_bytes)
    return wanted


def _nothing_there(store: FileStore, where: str, num_names: int) -> tuple[Diagnostic, ...]:
    findings = Findings()
    findings.add(
        "SD119",
        where=where,
        message="the directory holds neither config.json nor weights",
        expected=f"{CONFIG} and {SINGLE}",
        found=f"{num_names} other files",
    )
    _report_unfinished(store, findings)
    return findings.result()


def _report_unfinished(store: FileStore, findings: Findings) -> None:
    """Say that a download was interrupted, where something is missing that it would bring."""
    left = store.unfinished()
    if not left:
        return
    name = shown(Path(left[0]).name)
    more = f" and {len(left) - 1} more" if left[1:] else ""
    findings.add(
        "SD148",
        where=name,
        message=f"a download was interrupted: `{name}`{more} is unfinished, other files missing",
        expected="whole files only",
        found=", ".join(f"`{shown(path)}`" for path in left[:3]),
    )


def _read_weights(
    store: FileStore, names: list[str], findings: Findings, *, allow_pickle: bool
) -> _Weights:
    plain = [name for name in names if name.endswith(".safetensors")]
    if INDEX in names:
        index = read_index(store, INDEX, findings)
        if index is not None and (index.shards or SINGLE not in plain):
            weights = _read_indexed(store, index, read_header, "safetensors", findings)
            stray = _others(plain, set(index.weight_map.values()))
            report_stray(store, stray, INDEX, weights.tensors, findings)
            return weights
        if index is not None:
            _report_stale(index, findings)
        if plain:
            return _read_unindexed(store, plain, findings)
        return _Weights(tensors={}, files=(), container="safetensors", layout="sharded")
    if plain:
        return _read_unindexed(store, plain, findings)
    return _read_pickles(store, names, findings, allow_pickle=allow_pickle)


def _report_stale(index: Index, findings: Findings) -> None:
    findings.add(
        "SD124",
        where=INDEX,
        message=f"the index decides, and none of the {len(set(index.weight_map.values()))} files "
        f"it names is here; `{SINGLE}`, which it does not name, was read to check the rest",
        expected="the files it names, or no index",
        found=f"`{SINGLE}`",
        help=f"Delete `{INDEX}` if `{SINGLE}` is the checkpoint, or fetch the files it names",
        severity="error",
    )


def _read_unindexed(store: FileStore, plain: list[str], findings: Findings) -> _Weights:
    if SINGLE in plain:
        weights = _read_single(store, SINGLE, read_header, "safetensors", findings)
        report_stray(store, _others(plain, {SINGLE}), SINGLE, weights.tensors, findings)
        return weights
    if len(plain) == 1:
        name = plain[0]
        match = SHARD_NAME.fullmatch(name)
        if match is not None and int(match[3]) != 1:
            findings.add(
                "SD130",
                where=name,
                message=f"the name says one of {int(match[3])} files, and there is no index",
                expected=f"{int(match[3])} files and `{INDEX}`",
                found="1 file",
                severity="error",
            )
        else:
            findings.add(
                "SD123", where=name, message=f"`{name}` is the only weight file and was read"
            )
        return _read_single(store, name, read_header, "safetensors", findings)
    findings.add(
        "SD122",
        where=plain[0],
        message=f"{len(plain)} safetensors files and no `{INDEX}`",
        expected=f"`{INDEX}`, or one file",
        found=", ".join(shown(name) for name in plain[:6]) + (", ..." if plain[6:] else ""),
    )
    entries, files = _read_files(store, plain, read_header, findings)
    whole = Index(file=INDEX, weight_map={}, shards=tuple(plain), total_size=None)
    tensors = reconcile(whole, entries, findings, is_listed=False)
    return _Weights(tensors=tensors, files=files, container="safetensors", layout="sharded")


def _read_pickles(
    store: FileStore, names: list[str], findings: Findings, *, allow_pickle: bool
) -> _Weights:
    single = next((name for name in (PICKLE_SINGLE, *PICKLE_HEADS) if name in names), None)
    if PICKLE_INDEX not in names and single is None:
        return _NO_WEIGHTS
    from specctl.checkpoint.torch_zip import read_torch_tensors

    reader = partial(read_torch_tensors, allow_pickle=allow_pickle)
    if PICKLE_INDEX in names:
        index = read_index(store, PICKLE_INDEX, findings)
        if index is None:
            return _Weights(tensors={}, files=(), container="pickle", layout="sharded")
        bins = [n for n in names if n.endswith(".bin") and n.startswith("pytorch_model")]
        for name in _others(bins, set(index.weight_map.values())):
            report_ignored(name, PICKLE_INDEX, findings)
        return _read_indexed(store, index, reader, "pickle", findings)
    return _read_single(store, single or PICKLE_SINGLE, reader, "pickle", findings)


def _others(names: list[str], used: set[str]) -> list[str]:
    return [name for name in names if name not in used]


def _read_files(
    store: FileStore, names: list[str], reader: _FileReader, findings: Findings
) -> tuple[list[list[TensorEntry]], tuple[WeightFile, ...]]:
    entries: list[list[TensorEntry]] = []
    files: list[WeightFile] = []
    for place, name in enumerate(names):
        if place % PREFETCH_FILES == 0:
            ahead = names[place : place + PREFETCH_FILES]
            store.prefetch(dict.fromkeys(ahead, needed_bytes))
        found, record = reader(store, name, findings)
        entries.append(found)
        if record is not None:
            files.append(record)
    return entries, tuple(files)


def _read_single(
    store: FileStore, name: str, reader: _FileReader, container: Container, findings: Findings
) -> _Weights:
    entries, files = _read_files(store, [name], reader, findings)
    tensors = {entry.key: entry for entry in entries[0]}
    return _Weights(tensors=tensors, files=files, container=container, layout="single")


def _read_indexed(
    store: FileStore, index: Index, reader: _FileReader, container: Container, findings: Findings
) -> _Weights:
    entries, files = _read_files(store, list(index.shards), reader, findings)
    tensors = reconcile(index, entries, findings)
    return _Weights(tensors=tensors, files=files, container=container, layout="sharded")
