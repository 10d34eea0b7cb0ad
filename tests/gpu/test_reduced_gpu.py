"""Reduced heads on CUDA: bits of kept and named rows, and captured rounds with dynamic rows."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import kernels
from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from specctl.contract.codec import dump_manifest
from specctl.ops.emit_manifest import emit_manifest
from tests import real_model
from tests.engine_harness import prompt_of, reference_ids
from tests.fake_graph import ids_of, make_llm
from tests.kernels.ladder import adversarial, assert_rows_independent, same_bits
from tests.kernels.own_ids import Rings, make_round
from tests.tiny import EOS_ID, TOKENIZER_SIZE
from tests.tiny_last_state import Kind, last_state_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16]
HEADS = [(576, 49_152), (2048, 248_320), (4096, 151_936)]  # (K, rows)
DYNAMIC = {
    "map": {},
    "own": {"dynamic_rows": 6},
    "rank": {"dynamic_rank": 4},
    "both": {"dynamic_rows": 30, "dynamic_rank": 8},
}
HALF = (EOS_ID, *range(TOKENIZER_SIZE - 1, 3, -2))
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(50 + index, 2 + 9 * index),
        max_tokens=28,
        ignore_eos=True,
    )
    for index in range(6)
)


def head_of(features: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = adversarial(9, features, seed=1, dtype=dtype, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(2)
    weight = torch.randn((rows, features), generator=generator, device="cuda", dtype=dtype)
    return x, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "rows"), HEADS)
@pytest.mark.parametrize("size", [8_192, 16_384, 32_768, 65_536])
def test_kept_rows_have_the_bits_of_the_full_head(
    size: int, features: int, rows: int, dtype: torch.dtype
) -> None:
    if size >= rows:
        pytest.skip("no reduction")
    x, weight = head_of(features, rows, dtype)
    kept = torch.randperm(rows, generator=torch.Generator().manual_seed(3))[:size].to(CUDA)
    full = kernels.head_logits(x, weight)
    reduced = weight[kept]
    assert same_bits(kernels.head_logits(x, reduced), full[:, kept])
    for count in (1, 4, 9):
        ids, best = kernels.head_argmax(x[:count], reduced)
        assert same_bits(best, full[:count, kept].amax(dim=1))
        chosen = full[:count, kept].gather(1, ids[:, None]).squeeze(1)
        assert same_bits(chosen, best)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "rows"), HEADS)
@pytest.mark.parametrize("num_named", [1, 64, 200])
def test_named_rows_have_the_bits_of_the_full_head(
    num_named: int, features: int, rows: int, dtype: torch.dtype
) -> None:
    x, weight = head_of(features, rows, dtype)
    generator = torch.Generator().manual_seed(4)
    named = torch.randint(0, rows, (9, num_named), generator=generator)
    named[3, num_named // 2 :] = -1
    named[5] = -1
    named = named.to(CUDA)
    rows_of = functools.partial(kernels.NamedRows, weight_VD=weight)
    ids, best = kernels.head_rows_argmax(x, rows_of(ids_SE=named))
    full = kernels.head_logits(x, weight)
    logits = full.gather(1, named.clamp(min=0)).masked_fill(named < 0, float("-inf"))
    assert same_bits(best, logits.amax(dim=1))
    has_any = best > float("-inf")
    lowest = torch.where(logits == best[:, None], named, rows).amin(dim=1)
    assert torch.equal(ids[has_any], lowest[has_any])
    assert not has_any[5]
    assert_rows_independent(
        lambda rows_x, ids_SE: kernels.head_rows_argmax(rows_x, rows_of(ids_SE=ids_SE)),
        (x, named),
        (1, 2, 5, 9),
        seed=5,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "rows"), HEADS)
@pytest.mark.parametrize(("num_own", "num_more"), [(1, 0), (64, 0), (64, 64), (0, 64), (0, 0)])
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_a_head_beside_named_rows_chooses_as_one_head_of_both(
    is_normed: bool, num_own: int, num_more: int, features: int, rows: int, dtype: torch.dtype
) -> None:
    x, weight = head_of(features, rows, dtype)
    norm = None
    if is_normed:
        norm = kernels.RowNorm(weight_D=torch.ones_like(weight[0]), eps=1e-5)
    generator = torch.Generator().manual_seed(6)
    names = torch.randperm(rows, generator=generator)[:8_192].to(CUDA)
    own = torch.randint(0, rows, (5, num_own), generator=generator)
    own[2, num_own // 2 :] = -1
    more = torch.randint(0, rows, (9, num_more), generator=generator).to(CUDA)
    slots = torch.tensor([3, 0, 2, 4, 1, 2, 2, 0, 4], device=CUDA)
    named = kernels.NamedRows(
        weight_VD=weight, ids_SE=own.to(CUDA), slots_M=slots, more_ids_MC=more if num_more else None
    )
    full = kernels.head_logits(x, weight, norm)
    is_allowed = torch.zeros(9, rows + 1, dtype=torch.bool, device=CUDA)
    is_allowed[:, names] = True
    is_allowed.scatter_(1, named.ids().where(named.ids() >= 0, rows), True)
    logits = full.masked_fill(~is_allowed[:, :rows], float("-inf"))
    best = logits.amax(dim=1)
    wide = torch.zeros((9, 3), dtype=torch.int64, device=CUDA)
    forms = [x] if norm is None else [x, kernels.enter_stream(x, norm.weight_D)]
    for form in forms:
        ids, found = kernels.joint_head_argmax(
            form, weight[names], named, norm, names_R=names, copy_M=wide[:, 1]
        )
        assert same_bits(found, best)
        assert same_bits(logits.gather(1, ids[:, None]).squeeze(1), best)
        assert torch.equal(wide[:, 1], ids)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("num_places", [1, 3, 64, 2_048])
@pytest.mark.parametrize("width", [1, 4, 9])
def test_own_ids_are_kept_as_by_the_twin(width: int, num_places: int, is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    found, expected = Rings.empty(num_places, "cuda"), Rings.empty(num_places)
    for _ in range(12):
        told = make_round(width, is_packed=is_packed, generator=generator)
        told.keep(kernels.keep_own_ids, found)
        told.keep(kernels.keep_own_ids, expected)
        assert torch.equal(found.ids_SE.cpu(), expected.ids_SE)
        assert torch.equal(found.counts_S.cpu(), expected.counts_S)
    assert expected.counts_S.max() > 1


@pytest.mark.parametrize("dynamic", DYNAMIC)
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_captured_rounds_draft_as_eager_ones(tmp_path: Path, kind: Kind, dynamic: str) -> None:
    world = last_state_world(tmp_path, kind, token_map=HALF, device=CUDA, dtype=torch.bfloat16)
    settings: dict[str, Any] = {
        "proposer": kind, "num_speculative_tokens": 4, "max_num_requests": 3, **DYNAMIC[dynamic]
    }  # fmt: skip
    eager, _ = make_llm(world, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(world, is_eager=True, graphs="auto", **settings)
    assert captured.engine.graph_report.num_graphs > 0
    expected, found = eager.generate(REQUESTS), captured.generate(REQUESTS)
    references = {request.request_id: reference_ids(world, request) for request in REQUESTS}
    assert ids_of(found) == ids_of(expected) == references
    assert captured.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    assert captured.engine.stats().num_device_rounds > 0


@pytest.mark.parametrize("dynamic", ["map", "both"])
def test_smollm2_with_its_map_gives_the_targets_text(tmp_path: Path, dynamic: str) -> None:
    draft = real_model.shared_draft("smollm2-135m-mtp")
    prompts, _ = real_model.first_eight()
    answers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, token_map in (("full", None), ("reduced", draft / "token_map_8192.json")):
        manifest = emit_manifest(
            str(real_model.target()),
            str(draft),
            manifest_dir=tmp_path,
            num_speculative_tokens=3,
            token_map=None if token_map is None else str(token_map),
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(dump_manifest(manifest), encoding="utf-8")
        given = DYNAMIC[dynamic] if token_map is not None else {}
        for arm, overrides in (("none", {"proposer": "none"}), (name, given)):
            llm = LLM.from_manifest(
                path,
                Overrides(device="cuda", max_num_requests=8, **overrides),  # type: ignore[arg-type]
            )
            answers[arm] = ids_of(real_model.answer(llm, prompts))
            (tmp_path / f"{arm}.json").write_text(json.dumps(answers[arm]), encoding="utf-8")
    assert answers["full"] == answers["none"]
    assert answers["reduced"] == answers["none"]
