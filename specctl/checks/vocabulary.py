"""Checks of vocabularies: the draft's map (presence, encoding, range, duplicates, mask), end ids.

A map with one defect gives one code: the mask is compared with the ids only when these are a map.
*Source:* SafeAILab EAGLE-3 stores sorted offsets and a mask; ModelOpt stores rank order, in which
negative offsets are legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specctl.checkpoint import tensor_place
from specctl.checkpoint.config_sections import model_sections
from specctl.checks.places import fact_place
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import TOKENIZER
from specctl.contract.manifest import TensorRef
from specctl.contract.map_encoding import decide_map_encoding
from specctl.draft import DraftCheckpoint, TargetCheckpoint


def check_vocabulary(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD401 to SD410 as far as the draft alone decides them."""
    yield from _check_lengths(draft)
    yield from _check_presence(draft)
    yield from _check_map(draft)
    yield from _check_absolute_map(draft)
    yield from _check_mask(draft)
    yield from _check_tie(draft)
    yield from missing_end_ids(draft, draft.eos_token_ids, source="the draft's config")
    size = draft.draft_vocab_size
    if size is not None and size % 2 and draft.map_kind == "reduced":
        yield diagnose(
            "SD407",
            where=fact_place(draft.origins, "vocabulary.draft_vocab_size"),
            message=f"a head of {size} rows cannot be shared by an even number of ranks",
            expected="an even number of rows",
            found=size,
        )


