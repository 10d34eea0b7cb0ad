"""Compare the files that a manifest points to with what it recorded: sizes and digests.

Invariants: only configs, headers and small files are hashed, so a check costs milliseconds whatever
the size of the weights; weights themselves are identified by their header and file size. Nothing is
executed or unpickled.
*Source:* safetensors format: u64 little-endian header length, then that many bytes of JSON.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import CONFIG, TOKENIZER
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import Draft, Manifest, Target, WeightFile

MAX_HEADER_BYTES = 100_000_000  # of a safetensors header, by its format; of a zip directory, by us


def is_hub_source(source: str) -> bool:
    """Tell whether a source is a repository on a hub: `hf:org/name` or `ms:org/name`."""
    return source.startswith(("hf:", "ms:"))


def resolve_source(source: str, manifest_dir: Path) -> Path:
    """Return the place that a manifest's path means; relative ones count from the manifest."""
    return manifest_dir / Path(source).expanduser()


def verify_digests(manifest: Manifest, manifest_dir: Path) -> tuple[Diagnostic, ...]:
    """Return SD702 for each file that changed and SD712 for each that is missing.

    Args:
        manifest: what was recorded.
        manifest_dir: directory that relative paths count from.
    """
    target = manifest.target
    findings = _check_section("target", target, manifest_dir)
    if target.tokenizer_digest is not None and not findings:
        path = resolve_source(target.source, manifest_dir) / TOKENIZER
        findings += _check_bytes(path, target.tokenizer_digest, "manifest#/target/tokenizer_digest")
    draft = manifest.draft
    if draft is not None:
        findings += _check_section("draft", draft, manifest_dir)
    vocabulary = manifest.vocabulary
    if vocabulary.token_map_file is not None and vocabulary.token_map_digest is not None:
        path = resolve_source(vocabulary.token_map_file, manifest_dir)
        pointer = "manifest#/vocabulary/token_map_file"
        findings += _check_bytes(path, vocabulary.token_map_digest, pointer)
    return tuple(findings)


def _check_section(name: str, section: Target | Draft, manifest_dir: Path) -> list[Diagnostic]:
    if is_hub_source(section.source):
        return [_on_hub(section.source, f"manifest#/{name}/source")]
    directory = resolve_source(section.source, manifest_dir)
    return _check_source(name, directory, section.config_digest, section.files)


def _on_hub(source: str, pointer: str) -> Diagnostic:
    return diagnose(
        "SD712",
        where=pointer,
        message=f"`{source}` is on a hub, and only files of this machine are loaded here",
        expected="a directory",
        found="a repository of a hub",
        help="`specctl serve`, `generate` and `bench` download it first; from Python use "
        "`specctl.ops.hub_manifest.local_manifest`",
    )


def _check_source(
    section: str, directory: Path, config_digest: str, files: Iterable[WeightFile]
) -> list[Diagnostic]:
    pointer = f"manifest#/{section}/source"
    if not directory.is_dir():
        return [_missing(directory, pointer, "a directory")]
    findings = _check_bytes(directory / CONFIG, config_digest, pointer)
    for file in files:
        findings += _check_weights(directory / file.file, file, f"manifest#/{section}/files")
    return findings


def _check_bytes(path: Path, digest: str, pointer: str) -> list[Diagnostic]:
    if not path.is_file():
        return [_missing(path, pointer, "a file")]
    found = digest_bytes(path.read_bytes())
    return [] if found == digest else [_mismatch(path, digest, found, "digest")]


def _check_weights(path: Path, file: WeightFile, pointer: str) -> list[Diagnostic]:
    if not path.is_file():
        return [_missing(path, pointer, "a file")]
    size = path.stat().st_size
    if size != file.size_bytes:
        return [_mismatch(path, f"{file.size_bytes} bytes", f"{size} bytes", "size")]
    found = header_digest(path)
    if found == file.header_digest:
        return []
    return [_mismatch(path, file.header_digest, found or "no readable header", "header digest")]


def header_digest(path: Path) -> str | None:
    """Return the digest of a weight file's table of contents, None when it cannot be read.

    That is the JSON of a safetensors header, and the central directory (names, sizes, checksums)
    of a PyTorch zip archive.
    """
    with path.open("rb") as stream:
        head = stream.read(8)
        if head.startswith(b"PK"):
            return _zip_directory_digest(stream)
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER_BYTES:
            return None
        header = stream.read(length)
    if len(header) != length or not length:
        return None
    return digest_bytes(header)


def _zip_directory_digest(stream: BinaryIO) -> str | None:
    import zipfile

    try:
        with zipfile.ZipFile(stream) as archive:
            begin = archive.start_dir
    except (zipfile.BadZipFile, ValueError):
        return None
    return digest_tail(stream, begin)


def digest_tail(stream: BinaryIO, begin: int) -> str | None:
    """Return the digest of a file from `begin` on, None when that is nothing or too much."""
    length = stream.seek(0, 2) - begin
    if not 0 < length <= MAX_HEADER_BYTES:
        return None
    stream.seek(begin)
    return digest_bytes(stream.read(length))


def _missing(path: Path, pointer: str, what: str) -> Diagnostic:
    return diagnose(
        "SD712",
        where=pointer,
        message=f"`{os.path.normpath(path)}` does not exist",
        expected=what,
        found="nothing",
    )


def _mismatch(path: Path, expected: str, found: str, what: str) -> Diagnostic:
    return diagnose(
        "SD702",
        where=f"{os.path.normpath(path)}#",
        message=f"{what} of `{path.name}` is not the one in the manifest",
        expected=expected,
        found=found,
    )
