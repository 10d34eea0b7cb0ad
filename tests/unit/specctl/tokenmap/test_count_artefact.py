"""The count file: what is written is read back, the same bytes every time, damage is refused."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.checkpoint import write_safetensors
from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap.counts import (
    METADATA_KEY,
    CountArtefact,
    CountFacts,
    CountTable,
    domain_counts,
    read_counts,
    write_counts,
)

SIZE = 12


def facts() -> CountFacts:
    return CountFacts(
        tokenizer_digest="sha256:a",
        tokenizer_size=SIZE,
        corpus_digest="sha256:b",
        method="batch",
        method_reason="asked for",
        held_out="fraction 0.1",
        options={"fields": "[]"},
    )


ROWS = st.lists(
    st.tuples(
        st.text(max_size=5),
        st.lists(st.integers(0, 2**60), min_size=SIZE, max_size=SIZE),
        st.integers(0, 2**40),
    ),
    max_size=3,
    unique_by=lambda row: row[0],
)


def table(rows: list[tuple[str, list[int], int]]) -> CountTable:
    return CountTable(
        domains=tuple(
            domain_counts(name, array("Q", counts), num_documents=num, num_text_bytes=2 * num)
            for name, counts, num in sorted(rows)
        )
    )


@settings(max_examples=50, deadline=None)
@given(counted=ROWS, held_out=ROWS)
def test_read_gives_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    counted: list[tuple[str, list[int], int]],
    held_out: list[tuple[str, list[int], int]],
) -> None:
    artefact = CountArtefact(facts=facts(), counted=table(counted), held_out=table(held_out))
    directory = tmp_path_factory.mktemp("counts")
    for name in ("a", "b"):
        write_counts(directory / name, artefact)
    assert read_counts(directory / "a") == artefact
    assert (directory / "a").read_bytes() == (directory / "b").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [("code", [0, 3, 0, 5, *[0] * 8], 2), ("prose", [7] * SIZE, 4)]
    path = tmp_path / "corpus.counts"
    write_counts(path, CountArtefact(facts=facts(), counted=table(rows), held_out=table(rows[:1])))
    return path


def codes(path: Path) -> set[str]:
    with pytest.raises(DiagnosticError) as caught:
        read_counts(path)
    return {d.code for d in caught.value.diagnostics}


def test_every_changed_byte_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 0x11
        path.write_bytes(changed)
        assert all(code[2] == "1" or code == "SD432" for code in codes(path)), place


def test_a_cut_file_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert codes(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"d2t": ("I64", (1,), bytes(8))}, {"format": "pt"})
    assert codes(tmp_path / "x") == {"SD432"}


def test_a_later_layout_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {}, {METADATA_KEY: json.dumps({"version": 99})})
    with pytest.raises(DiagnosticError) as caught:
        read_counts(tmp_path / "x")
    (only,) = caught.value.diagnostics
    assert (only.code, only.expected, only.found) == ("SD432", "1", "99")
