"""Facts that the user states in place of the files, by options of `manifest` and `convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specctl import formats
from specctl.checks.places import fact_place
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.draft import AuxNumbering, DraftCheckpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Facts that the user states; None leaves a fact to the files.

    Args:
        token_map: file of allowed target ids.
        aux_layer_ids: captured layers, counted as `aux_numbering` says.
        aux_numbering: `output` (0-based layer) or `boundary`; also decides an undecided file.
        target_name: hub id or path to record as the target.
    """

    token_map: str | None = None
    num_speculative_tokens: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    aux_numbering: AuxNumbering | None = None
    target_name: str | None = None

    def by_option(self) -> dict[str, object]:
        """Return option -> value, without paths of this machine; None for what is not given."""
        return {
            "--token-map": None if self.token_map is None else Path(self.token_map).name,
            "--num-speculative-tokens": self.num_speculative_tokens,
            "--aux-layer-ids": None if self.aux_layer_ids is None else list(self.aux_layer_ids),
            "--aux-numbering": self.aux_numbering,
            "--target-name": self.target_name,
        }

    def added_to(
        self, draft: DraftCheckpoint, *, ids_target: tuple[int, ...] | None = None
    ) -> DraftCheckpoint:
        """Return the draft with the facts, and with the map that was read from `token_map`."""
        return formats.with_given(
            draft,
            num_speculative_tokens=self.num_speculative_tokens,
            aux_layer_ids=self.aux_layer_ids,
            aux_numbering=self.aux_numbering,
            draft_to_target=ids_target,
        )


NOTHING_GIVEN = Given()


def overridden_layers(
    source: str, old: DraftCheckpoint, new: DraftCheckpoint
) -> tuple[Diagnostic, ...]:
    """Return SD713 when the given captured layers are others than the file's.

    Args:
        source: the draft, as the user wrote it.
        old: as read.
        new: with the given facts.
    """
    if old.aux_layer_ids in (None, new.aux_layer_ids):
        return ()
    finding = diagnose(
        "SD713",
        where=f"{source}/config.json#",
        message="the given captured layers are not those that the file names",
        expected=f"{_ids(old)} (0-based, output of that layer)",
        found=f"{_ids(new)} (given)",
    )
    return (finding,)


def overridden_count(source: str, draft: DraftCheckpoint, given: Given) -> tuple[Diagnostic, ...]:
    """Return SD713 when the given token count is another than the one that the file states.

    Only for what writes the count into a file: for a manifest it is a choice of whoever serves.

    Args:
        source: the draft, as the user wrote it.
        draft: as read.
        given: what the user states.
    """
    stated, count = draft.declared_num_speculative_tokens, given.num_speculative_tokens
    if count is None or stated in (None, count):
        return ()
    finding = diagnose(
        "SD713",
        where=f"{source}/{fact_place(draft.origins, 'geometry.num_speculative_tokens')}",
        message=f"{count} draft tokens were given and the file states {stated}",
        expected=stated,
        found=f"{count} (given)",
    )
    return (finding,)


def _ids(draft: DraftCheckpoint) -> list[int]:
    return list(draft.aux_layer_ids or ())