def _check_tie(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD418 when a head is stored that the config says is the stored embedding."""
    embedding, head = draft.tensors.get("embedding"), draft.tensors.get("head")
    flags = [s.get("tie_word_embeddings") for _, s in model_sections(draft.config)]
    is_tied = next((flag for flag in flags if isinstance(flag, bool)), False)
    if not is_tied or embedding is None or head is None or embedding.key == head.key:
        return
    if draft.map_kind == "identity":
        yield diagnose(
            "SD418",
            where=tensor_place(head),
            message=f"`tie_word_embeddings` is true, and `{head.key}` is stored beside "
            f"`{embedding.key}`",
            expected="false, or no head of its own",
            found="true",
        )


def check_target_ids(target: TargetCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD415 and SD207 for ids of a target that are no rows of its embedding."""
    entries, rows = target.tokenizer_size, target.vocab_size
    if entries is not None and rows is not None and entries > rows:
        yield diagnose(
            "SD415",
            where=TOKENIZER,
            message=f"the tokenizer has {entries} entries and the embedding {rows} rows",
            expected=f"at most {rows}",
            found=entries,
        )
    for token in target.eos_token_ids:
        if rows is not None and not 0 <= token < rows:
            yield diagnose(
                "SD207",
                where="config.json#/eos_token_id",
                message=f"end id {token} is no row of the embedding, so it can never end an answer",
                expected=f"0 to {rows - 1}",
                found=token,
                severity="warning",
            )


def missing_end_ids(
    draft: DraftCheckpoint, end_ids: Iterable[int], *, source: str
) -> Iterator[Diagnostic]:
    """Yield SD406 for every end id that the draft cannot propose.

    Args:
        draft: as read.
        end_ids: target ids.
        source: who names them, for the message.
    """
    ids = draft.draft_to_target
    ref = map_tensor(draft)
    if draft.map_kind != "reduced" or ids is None or ref is None:
        return
    reachable = set(ids)
    for token in end_ids:
        if token not in reachable:
            yield diagnose(
                "SD406",
                where=tensor_place(ref),
                message=f"end id {token} of {source} is not among the {len(ids)} ids of the map",
                expected=f"id {token} in the map",
                found="absent",
            )


def map_tensor(draft: DraftCheckpoint) -> TensorRef | None:
    """Return the stored map: `d2t`, or Medusa's `token_map`; None without one."""
    return draft.tensors.get("d2t") or draft.tensors.get("token_map")


def _check_absolute_map(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD402, SD404 and SD410 of a list that the format defines as absolute ids."""
    ref, ids = draft.tensors.get("token_map"), draft.draft_to_target
    if ref is None or ids is None or draft.target_vocab_size is None:
        return
    if draft.draft_vocab_size != len(ids):
        yield diagnose(
            "SD410",
            where=tensor_place(ref),
            message=f"`{ref.key}` has {len(ids)} ids for a draft vocabulary of "
            f"{draft.draft_vocab_size}",
            expected=draft.draft_vocab_size,
            found=len(ids),
        )
    yield from _check_ids(ids, draft.target_vocab_size, tensor_place(ref), ref.key)


def _check_lengths(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    head, d2t = draft.tensors.get("head"), draft.tensors.get("d2t")
    sizes = {
        "config": draft.draft_vocab_size,
        "d2t": None if draft.d2t is None else len(draft.d2t),
        "lm_head rows": head.shape[0] if head is not None and head.shape else None,
    }
    if draft.algorithm == "mtp" or d2t is None or draft.d2t is None:
        return
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(set(known.values())) > 1:
        text = ", ".join(f"{name} {size}" for name, size in known.items())
        yield diagnose(
            "SD410",
            where=tensor_place(d2t),
            message=f"the draft vocabulary's size disagrees: {text}",
            expected="three equal sizes",
            found=text,
        )


def _check_presence(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    if draft.map_kind != "reduced" or "d2t" in draft.tensors or draft.draft_to_target is not None:
        return
    if not draft.tensors:
        return  # no weight file was read, which is the finding
    ours, theirs = draft.draft_vocab_size, draft.target_vocab_size
    has_mask = "t2d" in draft.tensors
    yield diagnose(
        "SD401",
        where=fact_place(draft.origins, "vocabulary.draft_vocab_size"),
        message=f"{ours} draft ids stand for some of {theirs} target ids and "
        + ("`t2d` alone does not say in which order" if has_mask else "no map says for which"),
        expected="`d2t` and `t2d`",
        found="`t2d`" if has_mask else "neither",
    )


def _check_map(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    size, ref = draft.target_vocab_size, draft.tensors.get("d2t")
    if draft.d2t is None or ref is None or size is None:
        return
    encoding = decide_map_encoding(draft.d2t, draft.t2d, size)
    where = tensor_place(ref)
    if encoding.kind == "absolute":
        yield diagnose(
            "SD408",
            where=where,
            message=f"`{ref.key}` holds absolute ids: {encoding.evidence}",
            expected="offsets: target id minus draft id",
            found=f"{ref.key}[1] = {draft.d2t[1] if len(draft.d2t) > 1 else draft.d2t[0]}",
        )
    elif encoding.kind == "ambiguous":
        yield diagnose(
            "SD403",
            where=where,
            message=f"`{ref.key}` may hold offsets or absolute ids: {encoding.evidence}",
            expected="a mask `t2d` that fits one reading",
            found="none that decides",
            notes=("sorted offsets repeat values; a strictly increasing list is likely absolute",),
        )
    elif encoding.kind == "invalid":
        yield from _check_ids(encoding.draft_to_target or (), size, where, ref.key)
    elif draft.map_kind == "reduced" and not any(draft.d2t):
        yield diagnose(
            "SD409",
            where=where,
            message=f"`{ref.key}` is all zero: the map is the first {len(draft.d2t)} target ids",
            expected="offsets of the trained map",
            found="zeros",
        )


def _check_ids(ids: tuple[int, ...], size: int, where: str, key: str) -> Iterator[Diagnostic]:
    outside = [place for place, token in enumerate(ids) if not 0 <= token < size]
    if outside:
        place = outside[0]
        yield diagnose(
            "SD402",
            where=where,
            message=f"{key}[{place}] gives target id {ids[place]}"
            + (f", and {len(outside) - 1} more are outside" if outside[1:] else ""),
            expected=f"0 to {size - 1}",
            found=ids[place],
        )
    first: dict[int, int] = {}
    for place, token in enumerate(ids):
        earlier = first.setdefault(token, place)
        if earlier != place:
            yield diagnose(
                "SD404",
                where=where,
                message=f"draft ids {earlier} and {place} both stand for target id {token}",
                expected="every target id once",
                found=f"{len(ids) - len(set(ids))} repeated",
            )
            return


def _check_mask(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    size, mask, ref = draft.target_vocab_size, draft.t2d, draft.tensors.get("t2d")
    if mask is None or ref is None or size is None:
        return
    where = tensor_place(ref)
    if len(mask) != size:
        yield diagnose(
            "SD405",
            where=where,
            message=f"`{ref.key}` has {len(mask)} entries for {size} target ids",
            expected=size,
            found=len(mask),
        )
        return
    marked = sum(mask)
    ids = set(draft.draft_to_target or range(size))
    is_map = draft.d2t is not None and len(ids) == len(draft.d2t)
    if draft.draft_vocab_size is not None and marked != draft.draft_vocab_size:
        yield diagnose(
            "SD405",
            where=where,
            message=f"`{ref.key}` marks {marked} target ids of a draft of {draft.draft_vocab_size}",
            expected=draft.draft_vocab_size,
            found=marked,
        )
    elif is_map and min(ids) >= 0 and max(ids) < size and not all(mask[token] for token in ids):
        unmarked = min(token for token in ids if not mask[token])
        yield diagnose(
            "SD405",
            where=where,
            message=f"`{ref.key}` does not mark target id {unmarked}, which `d2t` reaches",
            expected=f"{ref.key}[{unmarked}] true",
            found="false",
        )
