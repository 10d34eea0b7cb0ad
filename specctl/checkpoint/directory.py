"""Open a checkpoint directory: choose its weight files, read every header, report every problem.

Invariants: never stops at the first problem; an exception is raised only when there is nothing to
open at all. Choice of weights, first match wins: safetensors index, `model.safetensors`, the only
other `*.safetensors`, pickle index, `pytorch_model.bin`. What was passed over is reported.
*Source:* Hugging Face file names; the index decides because readers that glob mix stray files in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specctl.checkpoint.checkpoint import Checkpoint, Container, Layout
from specctl.checkpoint.findings import Findings
from specctl.checkpoint.index import SHARD_NAME, Index, read_index, reconcile
from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.safetensors_header import read_header
from specctl.checkpoint.source import resolve_source
from specctl.checkpoint.sources.local import LocalStore
from specctl.checkpoint.sources.store import FileStore
from specctl.checkpoint.tensor_entry import TensorEntry, printable
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import WeightFile

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SINGLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

_FileReader = Callable[[FileStore, str, Findings], tuple[list[TensorEntry], WeightFile | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    tensors: dict[str, TensorEntry]
    files: tuple[WeightFile, ...]
    container: Container
    layout: Layout


_NO_WEIGHTS = _Weights(tensors={}, files=(), container="none", layout="single")


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a local checkpoint directory and read its config and every weight header.

    Args:
        path: the directory; see `resolve_source` for what else is recognised.

    Returns:
        The checkpoint with all diagnostics of family 1 found on the way.

    Raises:
        DiagnosticError: SD119 or SD120 when the path is no directory or holds neither a config
            nor weights, SD135 when it cannot be listed.
    """
    store = LocalStore(resolve_source(path))
    findings = Findings()
    names = list(store.sizes())
    config: dict[str, Any] | None = None
    digest: str | None = None
    if CONFIG in names:
        config, raw = read_object(store, CONFIG, findings)
        digest = None if raw is None else digest_bytes(raw)
    weights = _read_weights(store, names, findings)
    if weights.container == "none":
        if CONFIG not in names:
            raise DiagnosticError(
                diagnose(
                    "SD119",
                    where=str(path),
                    message="the directory holds neither config.json nor weights",
                    expected=f"{CONFIG} and {SINGLE}",
                    found=f"{len(names)} other files",
                )
            )
        findings.add(
            "SD121", where=CONFIG, message="a config without weights", expected=SINGLE, found="none"
        )
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


def _read_weights(store: FileStore, names: list[str], findings: Findings) -> _Weights:
    plain = [name for name in names if name.endswith(".safetensors")]
    if INDEX in names:
        index = read_index(store, INDEX, findings)
        if index is not None and (index.shards or SINGLE not in plain):
            _report_ignored(plain, set(index.weight_map.values()), INDEX, findings)
            return _read_indexed(store, index, read_header, "safetensors", findings)
        if index is not None:
            findings.add(
                "SD124",
                where=INDEX,
                message=f"none of the files it names is here; `{SINGLE}` was read instead",
                help=f"Delete `{INDEX}`, or fetch the shards it names",
            )
        if plain:
            return _read_unindexed(store, plain, findings)
        return _Weights(tensors={}, files=(), container="safetensors", layout="sharded")
    if plain:
        return _read_unindexed(store, plain, findings)
    return _read_pickles(store, names, findings)


def _read_unindexed(store: FileStore, plain: list[str], findings: Findings) -> _Weights:
    if SINGLE in plain:
        _report_ignored(plain, {SINGLE}, SINGLE, findings)
        return _read_single(store, SINGLE, read_header, "safetensors", findings)
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
                is_error=True,
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
        found=", ".join(printable(name) for name in plain[:6]) + (", ..." if plain[6:] else ""),
    )
    entries, files = _read_files(store, plain, read_header, findings)
    whole = Index(file=INDEX, weight_map={}, shards=tuple(plain), total_size=None)
    tensors = reconcile(whole, entries, findings, is_listed=False)
    return _Weights(tensors=tensors, files=files, container="safetensors", layout="sharded")


def _read_pickles(store: FileStore, names: list[str], findings: Findings) -> _Weights:
    if PICKLE_INDEX not in names and PICKLE_SINGLE not in names:
        return _NO_WEIGHTS
    from specctl.checkpoint.torch_zip import read_torch_tensors

    if PICKLE_INDEX in names:
        index = read_index(store, PICKLE_INDEX, findings)
        if index is None:
            return _Weights(tensors={}, files=(), container="pickle", layout="sharded")
        bins = [n for n in names if n.endswith(".bin") and n.startswith("pytorch_model")]
        _report_ignored(bins, set(index.weight_map.values()), PICKLE_INDEX, findings)
        return _read_indexed(store, index, read_torch_tensors, "pickle", findings)
    return _read_single(store, PICKLE_SINGLE, read_torch_tensors, "pickle", findings)


def _report_ignored(names: list[str], used: set[str], winner: str, findings: Findings) -> None:
    for name in names:
        if name not in used:
            findings.add(
                "SD124",
                where=printable(name),
                message=f"not part of the checkpoint: `{winner}` decides which files are read",
            )


def _read_files(
    store: FileStore, names: list[str], reader: _FileReader, findings: Findings
) -> tuple[list[list[TensorEntry]], tuple[WeightFile, ...]]:
    entries: list[list[TensorEntry]] = []
    files: list[WeightFile] = []
    for name in names:
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
