"""Count how often each target id occurs in a corpus.

Invariants: counts are exact and do not depend on batch sizes or the order of documents. No special
tokens are added around a document (`add_special_tokens=False`): what a template inserts is forced
into the map by name, not by frequency. Truncation and padding of tokenizer.json are switched off,
since both would falsify counts. Memory: one batch of documents and its encodings.
"""

from __future__ import annotations

import collections
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specctl.checkpoint import digest_file
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.tokenmap.documents import Advance, Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH_BYTES = 2 << 20
_BATCH_DOCUMENTS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Occurrences of every target id in some documents.

    Args:
        per_id: [tokenizer_size] occurrences, index = target id. Treat as read-only.
        num_tokens: their sum.
        num_documents: documents counted.
        tokenizer_digest: `sha256:` of the tokenizer.json that was used.
        corpus_digest: `sha256:` over the multiset of all texts of the corpus, both sides of the
            split included.
    """

    per_id: array[int]
    num_tokens: int
    num_documents: int
    tokenizer_digest: str
    corpus_digest: str


class Counter(Protocol):
    """Anything that counts documents; fast and distributed counters have the same face."""

    def count(
        self, documents: Iterable[Document], *, corpus_digest: str, advance: Advance | None = None
    ) -> Counts:
        """Return exact counts of `documents`.

        Args:
            documents: consumed once.
            corpus_digest: recorded in the result.
            advance: called with the UTF-8 bytes of each batch once it is counted.
        """
        ...


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


class TokenizersCounter:
    """The exact counter: every document through the target's own tokenizer."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._tokenizer = tokenizer
        handle = tokenizer.handle
        # The fast form skips character offsets; packages before 0.20 do not have it.
        self._encode = getattr(handle, "encode_batch_fast", handle.encode_batch)

    def count(
        self, documents: Iterable[Document], *, corpus_digest: str, advance: Advance | None = None
    ) -> Counts:
        """Return exact counts; see `Counter.count`."""
        per_id = array("Q", bytes(8 * self._tokenizer.size))
        num_documents = 0
        for texts, size in _batches(documents):
            frequencies: collections.Counter[int] = collections.Counter()
            for encoding in self._encode(texts, add_special_tokens=False):
                frequencies.update(encoding.ids)
            for target_id, count in frequencies.items():
                per_id[target_id] += count
            num_documents += len(texts)
            if advance is not None:
                advance(size)
        return Counts(
            per_id=per_id,
            num_tokens=sum(per_id),
            num_documents=num_documents,
            tokenizer_digest=self._tokenizer.digest,
            corpus_digest=corpus_digest,
        )


def _batches(documents: Iterable[Document]) -> Iterator[tuple[list[str], int]]:
    """Group documents; yields (texts, their UTF-8 bytes)."""
    texts: list[str] = []
    size = 0
    for document in documents:
        texts.append(document.text)
        size += len(document.text.encode("utf-8"))
        if size >= _BATCH_BYTES or len(texts) >= _BATCH_DOCUMENTS:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size
