"""Comparisons of ladder steps 2 and 3, for any device: rows of a large batch against single rows.

Each function returns what differed, so that tests read `assert ... == []` and the negative control
reads `assert ... != []`. Equality is `torch.equal` throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import Stream, enter_stream
from runtime.models import Eagle3Model, TargetModel
from runtime.models.layers import DecoderLayer, rope_table
from specctl.contract.manifest import Decoder, Rope
from specctl.contract.roles import LAYER_ROLES, dimension
from tests.paged import Paged, Span
from tests.tiny import TOKENIZER_SIZE, Sizes

MOST = 64  # rows of the largest verify batch
TAPS = (0, 3)
SMOLLM2 = Sizes(hidden=576, heads=9, kv_heads=3, head_dim=64, inner=1536)


def verify_mismatches(
    model: TargetModel, *, prefix: int, row_counts: Sequence[int], is_poisoned: bool = False
) -> list[int]:
    """Return the M for which verify rows mixed with two other requests differ from single steps.

    Compares logits and captured states at positions prefix .. prefix + M - 1.
    """
    ids = random_ids(prefix + MOST, seed=1)
    alone = _fresh(model, prefix)
    _prefill(model, alone, ids[:prefix])
    last = prefix + max(row_counts)
    steps = [_target_rows(model, alone, ids, p, 1) for p in range(prefix, last)]
    expected = torch.cat(steps)
    found = []
    for num_rows in row_counts:
        paged = _fresh(model, prefix, is_poisoned=is_poisoned)
        _prefill(model, paged, ids[:prefix])
        rows = _target_rows(model, paged, ids, prefix, num_rows, seed=num_rows)
        if not torch.equal(rows, expected[:num_rows]):
            found.append(num_rows)
    return found


def prefill_mismatches(model: TargetModel, *, chunks: Sequence[int], length: int) -> list[int]:
    """Return the chunk sizes whose states or cache differ from those of single steps."""
    ids = random_ids(length, seed=2)
    alone = _fresh(model, length)
    expected = torch.cat([_prefill(model, alone, ids[p : p + 1], start=p) for p in range(length)])
    found = []
    for chunk in chunks:
        paged = _fresh(model, length)
        states = torch.cat(
            [_prefill(model, paged, ids[p : p + chunk], start=p) for p in range(0, length, chunk)]
        )
        pairs = zip(paged.pool.layers, alone.pool.layers, strict=True)
        is_same_cache = all(torch.equal(a.k, b.k) and torch.equal(a.v, b.v) for a, b in pairs)
        if not (is_same_cache and torch.equal(states, expected)):
            found.append(chunk)
    return found


def draft_mismatches(draft: Eagle3Model, *, chunks: Sequence[int]) -> list[int]:
    """Return the chunk sizes whose feedback or logits differ from those of single entries."""
    embedding = draft.embedding_VH
    width = draft.fusion.weight.shape[1]
    aux = torch.randn(MOST, width, generator=torch.Generator().manual_seed(3))
    aux = aux.to(dtype=embedding.dtype, device=embedding.device)
    ids = random_ids(MOST, seed=3)
    alone = _draft_rows(draft, ids, aux, chunk=1)
    return [
        chunk
        for chunk in chunks
        if not torch.equal(_draft_rows(draft, ids, aux, chunk=chunk), alone)
    ]


def layer_mismatches(
    dtype: torch.dtype, device: torch.device, *, row_counts: Sequence[int]
) -> list[int]:
    """Return the M for which a random layer of SmolLM2's size differs from single rows."""
    layer, table = _random_layer(dtype, device)
    prefix = 20
    x = torch.randn(prefix + max(row_counts), 576, generator=torch.Generator().manual_seed(6))
    x = x.to(dtype=dtype, device=device)
    alone = _run_layer(layer, table, x, chunks=[1] * len(x))
    return [
        count
        for count in row_counts
        if not torch.equal(
            _run_layer(layer, table, x, chunks=[prefix, count]), alone[: prefix + count]
        )
    ]


def row_dependent_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    most_whole: int = 1,
) -> torch.Tensor:
    """Multiply with a K split that follows the row count: the negative control.

    Up to `most_whole` rows are summed whole, more in two halves, as engines do that split by
    occupancy. The vendor library alone is no control: at SmolLM2's shapes it gave equal rows for M
    in 1..64.
    """
    splits = 1 if x_MK.shape[0] <= most_whole else 2
    parts = zip(x_MK.chunk(splits, dim=1), weight_NK.chunk(splits, dim=1), strict=True)
    out = sum((x.float() @ w.float().t() for x, w in parts), start=torch.zeros(()).to(x_MK.device))
    out = out if bias_N is None else out + bias_N.float()
    return out.to(x_MK.dtype if out_dtype is None else out_dtype)


RESIDUAL_LINEAR = "runtime.models.layers.ranked.residual_linear"
"""Where dense layers call the product that `row_dependent_residual_linear` stands in for."""


