"""Cost tables: measured on the engine's own rounds, kept, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.config import Overrides, resolve_config
from runtime.config.cost_table import CostTable, load_costs, save_costs
from runtime.config.round_sizes import RoundMenu, RoundSize, draft_counts_up_to
from runtime.engine.build import build_engine
from runtime.engine.costs import CostPlace, cost_path, measure_costs
from runtime.engine.device_rounds import round_menu
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from specctl.contract.codec import dump_manifest
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from tests.engine_harness import KV_BLOCK_SIZE, World, make_world, prompt_of
from tests.fake_graph import FakeGraph
from tests.linear_costs import NOWHERE, linear_costs

MENU = RoundMenu(batches=(1, 2, 4), draft_counts=draft_counts_up_to(4))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("costs"))


def _codes(error: DiagnosticError) -> list[str]:
    return [item.code for item in error.diagnostics]


def test_lookup_takes_the_next_larger_entry() -> None:
    table = CostTable(
        measured_on=NOWHERE,
        draft_s={(1, 2): 1.0, (4, 2): 3.0},
        verify_s={(1, 8): 10.0, (4, 8): 20.0, (4, 16): 30.0},
        num_timings=3,
    )
    assert table.round_s(1, 0, 1) == 10.0
    assert table.round_s(1, 1, 2) == 11.0
    assert table.round_s(2, 2, 8) == 23.0
    assert table.round_s(2, 2, 9) == 33.0
    assert table.round_s(4, 4, 32) == 6.0 + 60.0, "beyond the largest, in proportion"
    assert table.round_s(9, 0, 9) == 30.0


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    table = linear_costs(MENU, row_s=0.01)
    path = tmp_path / "t.costs.json"
    assert load_costs(path, NOWHERE) is None
    save_costs(table, path)
    assert load_costs(path, NOWHERE) == table
    assert [item.name for item in tmp_path.iterdir()] == ["t.costs.json"]


@pytest.mark.parametrize("name", NOWHERE.__struct_fields__)
def test_a_table_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    import msgspec

    path = tmp_path / "t.json"
    save_costs(linear_costs(MENU), path)
    found = getattr(NOWHERE, name)
    other = f"{found}, another"
    with pytest.raises(DiagnosticError) as refused:
        load_costs(path, msgspec.structs.replace(NOWHERE, **{name: other}))
    (problem,) = refused.value.diagnostics
    assert (problem.code, problem.where) == ("SD837", str(path))
    assert name in problem.message
    assert (problem.expected, problem.found) == (other, found)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": 2},
        {"row_bin": 64},
        {"measured_on": {}},
        {"verify": [[1, 8, 0.0]]},
        {"draft": [[1, 8]]},
        {"surprise": 1},
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "t.json"
    save_costs(linear_costs(MENU), path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change))
    with pytest.raises(DiagnosticError) as refused:
        load_costs(path, NOWHERE)
    assert _codes(refused.value) == ["SD837"]
    path.write_bytes(b"\xff\x00 no table")
    with pytest.raises(DiagnosticError) as refused:
        load_costs(path, NOWHERE)
    assert _codes(refused.value) == ["SD837"]
    path.unlink()
    path.mkdir()
    with pytest.raises(DiagnosticError) as refused:
        load_costs(path, NOWHERE)
    assert _codes(refused.value) == ["SD837"]


class _Clock:
    """Gives each size its own seconds and notes what was timed."""

    def __init__(self) -> None:
        self.drafts: list[RoundSize] = []
        self.verifies: list[RoundSize] = []

    def draft_s(self, size: RoundSize) -> float:
        self.drafts.append(size)
        return size.batch + size.num_drafts / 100

    def verify_s(self, size: RoundSize) -> float:
        self.verifies.append(size)
        return size.num_rows * 10.0


def test_each_entry_is_timed_once_and_the_draft_apart() -> None:
    clock = _Clock()
    table = measure_costs(clock, MENU, NOWHERE)
    assert len(clock.drafts) == len(table.draft_s) == 3 * 4
    assert len(clock.verifies) == len(table.verify_s)
    assert table.draft_s[2, 3] == 2.03
    assert {rows for batch, rows in table.verify_s if batch == 4} == {8, 16, 24}
    for batch in MENU.batches:
        for size in MENU.sizes(batch):
            assert table.round_s(size.batch, size.num_drafts, size.num_rows) > 0


@pytest.mark.parametrize(
    ("proposer", "is_ahead"),
    [("eagle3", False), ("eagle3", True), ("ngram", False)],
)
def test_costs_are_measured_once_and_read_after_that(
    world: World, tmp_path: Path, proposer: str, is_ahead: bool
) -> None:
    config = resolve_config(
        world.manifest,
        Overrides(
            device="cpu",
            proposer=proposer,
            num_speculative_tokens=2,
            max_num_requests=2,
            max_model_len=64,
            kv_block_size=KV_BLOCK_SIZE,
            length_mode="compact",
        ),
    )
    place = CostPlace(path=tmp_path / "m.costs.json", fingerprint=world.manifest.fingerprint)
    models = world.models if proposer == "eagle3" else replace(world.models, draft=None)
    request = RequestInput(
        request_id="r", prompt_ids_target=prompt_of(3, 9), max_tokens=9, ignore_eos=True
    )
    answers, contents = [], []
    for expected in (["SD839"], []):
        found: list[Diagnostic] = []
        engine = build_engine(
            models,
            config,
            costs=place,
            on_diagnostic=found.append,
            make_runner=FakeGraph if is_ahead else None,
        )
        assert [item.code for item in found] == expected
        engine.add_request(request)
        ids = [token for _ in range(20) for delta in engine.step() for token in delta.ids_target]
        answers.append(ids)
        contents.append(place.path.read_bytes())
        engine.check()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 9
    assert contents[0] == contents[1]
    held = json.loads(contents[0])
    assert held["measured_on"]["fingerprint"] == world.manifest.fingerprint
    assert held["measured_on"]["rounds"] == "eager"
    timed = {(batch, count) for batch, count, _ in held["draft"]}
    assert timed == {(batch, count) for batch in (1, 2) for count in (1, 2)}
    menu = round_menu(config)
    assert {tuple(item[:2]) for item in held["verify"]} == {
        (size.batch, -(-size.num_rows // 8) * 8) for batch in (1, 2) for size in menu.sizes(batch)
    }
    larger: list[Diagnostic] = []
    build_engine(
        models, replace(config, max_num_requests=3), costs=place, on_diagnostic=larger.append
    )
    assert [item.code for item in larger] == ["SD839"], "what is missing is measured and joined"
    grown = json.loads(place.path.read_bytes())
    assert [item for item in grown["verify"] if item[0] < 3] == held["verify"]
    assert {item[0] for item in grown["verify"]} == {1, 2, 3}
    other = CostPlace(path=place.path, fingerprint="sha256:other")
    with pytest.raises(DiagnosticError) as refused:
        build_engine(models, config, costs=other)
    assert _codes(refused.value) == ["SD837"]


def test_choosing_without_a_table_is_refused(world: World, tmp_path: Path) -> None:
    config = resolve_config(
        world.manifest, Overrides(device="cpu", length_mode="cap-accept", max_num_requests=1)
    )
    with pytest.raises(DiagnosticError) as refused:
        build_engine(world.models, config)
    assert _codes(refused.value) == ["SD836"]
    nowhere = CostPlace(path=tmp_path / "missing" / "m.json", fingerprint="sha256:0")
    found: list[Diagnostic] = []
    build_engine(world.models, config, costs=nowhere, on_diagnostic=found.append)
    assert [(item.code, item.severity) for item in found] == [
        ("SD839", "info"),
        ("SD838", "warning"),
    ]


def test_the_table_of_a_manifest_lies_next_to_it(world: World, tmp_path: Path) -> None:
    path = tmp_path / "served.yaml"
    assert cost_path(path, None) == tmp_path / "served.costs.json"
    assert cost_path(path, "mine.json") == tmp_path / "mine.json"
    assert cost_path(path, "/elsewhere/mine.json") == Path("/elsewhere/mine.json")
    path.write_text(dump_manifest(world.manifest), encoding="utf-8")
    given = Overrides(
        device="cpu", length_mode="compact", num_speculative_tokens=1, max_num_requests=1,
        max_model_len=64,
    )  # fmt: skip
    first, second = (LLM.from_manifest(path, given) for _ in range(2))
    assert "SD839" in [item.code for item in first.diagnostics]
    assert "SD839" not in [item.code for item in second.diagnostics]
    assert (tmp_path / "served.costs.json").is_file()
    sibling = first.sibling(proposer="none", num_speculative_tokens=0)
    assert sibling.config.length_mode == "static"
