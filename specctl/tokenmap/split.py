"""Hold out part of a corpus, by content, so that the same text is always on the same side.

Invariants: the side of a document depends on its text and on the set of texts, not on order, file
names or the number of workers; both sides are non-empty whenever two different texts exist.
Rule: a document is held out when its hash is divisible by `HELD_OUT_EVERY`. When that leaves a side
empty, the document with the lowest (highest) hash changes sides. A corpus of one text is split into
its paragraphs first, or its lines when there are few paragraphs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.fingerprint import digest_bytes
from specctl.tokenmap.documents import Advance, Corpus, Document

HELD_OUT_EVERY = 10
_PARAGRAPH_END = re.compile(r"(?<=\n)\s*\n")
_MODULUS = 1 << 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What one pass over a corpus found, and the split that follows from it.

    Args:
        num_documents: documents after the split into paragraphs, if any.
        num_text_bytes: UTF-8 bytes of all documents.
        corpus_digest: `sha256:` over the multiset of texts, independent of their order.
        is_by_paragraph: the corpus is one text and its paragraphs are the documents.
        moved_in: hash that is held out although the rule says counted, None: none.
        moved_out: hash that is counted although the rule says held out, None: none.
        has_held_out: both sides have documents.
        first_replaced: place of the first document with half surrogate pairs, None: none.
        num_replaced: documents with half surrogate pairs.
    """

    num_documents: int
    num_text_bytes: int
    corpus_digest: str
    is_by_paragraph: bool
    moved_in: int | None
    moved_out: int | None
    has_held_out: bool
    first_replaced: str | None
    num_replaced: int

    def is_held_out(self, document: Document) -> bool:
        """Tell on which side a document is."""
        number = _hash(document.text)
        if not self.has_held_out or number == self.moved_out:
            return False
        return number % HELD_OUT_EVERY == 0 or number == self.moved_in


def survey(corpus: Corpus, advance: Advance | None = None) -> Survey:
    """Read the corpus once and decide its split.

    Args:
        corpus: read once, or twice when it is one text.
        advance: called with the UTF-8 bytes of each document.

    Raises:
        DiagnosticError: SD422 when there is no text, SD423 when a document cannot be read.
    """
    result = _survey(corpus, advance, is_by_paragraph=False)
    if result.has_held_out:
        return result
    return _survey(corpus, None, is_by_paragraph=True)


def _survey(corpus: Corpus, advance: Advance | None, *, is_by_paragraph: bool) -> Survey:
    total, num_documents, num_bytes, num_held, num_replaced = 0, 0, 0, 0, 0
    lowest, highest = _MODULUS, -1
    first_replaced: str | None = None
    for document in _all_documents(corpus, is_by_paragraph):
        data = document.text.encode("utf-8")
        if document.was_replaced:
            num_replaced += 1
            first_replaced = first_replaced or document.where
        digest = hashlib.sha256(data).digest()
        total = (total + int.from_bytes(digest, "big")) % _MODULUS
        number = int.from_bytes(digest[:8], "big")
        lowest, highest = min(lowest, number), max(highest, number)
        num_documents += 1
        num_bytes += len(data)
        if advance is not None:
            advance(len(data))
        num_held += number % HELD_OUT_EVERY == 0
    if num_documents == 0:
        raise DiagnosticError(
            diagnose(
                "SD422",
                where=str(corpus.files[0]),
                message=f"{len(corpus.files)} files hold no text",
            )
        )
    is_split = lowest != highest
    counted = num_documents.to_bytes(8, "big") + total.to_bytes(32, "big")
    return Survey(
        num_documents=num_documents,
        num_text_bytes=num_bytes,
        corpus_digest=digest_bytes(counted),
        is_by_paragraph=is_by_paragraph,
        moved_in=lowest if is_split and num_held == 0 else None,
        moved_out=highest if is_split and num_held == num_documents else None,
        has_held_out=is_split,
        first_replaced=first_replaced,
        num_replaced=num_replaced,
    )


def counted_documents(corpus: Corpus, plan: Survey) -> Iterator[Document]:
    """Yield the documents whose tokens are counted for the selection."""
    return (d for d in _all_documents(corpus, plan.is_by_paragraph) if not plan.is_held_out(d))


def held_out_documents(corpus: Corpus, plan: Survey) -> Iterator[Document]:
    """Yield the documents that measure coverage."""
    return (d for d in _all_documents(corpus, plan.is_by_paragraph) if plan.is_held_out(d))


def _all_documents(corpus: Corpus, is_by_paragraph: bool) -> Iterator[Document]:
    for document in corpus.documents():
        if not is_by_paragraph:
            yield document
            continue
        for number, text in enumerate(paragraphs(document.text), start=1):
            place = f"{document.where}#paragraph{number}"
            yield Document(text=text, where=place, was_replaced=document.was_replaced)


def paragraphs(text: str) -> list[str]:
    """Split at blank lines, or at line ends when there are fewer than 20 paragraphs.

    The pieces joined again are the text, but for white space only pieces, which are left out.
    """
    pieces: list[str] = []
    start = 0
    for match in _PARAGRAPH_END.finditer(text):
        pieces.append(text[start : match.end()])
        start = match.end()
    pieces.append(text[start:])
    if len(pieces) < 2 * HELD_OUT_EVERY:
        pieces = text.splitlines(keepends=True)
    return [piece for piece in pieces if piece.strip()]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
