"""Maps that lie beside the weights instead of in them.

Foreign conventions undone: ModelOpt's `d2t.pt` is one tensor of offsets in rank order; NeMo
Automodel's `eagle_meta.pt` holds absolute ids under `selected_token_ids`.
*Source:* Model-Optimizer `calibrate_frequent_vocab`; NeMo Automodel issue 2447.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.map_encoding import decide_map_encoding
from specctl.contract.vocabulary_map import absolute_to_offsets
from specctl.formats.fields import ReaderFindings
from specctl.formats.vocabulary import VocabularyFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class SideMap:
    """A file that may hold a map.

    Args:
        file: name beside the weights.
        entry: key of the list when the file holds a dictionary.
        is_absolute: it holds target ids; else offsets.
    """

    file: str
    entry: str | None
    is_absolute: bool


SIDE_MAPS: tuple[SideMap, ...] = (
    SideMap(file="d2t.pt", entry=None, is_absolute=False),
    SideMap(file="eagle_meta.pt", entry="selected_token_ids", is_absolute=True),
)


def with_side_map(
    checkpoint: Checkpoint, facts: VocabularyFacts, findings: ReaderFindings
) -> VocabularyFacts:
    """Return the facts with the map of a side file when the weights hold none (SD221).

    A file that cannot be read keeps its own code (SD103, SD132, SD133); a vector that is no map
    leaves the map open, which the vocabulary checks report as SD401.
    """
    size = facts.target_vocab_size
    found = next((side for side in SIDE_MAPS if side.file in checkpoint.file_names), None)
    is_reduced = size is not None and facts.draft_vocab_size != size
    if found is None or size is None or facts.d2t is not None or not is_reduced:
        return facts
    from specctl.checkpoint.pt_list import read_stored_ints  # pickles: for a side file only

    try:
        values = read_stored_ints(checkpoint.store, found.file, entry=found.entry)
    except DiagnosticError as error:
        findings.extend(error.diagnostics)
        return facts
    offsets = absolute_to_offsets(values) if found.is_absolute else values
    ids = decide_map_encoding(offsets, facts.t2d, size).draft_to_target
    is_map = (
        ids is not None
        and len(ids) == facts.draft_vocab_size
        and len(set(ids)) == len(ids)
        and min(ids) >= 0
        and max(ids) < size
    )
    findings.add(
        "SD221",
        where=found.file,
        message=f"the map of {len(values)} ids lies in `{found.file}`, not in the weights"
        + ("" if is_map else ", and is no map for this head"),
        expected=f"`d2t` of {facts.draft_vocab_size} ids in the weights",
        found=f"{len(values)} ids in `{found.file}`",
    )
    if not is_map:
        return facts
    findings.read("vocabulary.map_digest", found.file)
    return replace(facts, draft_to_target=ids)
