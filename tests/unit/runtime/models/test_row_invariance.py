"""Ladder steps 2 and 3 on the CPU: a row's bits do not depend on the rows beside it.

Every comparison is `torch.equal`. The negative control swaps the matrix product for the library's
and must break the equality, which shows that these tests can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from runtime.batch import PreparedBatch
from runtime.models import Eagle3Model, TargetModel
from runtime.models.layers import DecoderLayer, rope_table
from specctl.contract.manifest import Decoder, Rope
from specctl.contract.roles import LAYER_ROLES, dimension
from tests.paged import Paged, Span
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import load_tiny, tiny_manifest

DTYPES = [torch.float32, torch.bfloat16]
PREFIX, MOST = 29, 64
TAPS = (0, 3)

SMOLLM2 = Decoder(
    family="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=1,
    num_attention_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
    has_qk_norm=False,
    rope=Rope(theta=100000.0),
    max_position_embeddings=256,
    layer_types=("full_attention",),
    sliding_window=None,
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("invariance")
    target = write_tiny_target(root / "target", "qwen3")
    return target, write_tiny_eagle3(root / "draft", target, num_layers=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_equal_single_steps(directories: tuple[Path, Path], dtype: torch.dtype) -> None:
    """Whole-model logits and captured states, M rows in a mixed batch against M single steps."""
    model = load_tiny(tiny_manifest(directories[0]), dtype=dtype).target
    ids = _ids(PREFIX + MOST, seed=1)
    alone = _fresh(model)
    _prefill(model, alone, ids[:PREFIX])
    steps = [_target_rows(model, alone, ids, p, 1) for p in range(PREFIX, PREFIX + MOST)]
    logits, aux = (torch.cat(parts) for parts in zip(*steps, strict=True))
    for num_rows in range(1, MOST + 1):
        paged = _fresh(model)
        _prefill(model, paged, ids[:PREFIX])
        found = _target_rows(model, paged, ids, PREFIX, num_rows, seed=num_rows)
        assert torch.equal(found[0], logits[:num_rows]), num_rows
        assert torch.equal(found[1], aux[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_rows_equal_single_steps(
    directories: tuple[Path, Path], dtype: torch.dtype
) -> None:
    """Prefill in chunks of any size leaves the same states and the same cache as single steps."""
    model = load_tiny(tiny_manifest(directories[0]), dtype=dtype).target
    ids = _ids(MOST, seed=2)
    alone = _fresh(model)
    expected = [_prefill(model, alone, ids[p : p + 1], start=p) for p in range(MOST)]
    for chunk in (7, 16, 33, MOST):
        paged = _fresh(model)
        found = [_prefill(model, paged, ids[p : p + chunk], start=p) for p in range(0, MOST, chunk)]
        assert torch.equal(torch.cat(found), torch.cat(expected)), chunk
        for layer, other in zip(paged.pool.layers, alone.pool.layers, strict=True):
            assert torch.equal(layer.k, other.k), chunk
            assert torch.equal(layer.v, other.v), chunk


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draft_rows_equal_single_steps(directories: tuple[Path, Path], dtype: torch.dtype) -> None:
    draft = load_tiny(tiny_manifest(*directories), dtype=dtype).draft
    assert draft is not None
    width = draft.fusion.weight.shape[1]
    aux = torch.randn(MOST, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    ids = _ids(MOST, seed=3)
    alone = _draft_rows(draft, ids, aux, chunk=1)
    for chunk in (2, 5, 16, 17, MOST):
        assert torch.equal(_draft_rows(draft, ids, aux, chunk=chunk), alone), chunk


def test_free_blocks_may_hold_nan(directories: tuple[Path, Path]) -> None:
    model = load_tiny(tiny_manifest(directories[0])).target
    ids = _ids(PREFIX + 8, seed=4)
    results = []
    for is_poisoned in (False, True):
        paged = _fresh(model, is_poisoned=is_poisoned)
        _prefill(model, paged, ids[:PREFIX])
        results.append(_target_rows(model, paged, ids, PREFIX, 8)[0])
    assert not bool(results[1].isnan().any())
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_of_real_size_is_row_invariant(dtype: torch.dtype) -> None:
    assert _layer_mismatches(dtype) == []


def test_negative_control_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's matrix product the same comparison finds differing rows."""
    for module in ("attention", "mlp"):
        monkeypatch.setattr(f"runtime.models.layers.{module}.linear", functional.linear)
    assert _layer_mismatches(torch.float32) != []


