"""Facts that the user states in place of the files, by options of `manifest` and `convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specctl import formats
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
