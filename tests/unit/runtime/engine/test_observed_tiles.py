"""What a draft observes of a mixed step is grouped for kernels, also where drafts were rejected."""

from __future__ import annotations

from pathlib import Path

from runtime.batch import ROW_TILE_ROWS
from runtime.config import Overrides
from runtime.engine.request import RequestInput
from tests.engine_harness import drive, make_rig, make_world, prompt_of


def test_observed_rows_are_in_tiles_of_one_request(tmp_path: Path) -> None:
    rig = make_rig(make_world(tmp_path), Overrides(proposer="eagle3", num_speculative_tokens=3))
    requests = [
        RequestInput(
            request_id=str(length),
            prompt_ids_target=prompt_of(length, length),
            max_tokens=12,
            ignore_eos=True,
        )
        for length in (20, 40, 37)
    ]
    drive(rig, requests, arrivals={1: 3, 2: 5})
    batches = [seen.batch for seen in rig.proposer.observations if seen.batch.num_rows]
    assert any(batch.num_rows > ROW_TILE_ROWS + 3 for batch in batches)
    for batch in batches:
        assert batch.tiles_U2 is not None
        tiles = batch.tiles_U2.tolist()
        covered = [row for first, count in tiles for row in range(first, first + count)]
        assert covered == list(range(batch.num_rows))
        owners = batch.row_request_N.tolist()
        for first, count in tiles:
            assert 1 <= count <= ROW_TILE_ROWS
            assert len(set(owners[first : first + count])) == 1
