"""Load a target's tokenizer to count with.

Invariants: truncation and padding of tokenizer.json are switched off, since both would falsify
counts. No special tokens are added around a document: what a template inserts is forced into the
map by name, not by frequency.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.checkpoint import digest_file
from specctl.contract.diagnostics import DiagnosticError, diagnose

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTokenizer:
    """A target's tokenizer, ready to count.

    Args:
        path: its tokenizer.json.
        digest: `sha256:` of that file.
        size: highest id + 1, added tokens included.
        handle: the `tokenizers.Tokenizer`.
    """

    path: Path
    digest: str
    size: int
    handle: Tokenizer


def load_tokenizer(path: Path) -> LoadedTokenizer:
    """Load a tokenizer.json.

    Raises:
        DiagnosticError: SD425 when the `tokenizers` package refuses it, SD135 when unreadable.
    """
    from tokenizers import Tokenizer

    digest = digest_file(path, where=str(path))
    try:
        handle = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust binding raises bare Exception
        raise DiagnosticError(
            diagnose(
                "SD425",
                where=str(path),
                message=f"the tokenizers package refuses it: {str(error).splitlines()[0][:200]}",
            )
        ) from error
    handle.no_truncation()
    handle.no_padding()
    ids = handle.get_vocab(with_added_tokens=True).values()
    size = max(ids, default=-1) + 1
    if size == 0:
        raise DiagnosticError(diagnose("SD425", where=str(path), message="the vocabulary is empty"))
    return LoadedTokenizer(path=path, digest=digest, size=size, handle=handle)
