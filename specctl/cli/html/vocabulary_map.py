"""Which target ids the draft can say, as a strip over the target's vocabulary.

Invariants: every draft id is counted once, in the bucket of its target id or as outside; the
coarse table sums to the same numbers as the picture.
"""

from __future__ import annotations

from collections.abc import Sequence

from specctl.cli.html.markup import escaped, section, table
from specctl.ops.report import VocabularyFacts

_NUM_BUCKETS = 256
_NUM_ROWS = 16
_HEIGHT = 100


def vocabulary_section(facts: VocabularyFacts, draft_to_target: tuple[int, ...] | None) -> str:
    """Return the picture and its numbers, empty for a source without a map.

    Args:
        facts: sizes, kind of map and end ids.
        draft_to_target: absolute target ids in draft-id order, None while undecided.
    """
    size = facts.target_vocab_size
    if facts.map_kind == "identity":
        return section("Vocabulary map", "<p>Every target id is a draft id: no map.</p>")
    if facts.map_kind is None or not size:
        return ""
    if draft_to_target is None:
        text = "The draft has a reduced vocabulary and its map could not be read; see the findings."
        return section("Vocabulary map", f"<p>{text}</p>")
    inside = [i for i in draft_to_target if 0 <= i < size]
    num_reached = len(set(inside))
    head = f"{len(draft_to_target):,} draft ids stand for {num_reached:,} of {size:,} target ids"
    lines = [
        f"<p>{head} ({num_reached / size:.1%}).</p>",
        _picture(inside, size),
        _end_ids(facts.eos_token_ids, draft_to_target),
    ]
    if len(inside) != len(draft_to_target):
        left = len(draft_to_target) - len(inside)
        lines.append(f"<p>{left:,} draft ids point outside the target's vocabulary.</p>")
    lines.append(_numbers(inside, size))
    return section("Vocabulary map", "\n".join(line for line in lines if line))


def bucket_counts(ids: Sequence[int], size: int, num_buckets: int) -> list[tuple[int, int, int]]:
    """Return (first id, ids in the bucket, draft ids in it) of equal parts of the vocabulary.

    Args:
        ids: target ids in range.
        size: target vocabulary.
        num_buckets: at most; fewer when the vocabulary is smaller.
    """
    width = -(-size // num_buckets)
    counts = [0] * -(-size // width)
    for i in ids:
        counts[i // width] += 1
    return [
        (index * width, min(width, size - index * width), count)
        for index, count in enumerate(counts)
    ]


def _picture(ids: Sequence[int], size: int) -> str:
    buckets = bucket_counts(ids, size, _NUM_BUCKETS)
    rects = [f'<rect class="ground" width="1000" height="{_HEIGHT}"/>']
    for first, width, count in buckets:
        height = min(count / width, 1.0) * _HEIGHT
        last = first + width - 1
        title = f"target ids {first:,} to {last:,}: {count:,} of {width:,} in the draft vocabulary"
        place = f'x="{first / size * 1000:.2f}" width="{width / size * 1000:.2f}"'
        rects.append(
            f'<g><rect class="p0" {place} y="{_HEIGHT - height:.2f}" height="{height:.2f}"/>'
            f'<rect class="clear" {place} height="{_HEIGHT}"/><title>{title}</title></g>'
        )
    label = f"Share of target ids in the draft vocabulary, in {len(buckets)} parts from id 0"
    marks = "".join(f"<span>{round(size * part / 4):,}</span>" for part in range(5))
    return (
        f'<figure class="strip"><svg viewBox="0 0 1000 {_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escaped(label)}">{"".join(rects)}</svg>\n'
        f'<div class="axis" aria-hidden="true">{marks}</div>\n'
        f"<figcaption>Target ids from left to right, {buckets[0][1]:,} in a column; its height is "
        "the share of them in the draft vocabulary.</figcaption></figure>"
    )


def _end_ids(end_ids: Sequence[int], draft_to_target: tuple[int, ...]) -> str:
    if not end_ids:
        return ""
    draft_ids = {target: draft for draft, target in enumerate(draft_to_target)}
    items = [
        f"<li>end id {i}: draft id {draft_ids[i]}</li>"
        if i in draft_ids
        else f'<li>end id {i}: <strong class="absent">not in the draft vocabulary</strong></li>'
        for i in end_ids
    ]
    return f"<ul>{''.join(items)}</ul>"


def _numbers(ids: Sequence[int], size: int) -> str:
    rows = (
        (f"{first:,} to {first + width - 1:,}", f"{count:,}", f"{count / width:.1%}")
        for first, width, count in bucket_counts(ids, size, _NUM_ROWS)
    )
    head = ("target ids", "in the draft vocabulary #", "share #")
    inner = table(head, rows, caption="Draft vocabulary by range of target ids")
    return f"<details><summary>As numbers</summary>\n{inner}</details>"
