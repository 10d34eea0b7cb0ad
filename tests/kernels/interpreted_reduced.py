"""Heads of fewer rows and the rows beside them under the interpreter; see `interpreted.py`."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.kernels import NamedRows, RowNorm
from runtime.kernels.cuda import head, head_rows, own_ids, stream
from runtime.kernels.head_rows import head_rows_argmax_twin, joint_head_argmax_twin
from runtime.kernels.own_ids import keep_own_ids_twin
from tests.kernels.ladder import adversarial, plain, same_bits
from tests.kernels.own_ids import PADDING, Rings, make_round

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

DTYPES = [torch.float32, torch.float16]


def test_a_reduced_head_has_the_bits_of_the_full_one() -> None:
    x = adversarial(3, 40, seed=1, dtype=torch.float32)
    weight = adversarial(70, 40, seed=2, dtype=torch.float32)
    kept = torch.tensor([1, 8, 9, 40, 69])
    full = head.launch_head_logits(x, weight)
    assert same_bits(head.launch_head_logits(x, weight[kept]), full[:, kept])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_named_rows_have_the_bits_of_the_full_head(dtype: torch.dtype) -> None:
    x = adversarial(4, 40, seed=1, dtype=dtype)
    weight = adversarial(70, 40, seed=2, dtype=dtype)
    ids = torch.randint(0, 70, (4, 37), generator=torch.Generator().manual_seed(3))
    ids[1, 5:] = -1
    ids[2] = -1
    found, logits = head_rows.launch_head_rows_argmax(x, NamedRows(weight_VD=weight, ids_SE=ids))
    full = head.launch_head_logits(x, weight)
    for m in (0, 1, 3):
        named = ids[m][ids[m] >= 0]
        assert same_bits(logits[m : m + 1], full[m, named].max()[None])
        assert int(found[m]) == int(named[full[m, named] == logits[m]].min())
    assert logits[2] == float("-inf")
    twin = head_rows_argmax_twin(x, NamedRows(weight_VD=weight, ids_SE=ids))
    assert torch.equal(found[[0, 1, 3]], twin[0][[0, 1, 3]])


def test_named_rows_ties_and_nan() -> None:
    weight = torch.ones(9, 16)
    weight[4] = float("nan")
    ids = torch.tensor([[7, 3, 5], [4, -1, -1], [4, 8, -1]])
    named = NamedRows(weight_VD=weight, ids_SE=ids)
    found, logits = head_rows.launch_head_rows_argmax(torch.ones(3, 16), named)
    assert found.tolist()[::2] == [3, 8]
    assert logits.tolist() == [16.0, float("-inf"), 16.0]
    nothing = NamedRows(weight_VD=weight, ids_SE=ids[:, :0])
    _, logits = head_rows.launch_head_rows_argmax(torch.ones(3, 16), nothing)
    assert logits.tolist() == [float("-inf")] * 3


def named_of(weight: torch.Tensor, num_own: int, num_more: int | None) -> NamedRows:
    """Return rows that four input rows name by three slots, and some for themselves."""
    generator = torch.Generator().manual_seed(num_own)
    ids = torch.randint(0, weight.shape[0], (3, num_own), generator=generator)
    ids[1, num_own // 3 :] = -1
    ids[2] = -1
    more = None
    if num_more is not None:
        more = torch.randint(0, weight.shape[0], (4, num_more), generator=generator)
    slots = torch.tensor([1, 0, 2, 0])
    return NamedRows(weight_VD=weight, ids_SE=ids, slots_M=slots, more_ids_MC=more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("num_own", "num_more"), [(1, None), (45, None), (0, 5), (7, 38), (0, 0)])
def test_a_head_beside_named_rows(
    num_own: int, num_more: int | None, is_normed: bool, dtype: torch.dtype
) -> None:
    x, weight = (plain(rows, 40, seed=rows, dtype=dtype) for rows in (4, 70))
    # Not ascending; as few that named rows win often.
    names = torch.tensor([60, 3, 8, 9, 40, 69, 2])
    norm = RowNorm(weight_D=plain(40, seed=4, dtype=dtype), eps=1e-5) if is_normed else None
    named = named_of(weight, num_own, num_more)
    full = head.launch_head_logits(x, weight, norm)
    allowed = torch.zeros(4, 70, dtype=torch.bool)
    allowed[:, names] = True
    for m, ids in enumerate(named.ids()):
        allowed[m, ids[ids >= 0]] = True
    expected, best = full.masked_fill(~allowed, float("-inf")).max(dim=1)[::-1]
    forms = [x] if norm is None else [x, stream.launch_enter_stream(x, norm.weight_D)]
    for rows in forms:
        wide = torch.full((4, 3), -1)
        found, logits = head_rows.launch_joint_head_argmax(
            rows, weight[names], named, norm, names_R=names, copy_M=wide[:, 1]
        )
        assert same_bits(logits, best)
        assert torch.equal(found, expected)
        assert torch.equal(wide, torch.stack([found * 0 - 1, found, found * 0 - 1], dim=1))
        twin, _ = joint_head_argmax_twin(rows, weight[names], named, norm, names_R=names)
        assert torch.equal(found, twin)


def test_a_head_beside_named_rows_ties_and_nan() -> None:
    """Equal logits go to the lowest id, nothing but NaN to the head's own first row."""
    weight = torch.ones(90, 16)
    weight[7] = float("nan")
    names = torch.tensor([50, 40])  # the head takes its first row: ids of its own decide there
    ids = torch.tensor([[60, 45, 46, -1], [70, 51, -1, -1], [7, 7, -1, -1], [-1, -1, -1, -1]])
    named = NamedRows(weight_VD=weight, ids_SE=ids, slots_M=torch.tensor([0, 1, 2, 3]))
    for value, expected in ((1.0, [45, 50, 50, 50]), (float("nan"), [50] * 4)):
        arguments = (torch.full((4, 16), value), weight[names], named)
        found, logits = head_rows.launch_joint_head_argmax(*arguments, names_R=names)
        twin, twin_logits = joint_head_argmax_twin(*arguments, names_R=names)
        assert found.tolist() == twin.tolist() == expected
        if value == value:
            assert torch.equal(logits, twin_logits)
        else:
            assert logits.tolist() == [float("-inf")] * 4


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("width", "num_places"), [(1, 1), (2, 64), (4, 3), (9, 2), (9, 300)])
def test_own_ids_are_kept(width: int, num_places: int, is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    found, expected = Rings.empty(num_places), Rings.empty(num_places)
    for _ in range(6):
        told = make_round(width, is_packed=is_packed, generator=generator)
        told.keep(own_ids.launch_keep_own_ids, found)
        told.keep(keep_own_ids_twin, expected)
        assert torch.equal(found.ids_SE, expected.ids_SE)
        assert torch.equal(found.counts_S, expected.counts_S)
    assert found.counts_S.max() > 1
    assert found.ids_SE[PADDING].eq(-1).all()
