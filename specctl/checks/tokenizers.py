"""Compare a draft with tokenizers: its own with its target's, and its mask token with the latter.

Sizes say little: padded vocabularies differ for equal tokenizers, and equal ones may hold other
tokens (vLLM issues 13849, 7252).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specctl.checks.places import fact_place
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import TOKENIZER
from specctl.draft import DraftCheckpoint


def check_tokenizers(draft: Mapping[str, int], target: Mapping[str, int]) -> Iterator[Diagnostic]:
    """Yield SD419 with the lowest id that stands for two tokens; tokens of one side only are legal.

    Args:
        draft: token -> id of the draft's tokenizer, added tokens included.
        target: the same of the target's.
    """
    ours, theirs = ({number: token for token, number in table.items()} for table in (draft, target))
    different = [number for number, token in ours.items() if theirs.get(number, token) != token]
    if different:
        first = min(different)
        yield diagnose(
            "SD419",
            where=TOKENIZER,
            message=f"{len(different)} ids stand for other tokens than in the target's tokenizer, "
            f"the first is id {first}",
            expected=repr(theirs[first])[:80],
            found=repr(ours[first])[:80],
        )


def check_mask_token(draft: DraftCheckpoint, text: str) -> Iterator[Diagnostic]:
    """Yield SD333 for a mask token that stands for text.

    Args:
        draft: a block draft.
        text: the target's entry of its mask token.
    """
    token = draft.mask_token_id
    yield diagnose(
        "SD333",
        where=fact_place(draft.origins, "draft.mask_token_id"),
        message=f"the mask token is id {token}, which is the text {text[:40]!r} in the target's "
        "tokenizer",
        expected="a special token, or a row without a token",
        found=token,
    )