def row_dependent_residual_linear(
    x_MK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    *,
    residual_MD: torch.Tensor,
    norm_D: torch.Tensor,
    out_MD: torch.Tensor | None = None,
    most_whole: int = 1,
) -> Stream:
    """Add `row_dependent_linear` to the stream: the negative control of dense layers."""
    product = row_dependent_linear(
        x_MK, weight_DK, bias_D, out_dtype=torch.float32, most_whole=most_whole
    )
    stream_MD = (product + residual_MD.float()).to(residual_MD.dtype)
    return enter_stream(stream_MD if out_MD is None else out_MD.copy_(stream_MD), norm_D)


def random_ids(count: int, *, seed: int) -> list[int]:
    """Return token ids of the tiny tokenizer without specials."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, TOKENIZER_SIZE, (count,), generator=generator).tolist()
    return ids


def _fresh(model: TargetModel, prefix: int, *, is_poisoned: bool = False) -> Paged:
    return Paged(
        model.kv_specs,
        num_requests=3,
        max_length=prefix + MOST,
        dtype=model.dtype,
        device=model.device,
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
) -> torch.Tensor:
    """Return logits and captured states of request 0's rows; a seed mixes two requests in."""
    spans = [Span(request=0, start=start, ids=ids[start : start + num_rows])]
    if seed is not None:
        spans += _other_spans(seed)
    batch, mine = _interleave(paged, spans, seed)
    out = model.forward(batch, paged.pool.layers, TAPS)
    assert out.aux_hidden_NA is not None
    return torch.cat((model.logits(out.hidden_ND[mine]), out.aux_hidden_NA[mine].float()), dim=1)


def _other_spans(seed: int) -> Iterator[Span]:
    generator = torch.Generator().manual_seed(seed)
    for request in (1, 2):
        length = int(torch.randint(1, 12, (1,), generator=generator))
        yield Span(request=request, start=0, ids=random_ids(length, seed=seed + request))


def _interleave(
    paged: Paged, spans: list[Span], seed: int | None
) -> tuple[PreparedBatch, torch.Tensor]:
    """Return a batch, rows in random order of owners when seeded, and the rows of request 0."""
    owners = torch.cat([torch.full((len(span.ids),), span.request) for span in spans])
    order = None
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        shuffled = owners[torch.randperm(len(owners), generator=generator)]
        order = torch.empty(len(owners), dtype=torch.int64)
        for request in owners.unique():
            order[shuffled == request] = (owners == request).nonzero().flatten()
        owners = shuffled
    mine = (owners == 0).nonzero().flatten().to(paged.device)
    return paged.batch(spans, order=order), mine


def _draft_rows(
    draft: Eagle3Model, ids: list[int], aux: torch.Tensor, *, chunk: int
) -> torch.Tensor:
    paged = Paged(
        draft.kv_specs, num_requests=1, max_length=MOST, dtype=aux.dtype, device=aux.device
    )
    rows = []
    for start in range(0, MOST, chunk):
        part = slice(start, start + chunk)
        batch = paged.batch([Span(request=0, start=start, ids=ids[part])])
        hidden = draft.forward(batch, draft.fuse(aux[part]), paged.pool.layers)
        rows.append(torch.cat((hidden.feedback_NH.float(), draft.logits(hidden.head_input_NH)), 1))
    return torch.cat(rows)


def _random_layer(dtype: torch.dtype, device: torch.device) -> tuple[DecoderLayer, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {"H": 576, "X": 576, "Q": 576, "KV": 192, "I": 1536, "P": 64}
    shapes = {role.name.removeprefix("layers.{i}."): role.shape for role in LAYER_ROLES}

    def take(role: str) -> torch.Tensor:
        shape = [size for symbol in shapes[role] if (size := dimension(symbol, sizes))]
        value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return (value if len(shape) == 2 else 1 + value).to(dtype=dtype, device=device)

    decoder = Decoder(
        family="llama",
        hidden_size=SMOLLM2.hidden,
        intermediate_size=SMOLLM2.inner,
        num_layers=1,
        num_attention_heads=SMOLLM2.heads,
        num_kv_heads=SMOLLM2.kv_heads,
        head_dim=SMOLLM2.head_dim,
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
    table = rope_table(decoder.rope, head_dim=64, num_positions=256, device=device)
    return DecoderLayer.build(decoder, take, layer_index=0), table


def _run_layer(
    layer: DecoderLayer, table: torch.Tensor, x: torch.Tensor, *, chunks: list[int]
) -> torch.Tensor:
    paged = Paged(
        [layer.attention.kv_spec],
        num_requests=1,
        max_length=len(x),
        dtype=x.dtype,
        device=x.device,
    )
    out, start = [], 0
    for size in chunks:
        part = x[start : start + size]
        batch = paged.batch([Span(request=0, start=start, ids=[0] * size)])
        stream = layer.advance(
            enter_stream(part, layer.input_norm),
            batch,
            paged.pool.layers[0],
            table,
            next_norm_D=layer.input_norm,
        )
        out.append(stream.residual_MD)
        start += size
    return torch.cat(out)