def _layer_mismatches(dtype: torch.dtype) -> list[int]:
    """Return the row counts for which a SmolLM2-sized layer differs from single rows."""
    layer, table = _random_layer(dtype)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(PREFIX + 24, SMOLLM2.hidden_size, generator=generator).to(dtype)
    alone = _run_layer(layer, table, x, chunks=[1] * len(x))
    sizes = (2, 3, 5, 8, 16, 24)
    return [
        size
        for size in sizes
        if not torch.equal(
            _run_layer(layer, table, x, chunks=[PREFIX, size]), alone[: PREFIX + size]
        )
    ]


def _random_layer(dtype: torch.dtype) -> tuple[DecoderLayer, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {"H": 576, "X": 576, "Q": 576, "KV": 192, "I": 1536, "P": 64}
    shapes = {role.name.removeprefix("layers.{i}."): role.shape for role in LAYER_ROLES}

    def take(role: str) -> torch.Tensor:
        shape = [size for symbol in shapes[role] if (size := dimension(symbol, sizes))]
        value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return (value if len(shape) == 2 else 1 + value).to(dtype)

    layer = DecoderLayer.build(SMOLLM2, take, layer_index=0)
    device = torch.device("cpu")
    return layer, rope_table(SMOLLM2.rope, head_dim=64, num_positions=256, device=device)


def _run_layer(
    layer: DecoderLayer, table: torch.Tensor, x: torch.Tensor, *, chunks: list[int]
) -> torch.Tensor:
    paged = Paged([layer.attention.kv_spec], num_requests=1, max_length=len(x), dtype=x.dtype)
    out, start = [], 0
    for size in chunks:
        part = x[start : start + size]
        batch = paged.batch([Span(request=0, start=start, ids=[0] * size)])
        delta, residual = layer.forward(part, part, batch, paged.pool.layers[0], table)
        out.append(delta + residual)
        start += size
    return torch.cat(out)


def _fresh(model: TargetModel, *, is_poisoned: bool = False) -> Paged:
    return Paged(
        model.kv_specs,
        num_requests=3,
        max_length=PREFIX + MOST,
        dtype=model.dtype,
        is_poisoned=is_poisoned,
    )


def _prefill(model: TargetModel, paged: Paged, ids: list[int], *, start: int = 0) -> torch.Tensor:
    batch = paged.batch([Span(request=0, start=start, ids=ids)])
    return model.forward(batch, paged.pool.layers).hidden_ND


def _target_rows(
    model: TargetModel,
    paged: Paged,
    ids: list[int],
    start: int,
    num_rows: int,
    *,
    seed: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and captured states of request 0's rows; a seed mixes two requests in."""
    mine = Span(request=0, start=start, ids=ids[start : start + num_rows])
    others = [] if seed is None else list(_other_spans(seed))
    batch, is_mine = _interleave(paged, [mine, *others], seed)
    out = model.forward(batch, paged.pool.layers, TAPS)
    assert out.aux_hidden_NA is not None
    return model.logits(out.hidden_ND[is_mine]), out.aux_hidden_NA[is_mine]


def _other_spans(seed: int) -> Iterator[Span]:
    generator = torch.Generator().manual_seed(seed)
    for request in (1, 2):
        length = int(torch.randint(1, 12, (1,), generator=generator))
        yield Span(request=request, start=0, ids=_ids(length, seed=seed + request))


def _interleave(
    paged: Paged, spans: list[Span], seed: int | None
) -> tuple[PreparedBatch, torch.Tensor]:
    owners = torch.cat([torch.full((len(span.ids),), span.request) for span in spans])
    order = None
    if seed is not None:
        # A random order of owners; the rows of each stay ascending.
        shuffled = owners[
            torch.randperm(len(owners), generator=torch.Generator().manual_seed(seed))
        ]
        order = torch.empty(len(owners), dtype=torch.int64)
        for request in owners.unique():
            order[shuffled == request] = (owners == request).nonzero().flatten()
        owners = shuffled
    return paged.batch(spans, order=order), (owners == 0).nonzero().flatten()


def _draft_rows(
    draft: Eagle3Model, ids: list[int], aux: torch.Tensor, *, chunk: int
) -> torch.Tensor:
    paged = Paged(draft.kv_specs, num_requests=1, max_length=MOST, dtype=aux.dtype)
    rows = []
    for start in range(0, MOST, chunk):
        part = slice(start, start + chunk)
        batch = paged.batch([Span(request=0, start=start, ids=ids[part])])
        hidden = draft.forward(batch, draft.fuse(aux[part]), paged.pool.layers)
        rows.append(torch.cat((hidden.feedback_NH.float(), draft.logits(hidden.head_input_NH)), 1))
    return torch.cat(rows)


def _ids(count: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 99, (count,), generator=generator).tolist()
