"""Manifests whose sources are on a hub: check them there, or bring them onto this machine.

Invariants: a source is read at the revision that the manifest records, whatever its name means
today; the manifest itself is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from specctl.checkpoint import (
    DEFAULT_ACCESS,
    Access,
    Checkpoint,
    is_hub_source,
    local_copy,
    open_checkpoint,
)
from specctl.checkpoint.sources.hub import pinned_source
from specctl.contract.codec import dump_manifest, load_manifest, resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import Draft, Manifest, Target, TensorRef, WeightFile

_HUB_SOURCE = re.compile(rb"""source["']?\s*:\s*["']?(hf|ms):""")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalManifest:
    """A manifest that the runtime can load.

    Args:
        path: the user's file, or a copy whose sources are directories.
        target_name: the target's name on its hub, None when it is a directory.
    """

    path: Path
    target_name: str | None


@contextmanager
def local_manifest(path: Path, *, access: Access = DEFAULT_ACCESS) -> Iterator[LocalManifest]:
    """Yield a manifest without hub sources; what they name is downloaded into the hub's cache.

    Args:
        path: a manifest, of hub sources or not.
        access: what is allowed.

    Raises:
        DiagnosticError: codes of family 7 (the manifest), SD136 to SD150 (the hubs).
    """
    if not _names_a_hub(path):
        yield LocalManifest(path=path, target_name=None)
        return
    manifest = load_manifest(path)
    sections = _hub_sections(manifest)
    places = {name: str(_download(section, access)) for name, section in sections.items()}
    name = manifest.target.source.partition("@")[0].rpartition("/")[2]
    with TemporaryDirectory(prefix="specctl-") as directory:
        copy = Path(directory) / "manifest.yaml"
        copy.write_text(dump_manifest(_relocated(manifest, path.parent, places)), "utf-8")
        yield LocalManifest(path=copy, target_name=name if "target" in sections else None)


def _names_a_hub(path: Path) -> bool:
    """Tell whether a file may hold a hub source; one that cannot be read is the loader's matter."""
    try:
        return _HUB_SOURCE.search(path.read_bytes()) is not None
    except OSError:
        return False


def _hub_sections(manifest: Manifest) -> Mapping[str, Target | Draft]:
    sections = {"target": manifest.target, "draft": manifest.draft}
    return {
        name: section
        for name, section in sections.items()
        if section is not None and is_hub_source(section.source)
    }


def _open(section: Target | Draft, access: Access) -> Checkpoint:
    return open_checkpoint(pinned_source(section.source, section.revision), access=access)


def _download(section: Target | Draft, access: Access) -> Path:
    files = [file.file for file in section.files]
    return local_copy(_open(section, access).store, files).absolute()


def _relocated(manifest: Manifest, directory: Path, places: Mapping[str, str]) -> Manifest:
    """Return the manifest with absolute local paths, since its copy lies elsewhere."""

    def moved(section: str, source: str) -> str:
        return places.get(section) or str(resolve_source(source, directory.resolve()))

    target, draft, vocabulary = manifest.target, manifest.draft, manifest.vocabulary
    file = vocabulary.token_map_file
    return msgspec.structs.replace(
        manifest,
        target=msgspec.structs.replace(target, source=moved("target", target.source)),
        draft=None
        if draft is None
        else msgspec.structs.replace(draft, source=moved("draft", draft.source)),
        vocabulary=vocabulary
        if file is None
        else msgspec.structs.replace(vocabulary, token_map_file=moved("", file)),
    )


def check_hub_sources(manifest: Manifest, access: Access) -> tuple[Diagnostic, ...]:
    """Return what differs between a manifest and the hub sources that it names; reads headers.

    Diagnostics: SD702 for a config or weight file, SD710 for a tensor, and SD136 to SD147.
    """
    findings: list[Diagnostic] = []
    for name, section in _hub_sections(manifest).items():
        try:
            checkpoint = _open(section, access)
        except DiagnosticError as error:
            findings += error.diagnostics
            continue
        changed = [*_changed_files(name, section, checkpoint)]
        findings += changed or _moved_tensors(name, section, checkpoint)
    return tuple(findings)


def _changed_files(
    name: str, section: Target | Draft, checkpoint: Checkpoint
) -> Iterator[Diagnostic]:
    there = {file.file: file for file in checkpoint.files}
    facts = [(CONFIG, section.config_digest, checkpoint.config_digest)]
    for file in section.files:
        now = there.get(file.file)
        facts.append((file.file, _summary(file), None if now is None else _summary(now)))
    for file_name, stated, found in facts:
        if stated != found:
            yield diagnose(
                "SD702",
                where=f"manifest#/{name}/source",
                message=f"`{file_name}` of `{checkpoint.store.identity}` is not the one recorded",
                expected=stated,
                found=found or "no such file",
            )


def _summary(file: WeightFile) -> str:
    return f"{file.size_bytes} bytes, header {file.header_digest}"


def _moved_tensors(name: str, section: Target | Draft, checkpoint: Checkpoint) -> list[Diagnostic]:
    refs: dict[str, TensorRef] = (
        {"embedding": section.embedding, "head": section.head}
        if isinstance(section, Target)
        else {f"tensors/{role}": ref for role, ref in section.tensors.items()}
    )
    findings: list[Diagnostic] = []
    for pointer, ref in refs.items():
        entry = checkpoint.tensors.get(ref.key)
        stated = (ref.file, tuple(ref.shape), ref.dtype, ref.begin, ref.end)
        found = (
            None
            if entry is None
            else (entry.file, entry.shape, entry.dtype, entry.begin, entry.end)
        )
        if stated != found:
            findings.append(
                diagnose(
                    "SD710",
                    where=f"manifest#/{name}/{pointer}",
                    message=f"`{ref.key}` is not stored in `{ref.file}` as the manifest says",
                    expected=found or "no such tensor",
                    found=stated,
                )
            )
    return findings
