"""Takes a round's tokens into a request, up to where target-only decoding would have stopped."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.engine.request import FinishReason, Request


class Kept(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The committed tokens that count; a struct, because every round makes one for each request.

    Args:
        ids_target: kept ids; what a stop cut off is nowhere.
        finish_reason: why the request ends with the last of them; None: it goes on.
    """

    ids_target: tuple[int, ...]
    finish_reason: FinishReason | None


def keep_tokens(request: Request, committed: Sequence[int]) -> Kept:
    """Append committed tokens in order until the request ends.

    Checked after each token, as target-only decoding would: end id, then stop string, then length.
    An end id is kept in the ids and not shown in the text; a token that completes a stop string is
    kept in the ids and the text ends before the string.

    Args:
        request: changed: tokens and text.
        committed: target ids of one round or of one prefill.
    """
    for count, token in enumerate(committed, start=1):
        request.ids_target.append(token)
        reason = _finish_reason(request, token)
        if reason is not None:
            return Kept(ids_target=tuple(committed[:count]), finish_reason=reason)
    return Kept(ids_target=tuple(committed), finish_reason=None)


def _finish_reason(request: Request, token: int) -> FinishReason | None:
    if token in request.params.end_ids_target:
        return "stop"
    if request.text is not None and request.text.push(token):
        return "stop"
    return "length" if len(request.ids_target) >= request.max_length else None


def take_text(request: Request, *, is_finished: bool) -> str:
    """Return the text that became final; all that is left once the request is finished."""
    if request.text is None:
        return ""
    return request.text.finish() if is_finished else request.text.take_delta()
