"""Where a checkpoint's input embedding and output head are: the look-up as a library.

    from specctl.checkpoint import open_checkpoint
    from specctl.embedding import locate, read_rows

    checkpoint = open_checkpoint("path/to/target")
    found = locate(checkpoint)
    if found.embedding is not None:
        first = read_rows(checkpoint, found.embedding, 0, 1)

Only headers are read until `read_rows` asks for bytes. docs/how-to/find-the-embedding.md has the
rules; `specctl inspect --json` answers the same under `sharing`.
"""

from __future__ import annotations

from specctl.formats.embedding import EMBEDDING_KEYS, HEAD_KEYS, Located, locate, read_rows

__all__ = ["EMBEDDING_KEYS", "HEAD_KEYS", "Located", "locate", "read_rows"]
