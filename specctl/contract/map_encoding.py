"""Tell offsets from absolute ids in a stored `d2t`, by evidence.

*Source:* SafeAILab, SpecForge, Speculators and ModelOpt store offsets; llama.cpp and files made by
hand store absolute ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specctl.contract.vocabulary_map import offsets_to_absolute, target_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class MapEncoding:
    """How a stored `d2t` is to be read.

    Args:
        kind: `ambiguous` when both readings are valid maps and no mask decides, `invalid` when
            neither is.
        evidence: why, for messages.
        draft_to_target: absolute target ids in draft-id order under that reading; under `invalid`
            the offsets' reading, which is what the formats store; None when ambiguous.
    """

    kind: Literal["offset", "absolute", "ambiguous", "invalid"]
    evidence: str
    draft_to_target: tuple[int, ...] | None


def decide_map_encoding(
    d2t: tuple[int, ...], t2d: bytes | None, target_vocab_size: int
) -> MapEncoding:
    """Tell offsets from absolute ids by what makes a valid map, and by the mask.

    A valid map has distinct ids inside the target vocabulary; sorted offsets repeat themselves, so
    they are no valid absolute map, and absolute ids read as offsets run past the vocabulary.

    Args:
        d2t: the stored vector [R].
        t2d: mask over target ids [V], or None.
        target_vocab_size: V.
    """
    readings = {"offset": offsets_to_absolute(d2t), "absolute": d2t}
    valid = [name for name, ids in readings.items() if _is_map(ids, target_vocab_size)]
    if t2d is not None and len(t2d) == target_vocab_size:
        matching = [n for n in valid if target_mask(readings[n], target_vocab_size) == t2d]
        if len(matching) == 1:
            return _encoding(
                matching[0], "only this reading gives the ids that `t2d` marks", readings
            )
    if len(valid) == 1:
        return _encoding(valid[0], "only this reading gives distinct ids in range", readings)
    if valid and readings["offset"] != readings["absolute"]:
        return MapEncoding(
            kind="ambiguous",
            evidence="both readings give distinct ids in range",
            draft_to_target=None,
        )
    if valid:
        return _encoding("offset", "both readings are the same", readings)
    return MapEncoding(
        kind="invalid",
        evidence="neither reading gives distinct ids in range",
        draft_to_target=readings["offset"],
    )


def _encoding(name: str, evidence: str, readings: dict[str, tuple[int, ...]]) -> MapEncoding:
    return MapEncoding(
        kind="absolute" if name == "absolute" else "offset",
        evidence=evidence,
        draft_to_target=readings[name],
    )


def _is_map(ids: tuple[int, ...], target_vocab_size: int) -> bool:
    return (
        bool(ids) and len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < target_vocab_size
    )
