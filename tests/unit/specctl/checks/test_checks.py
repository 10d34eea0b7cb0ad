"""Checks are pure: facts in, findings out; one defect gives one code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specctl import checks
from specctl.contract.map_encoding import decide_map_encoding
from specctl.contract.roles import EAGLE3_ROLES, dimension, find_role, generic_role, required_roles
from tests.unit.specctl.formats.edits import codes, draft, target

EAGLE3 = "speculators-eagle3-clean"
LLAMA = "hf-llama-clean"


def test_the_clean_pair_has_no_finding() -> None:
    read, owner = draft(EAGLE3), target(LLAMA)
    assert checks.check_draft(read) == ()
    assert checks.check_target(owner) == ()
    assert checks.check_pair(read, owner) == ()


def test_an_end_id_that_no_row_can_yield_is_a_warning() -> None:
    owner = replace(target(LLAMA), eos_token_ids=(1, 64))
    (found,) = checks.check_target(owner)
    assert (found.code, found.severity, found.found) == ("SD207", "warning", "64")
    assert found.expected == "0 to 63"


@pytest.mark.parametrize(
    ("role", "shape"),
    [
        ("fc.weight", (16, 32)),
        ("layers.0.q_proj.weight", (24, 16)),
        ("layers.0.o_proj.weight", (24, 16)),
        ("layers.0.hidden_norm", (32,)),
        ("head", (64, 16)),
        ("norm", ()),
    ],
)
def test_each_wrong_shape_is_named_once(role: str, shape: tuple[int, ...]) -> None:
    read = draft(EAGLE3)
    wrong = replace(
        read,
        tensors={r: _reshaped(t, shape) if r == role else t for r, t in read.tensors.items()},
    )
    found = [d for d in checks.check_draft(wrong) if d.code == "SD503"]
    assert len(found) == 1
    assert read.tensors[role].key in found[0].where
    assert found[0].found == str(list(shape))


def _reshaped(ref: object, shape: tuple[int, ...]) -> object:
    import msgspec

    return msgspec.structs.replace(ref, shape=shape)  # type: ignore[type-var]


def test_padding_rows_of_an_own_embedding_are_allowed_and_fewer_rows_are_not() -> None:
    more = draft("speculators-eagle3-own-embedding")
    ref = more.tensors["embedding"]
    for rows, expected in ((80, []), (64, []), (60, ["SD503"])):
        edited = replace(more, tensors={**more.tensors, "embedding": _reshaped(ref, (rows, 10))})
        assert codes(checks.check_draft(edited)) == expected


def test_layer_ids_are_compared_with_the_targets_depth_in_their_own_numbering() -> None:
    owner = target(LLAMA)
    for numbering, shown in (("boundary", "9"), ("output", "8")):
        read = replace(draft(EAGLE3), aux_layer_ids=(1, 3, 8), aux_numbering=numbering)
        (found,) = checks.check_pair(read, owner)
        assert (found.code, found.found) == ("SD304", shown)
    below = replace(draft(EAGLE3), aux_layer_ids=(-2, 3, 4), declared_aux_ids=(-1, 4, 5))
    assert codes(checks.check_draft(below)) == ["SD304"]


def test_ids_of_no_known_numbering_are_compared_too() -> None:
    owner = target(LLAMA)
    assert owner.num_layers == 8
    undecided = replace(draft(EAGLE3), aux_layer_ids=None, aux_numbering=None)
    deep = replace(undecided, declared_aux_ids=(4, 6, 9))
    assert checks.check_draft(deep) == ()
    (found,) = checks.check_pair(deep, owner)
    assert (found.code, found.found) == ("SD304", "9")
    assert "at most 8 (boundary ids) or 7 (output ids)" in found.expected
    last = replace(undecided, declared_aux_ids=(4, 6, 8))
    assert checks.check_pair(last, owner) == ()
    assert codes(checks.check_draft(replace(undecided, declared_aux_ids=(3, 2, 5)))) == ["SD308"]
    assert codes(checks.check_draft(replace(undecided, declared_aux_ids=(-2, 3, 5)))) == ["SD304"]


def test_the_embedding_output_is_a_legal_state() -> None:
    read = replace(draft(EAGLE3), aux_layer_ids=(-1, 3, 4), declared_aux_ids=(0, 4, 5))
    assert checks.check_draft(read) == ()
    assert checks.check_pair(read, target(LLAMA)) == ()


def test_end_ids_of_the_target_are_checked_once() -> None:
    read, owner = draft(EAGLE3), replace(target(LLAMA), eos_token_ids=(1, 4))
    (found,) = checks.check_pair(read, owner)
    assert (found.code, found.severity) == ("SD406", "warning")
    assert "end id 4 of the target" in found.message


def test_a_draft_without_a_head_needs_a_target_of_its_width() -> None:
    read = draft("speculators-eagle3-wide-target", drop=("lm_head.weight",))
    assert "SD501" in codes(checks.check_pair(read, target("hf-llama-wide")))


@pytest.mark.parametrize(
    ("d2t", "t2d", "kind"),
    [
        ((0, 0, 1, 1), None, "offset"),
        ((0, 1, 3, 7), None, "absolute"),
        ((0, 1, 2, 3), None, "ambiguous"),
        ((0, 2, 4, 5), bytes([1, 0, 1, 0, 1, 1, 0, 0]), "absolute"),
        ((0, 1, 2, 4), bytes([1, 0, 1, 0, 1, 0, 0, 1]), "offset"),
        ((9, 9, 9, 9), None, "invalid"),
    ],
)
def test_how_a_stored_map_is_read(d2t: tuple[int, ...], t2d: bytes | None, kind: str) -> None:
    assert decide_map_encoding(d2t, t2d, 8).kind == kind


def test_an_absolute_map_that_only_fits_absolutely_needs_no_mask() -> None:
    found = decide_map_encoding((0, 1, 3, 7), None, 8)
    assert found.draft_to_target == (0, 1, 3, 7)


def test_role_helpers() -> None:
    assert generic_role("layers.12.q_proj.weight") == ("layers.{i}.q_proj.weight", 12)
    assert generic_role("fc_norm.2") == ("fc_norm.{i}", 2)
    assert generic_role("norm") == ("norm", None)
    assert find_role("layers.3.hidden_norm", EAGLE3_ROLES) is None
    assert dimension("H+2*M", {"H": 16, "M": 3}) == 22
    assert dimension("A*Ht", {"A": 3}) is None
    required = required_roles(
        EAGLE3_ROLES, conditions=frozenset({"fc_norm"}), num_layers=1, num_aux_states=3
    )
    assert {"fc_norm.0", "fc_norm.2", "layers.0.hidden_norm"} <= set(required)
    assert "embedding" not in required
