"""Count artefacts for tests, made from texts without the counting that they test apart."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.counts import (
    CountArtefact,
    CountFacts,
    CountTable,
    DomainCounts,
    domain_counts,
)


def count(tokenizer: LoadedTokenizer, name: str, texts: Sequence[str]) -> DomainCounts:
    """Return the counts of some texts."""
    per_id = array("Q", bytes(8 * tokenizer.size))
    for encoding in tokenizer.handle.encode_batch(list(texts), add_special_tokens=False):
        for target_id in encoding.ids:
            per_id[target_id] += 1
    num_bytes = sum(len(text.encode()) for text in texts)
    return domain_counts(name, per_id, num_documents=len(texts), num_text_bytes=num_bytes)


def artefact(
    tokenizer: LoadedTokenizer,
    counted: Mapping[str, Sequence[str]],
    held_out: Mapping[str, Sequence[str]],
    languages: Mapping[str, Sequence[str]] | None = None,
) -> CountArtefact:
    """Return an artefact of texts by domain, and held-out ones by language as well."""

    def table(texts: Mapping[str, Sequence[str]], by: Mapping[str, Sequence[str]]) -> CountTable:
        return CountTable(
            domains=tuple(count(tokenizer, name, texts[name]) for name in sorted(texts)),
            languages=tuple(count(tokenizer, name, by[name]) for name in sorted(by)),
        )

    return CountArtefact(
        facts=CountFacts(
            tokenizer_digest=tokenizer.digest,
            tokenizer_size=tokenizer.size,
            corpus_digest="sha256:" + "0" * 64,
            method="batch",
            method_reason="a test",
            held_out="by hand",
        ),
        counted=table(counted, {}),
        held_out=table(held_out, languages or {}),
    )
