"""Checks of tensor shapes and dtypes against the role table of the contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specctl.checkpoint import WEIGHT_DTYPES, tensor_place
from specctl.checks.quantization import PACKED_DTYPES, QUANTISED_DTYPES
from specctl.contract.diagnostics import Diagnostic, Severity, diagnose
from specctl.contract.manifest import Decoder, TensorRef
from specctl.contract.roles import (
    MAP_ROLES,
    TARGET_ROLES,
    TensorRole,
    dimension,
    find_role,
    generic_role,
)
from specctl.draft import DraftCheckpoint, TargetCheckpoint


def check_target_tensors(target: TargetCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD503 and SD508 for a target."""
    sizes: dict[str, int] = {}
    if target.declared_vocab_size is not None:
        sizes["V"] = target.declared_vocab_size
    if target.decoder is not None:
        sizes |= _layer_sizes(target.decoder) | {"X": target.decoder.hidden_size}
    yield from _check(target.tensors, TARGET_ROLES, sizes, sizes)


def check_draft_tensors(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD503 and SD508 for a draft."""
    sizes: dict[str, int] = {}
    if draft.decoder is not None:
        hidden = draft.decoder.hidden_size
        sizes |= _layer_sizes(draft.decoder) | {"X": hidden, "C": hidden}
    markov_size = draft.markov.rank if draft.markov is not None else 0
    known = {
        "Ht": draft.target_hidden_size,
        "A": draft.num_aux_states,
        "V": draft.target_vocab_size,
        "R": draft.draft_vocab_size,
        "M": markov_size or None,
    }
    sizes |= {symbol: size for symbol, size in known.items() if size is not None}
    if "C" in sizes and draft.is_confidence_with_markov:
        sizes["C"] += markov_size
    sizes |= draft.sizes
    first = dict(sizes)
    if "X0" in sizes:
        first["X"] = sizes["X0"]
    elif draft.algorithm == "eagle3" and "H" in sizes:
        first["X"] = 2 * sizes["H"]  # (embedding, state) side by side
    yield from _check(draft.tensors, draft.roles, first, sizes)


def _layer_sizes(decoder: Decoder) -> dict[str, int]:
    return {
        "H": decoder.hidden_size,
        "Q": decoder.num_attention_heads * decoder.head_dim,
        "KV": decoder.num_kv_heads * decoder.head_dim,
        "P": decoder.head_dim,
        "I": decoder.intermediate_size,
    }


def _check(
    tensors: Mapping[str, TensorRef],
    roles: tuple[TensorRole, ...],
    first_layer: Mapping[str, int],
    other: Mapping[str, int],
) -> Iterator[Diagnostic]:
    quantised: list[TensorRef] = []
    for role, ref in tensors.items():
        entry = find_role(role, roles)
        if entry is None or role in MAP_ROLES:
            continue  # lengths and dtypes are the vocabulary checks' and the reader's
        if ref.dtype in QUANTISED_DTYPES:
            quantised.append(ref)
        elif ref.dtype not in WEIGHT_DTYPES:
            yield _wrong_dtype(ref, f"`{ref.key}` is stored as {ref.dtype}")
        if ref.dtype in PACKED_DTYPES:
            continue  # two elements in a byte: the stored shape is not the weight's
        name, index = generic_role(role)
        is_first = name.startswith("layers.") and index == 0
        yield from _check_shape(
            ref,
            entry,
            first_layer if is_first else other,
            # A draft's own embedding may have padding rows; a target's config must say its rows.
            is_padded_allowed=roles is not TARGET_ROLES,
        )
    if quantised:
        text = f"{len(quantised)} weights are stored quantised, such as `{quantised[0].key}`"
        yield _wrong_dtype(quantised[0], text, severity="info")


def _wrong_dtype(ref: TensorRef, message: str, *, severity: Severity = "error") -> Diagnostic:
    return diagnose(
        "SD508",
        where=tensor_place(ref),
        message=message,
        expected=" or ".join(WEIGHT_DTYPES),
        found=ref.dtype,
        severity=severity,
    )


def _check_shape(
    ref: TensorRef, entry: TensorRole, sizes: Mapping[str, int], *, is_padded_allowed: bool
) -> Iterator[Diagnostic]:
    expected = [dimension(symbol, sizes) for symbol in entry.shape]
    found = list(ref.shape)
    rows = expected[0]
    if is_padded_allowed and entry.name == "embedding" and rows is not None and found:
        found[0] = min(found[0], rows)
    is_right = len(expected) == len(found) and all(
        want is None or want == have for want, have in zip(expected, found, strict=True)
    )
    if is_right:
        return
    want = ", ".join("?" if size is None else str(size) for size in expected)
    yield diagnose(
        "SD503",
        where=tensor_place(ref),
        message=f"`{ref.key}` is {list(ref.shape)}; the config gives [{want}] "
        f"({' x '.join(entry.shape)})",
        expected=f"[{want}]",
        found=list(ref.shape),
    )
