"""Family 1: container and files."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD101",
        slug="header-unreadable",
        severity="error",
        summary="A safetensors header cannot be read: truncated, too long, not JSON or malformed.",
        why="Every later fact is read from the header; nothing can be concluded from this file.",
        fix="Download or export the file again and compare its size and digest with the source",
        source="safetensors format: u64 header length, JSON header, at most 100,000,000 bytes",
    ),
    Code(
        code="SD102",
        slug="shard-missing",
        severity="error",
        summary="The index names a file that is not in the directory.",
        why="Engines differ: some stop, some serve with the missing weights at random values.",
        fix="Fetch the missing file, or rebuild the index from complete shards",
    ),
    Code(
        code="SD104",
        slug="tensor-in-two-shards",
        severity="error",
        summary="The same tensor is stored in two files.",
        why="Which copy an engine uses depends on the order in which it reads files.",
        fix="Keep one copy and point the index at it",
    ),
)
