"""Build token maps: find the tokenizer, count the corpus, cut, write, say what was done.

Invariants: nothing is counted for options that cannot be met whatever the counts are, and no map
is written before everything was counted; the files depend on the texts, the
tokenizer, the forced ids and the sizes, not on the order or number of corpus files.
"""

from __future__ import annotations

from pathlib import Path

from specctl.ops.cut_token_map import (
    CutOptions,
    cut_token_map,
    refuse_what_counts_cannot_mend,
)
from specctl.ops.find_tokenizer import find_tokenizer
from specctl.ops.token_map_report import TokenMapReport
from specctl.tokenmap.count_corpus import (
    CorpusSpec,
    CountOptions,
    CountProgress,
    count_corpus,
)
from specctl.tokenmap.counting import load_tokenizer

_NO_HELD_OUT = "SD427"


def build_token_map(
    corpus: CorpusSpec,
    *,
    tokenizer: str | Path | None = None,
    counting: CountOptions,
    options: CutOptions,
    progress: CountProgress | None = None,
) -> TokenMapReport:
    """Count a corpus and write its token maps.

    Args:
        corpus: what to count.
        tokenizer: directory with tokenizer.json, or that file; None: the target of
            `manifest.yaml` in the working directory.
        counting: how to count, and the file that the counts are kept in.
        options: what to cut from the counts.
        progress: called while counting.

    Raises:
        DiagnosticError: SD415, SD421 to SD440, SD119, SD120, and codes of families 1 and 7 for
            files that cannot be read.
    """
    loaded = load_tokenizer(find_tokenizer(tokenizer))
    refuse_what_counts_cannot_mend(loaded, options)
    result = count_corpus(corpus, loaded, counting, progress)
    # The cut says the same with what is measured instead.
    found = [item for item in result.diagnostics if item.code != _NO_HELD_OUT]
    return cut_token_map(
        result.artefact, loaded, options, found=found, where=" ".join(corpus.sources)
    )
