"""The shape of a stack of decoder layers, from a config and the tensors' shapes.

Invariants: the layer count comes from the tensors; `head_dim` comes from the q projection's rows
when the config has none (a config without it may mean another value than hidden / heads: EAGLE
issue 315); biases and q/k norms are what the file stores.
"""

from __future__ import annotations

from collections.abc import Mapping

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.manifest import HIDDEN_ACTS, Decoder, TensorRef
from specctl.contract.roles import TensorRole, generic_role
from specctl.formats.assemble import is_whole, main_file
from specctl.formats.fields import Fields
from specctl.formats.model_types import Family
from specctl.formats.names import Matched, NameTable
from specctl.formats.rope import read_rope

MAX_LAYERS = 1000  # a config of one line must not make a table of a billion missing tensors
LAYER_TYPES = ("full_attention", "sliding_attention")


def count_layers(tensors: Mapping[str, TensorRef]) -> int:
    """Return one more than the highest layer index, at most `MAX_LAYERS`; 0 without layers."""
    pairs = [generic_role(role) for role in tensors]
    indexes = [i for name, i in pairs if i is not None and name.startswith("layers.")]
    return min(max(indexes, default=-1) + 1, MAX_LAYERS)


def layer_conditions(
    tensors: Mapping[str, TensorRef], fields: Fields, family: Family
) -> frozenset[str]:
    """Return which optional parts of a layer the file must hold, as `when` words of the role table.

    A part exists when any layer stores it, or when config or family say so; a stored bias that the
    config denies is SD506.
    """
    present = {generic_role(role)[0] for role in tensors}
    qkv = {f"layers.{{i}}.{name}_proj.bias" for name in "qkv"} & present
    is_qkv_stated = fields.flag("attention_bias")
    if qkv and is_qkv_stated is False and fields.has("attention_bias"):
        _report_denied(tensors, "q_proj.bias", fields, "attention_bias")
    mlp = {f"layers.{{i}}.{name}_proj.bias" for name in ("gate", "up", "down")} & present
    has_norms = bool({"layers.{i}.q_norm", "layers.{i}.k_norm"} & present)
    found = {
        "qkv_bias": bool(qkv) or family == "qwen2" or bool(is_qkv_stated),
        "o_bias": "layers.{i}.o_proj.bias" in present
        or (family in ("llama", "qwen3") and bool(is_qkv_stated)),
        "mlp_bias": bool(mlp) or bool(fields.flag("mlp_bias")),
        "qk_norm": has_norms or family == "qwen3",
    }
    return frozenset(word for word, holds in found.items() if holds)


def read_draft_stack(
    checkpoint: Checkpoint,
    names: NameTable,
    roles: tuple[TensorRole, ...],
    *,
    matched: Matched,
    layers: Fields,
    family: Family | None,
    num_layers: int,
    num_aux_states: int,
    head_conditions: frozenset[str] = frozenset(),
) -> Decoder | None:
    """Return the shape of a draft's layers and report the tensors that its file lacks (SD501).

    Args:
        checkpoint: the opened files; nothing is missing from weights that could not be read.
        names: name table of the dialect.
        roles: role table of the algorithm.
        matched: the file's tensors by role.
        layers: config object with the layer's keys.
        family: of the layers; None leaves both undone.
        num_layers: layers in the file.
        num_aux_states: captured states.
        head_conditions: `when` words that hold outside the layers.
    """
    if family is None:
        return None
    conditions = layer_conditions(matched.tensors, layers, family)
    decoder = read_decoder(
        layers,
        family=family,
        tensors=matched.tensors,
        conditions=conditions,
        num_layers=num_layers,
        path="draft.decoder",
    )
    if is_whole(checkpoint):
        names.report_missing(
            roles,
            matched,
            layers.findings,
            conditions=conditions | head_conditions,
            num_layers=max(num_layers, 1),
            num_aux_states=num_aux_states,
            file=main_file(checkpoint),
        )
    return decoder


def read_decoder(
    fields: Fields,
    *,
    family: Family,
    tensors: Mapping[str, TensorRef],
    conditions: frozenset[str],
    num_layers: int,
    path: str,
) -> Decoder | None:
    """Return the stack's shape, None when a dimension is missing (SD206) or wrong (SD207).

    Args:
        fields: the config object with the layer's keys.
        family: of the layers.
        tensors: role -> tensor of the file.
        conditions: from `layer_conditions`.
        num_layers: layers of the stack.
        path: manifest path of the section, such as `draft.decoder`.
    """
    hidden = fields.integer("hidden_size", f"{path}.hidden_size", is_required=True)
    inner = fields.integer("intermediate_size", f"{path}.intermediate_size", is_required=True)
    heads = fields.integer("num_attention_heads", f"{path}.num_attention_heads", is_required=True)
    positions = fields.integer(
        "max_position_embeddings", f"{path}.max_position_embeddings", is_required=True
    )
    kv_heads = _kv_heads(fields, heads, path)
    head_dim = _head_dim(fields, hidden, heads, tensors, path)
    rope = read_rope(fields, f"{path}.rope")
    eps = fields.number("rms_norm_eps", f"{path}.rms_norm_eps")
    act = _hidden_act(fields, path)
    window, layer_types = _layer_types(fields, family, num_layers, path)
    fields.findings.derived(f"{path}.num_layers", "tensor names", "number of layers stored")
    for word in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        fields.findings.derived(f"{path}.has_{word}", "tensor names", "the tensors are stored")
    if (
        hidden is None
        or inner is None
        or heads is None
        or positions is None
        or kv_heads is None
        or head_dim is None
        or rope is None
        or eps is None
        or act is None
        or layer_types is None
        or num_layers < 1
    ):
        return None
    return Decoder(
        family=family,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=act,
        rms_norm_eps=eps,
        has_qkv_bias="qkv_bias" in conditions,
        has_o_bias="o_bias" in conditions,
        has_mlp_bias="mlp_bias" in conditions,
        has_qk_norm="qk_norm" in conditions,
        rope=rope,
        max_position_embeddings=positions,
        layer_types=layer_types,
        sliding_window=window,
    )


def report_layer_count(fields: Fields, num_layers: int, key: str = "num_hidden_layers") -> None:
    """Report SD310 when the config states another number of layers than the file has."""
    stated = fields.integer(key, minimum=0) if fields.has(key) else None
    if stated is not None and stated != num_layers:
        fields.findings.add(
            "SD310",
            where=fields.where(key),
            message=f"`{key}` is {stated} and the file holds {num_layers}",
            expected=num_layers,
            found=stated,
        )


def _hidden_act(fields: Fields, path: str) -> str | None:
    """Return the activation; one that the runtime does not compute is told (SD813), no fault."""
    act = fields.text("hidden_act", f"{path}.hidden_act")
    if act is not None and act not in HIDDEN_ACTS:
        fields.findings.add(
            "SD813",
            where=fields.where("hidden_act"),
            message=f"the runtime of this version does not compute activation `{act}`",
            expected=" or ".join(HIDDEN_ACTS),
            found=act,
            help="Nothing to do for inspect, validate and convert; serve it with another engine",
            severity="info",
        )
    return act


def _kv_heads(fields: Fields, heads: int | None, path: str) -> int | None:
    kv_path = f"{path}.num_kv_heads"
    kv_heads = fields.integer("num_key_value_heads", kv_path)
    if kv_heads is None:
        if fields.has("num_key_value_heads"):
            return None
        fields.findings.derived(
            kv_path, fields.where("num_attention_heads"), "equal to the attention heads when absent"
        )
        return heads
    if heads is not None and heads % kv_heads:
        fields.findings.add(
            "SD207",
            where=fields.where("num_key_value_heads"),
            message=f"{heads} attention heads cannot be shared by {kv_heads} key/value heads",
            expected=f"a divisor of {heads}",
            found=kv_heads,
        )
        return None
    return kv_heads


def _head_dim(
    fields: Fields,
    hidden: int | None,
    heads: int | None,
    tensors: Mapping[str, TensorRef],
    path: str,
) -> int | None:
    dim_path = f"{path}.head_dim"
    if fields.has("head_dim"):
        return fields.integer("head_dim", dim_path)
    if hidden is None or heads is None:
        return None
    query = tensors.get("layers.0.q_proj.weight")
    if query is not None and query.shape and query.shape[0] > 0 and query.shape[0] % heads == 0:
        inferred = query.shape[0] // heads
        fields.findings.derived(dim_path, tensor_place(query), "query rows / attention heads")
        if inferred * heads != hidden:
            fields.findings.add(
                "SD309",
                where=fields.where("head_dim"),
                message=f"`head_dim` is absent; `{query.key}` has {query.shape[0]} rows for "
                f"{heads} heads, so it is {inferred}",
                expected=f"`head_dim`: {inferred}",
                found=f"hidden_size / num_attention_heads = {hidden / heads:g}",
            )
        return inferred
    if hidden % heads:
        fields.findings.add(
            "SD206",
            where=fields.where("head_dim"),
            message=f"`head_dim` is absent and {hidden} is not divisible by {heads} heads",
            expected="`head_dim`",
            found="nothing",
        )
        return None
    fields.findings.derived(
        dim_path, fields.where("hidden_size"), "hidden_size / num_attention_heads"
    )
    return hidden // heads


def _layer_types(
    fields: Fields, family: Family, num_layers: int, path: str
) -> tuple[int | None, tuple[str, ...] | None]:
    window = _window(fields, family, path)
    types_path = f"{path}.layer_types"
    if fields.has("layer_types"):
        stated = fields.texts("layer_types")
        unknown = sorted(set(stated) - set(LAYER_TYPES))
        if unknown:
            fields.findings.add(
                "SD203",
                where=fields.where("layer_types"),
                message=f"layers of type `{unknown[0]}` are not supported",
                expected=" or ".join(LAYER_TYPES),
                found=", ".join(unknown),
            )
            return window, None
        fields.findings.read(types_path, fields.where("layer_types"))
        # A config that describes more layers than the file has is reported as SD310.
        types = stated[:num_layers] + stated[-1:] * (num_layers - len(stated))
        if window is None and "sliding_attention" in types:
            _report_no_window(fields)
    else:
        first = fields.integer("max_window_layers", minimum=0) or 0
        slides = window is not None
        types = tuple(
            "sliding_attention"
            if slides and (family == "mistral" or index >= first)
            else "full_attention"
            for index in range(num_layers)
        )
        rule = "no layer slides without a window; Mistral slides all, Qwen from max_window_layers"
        fields.findings.derived(types_path, fields.where("sliding_window"), rule)
    return (window if "sliding_attention" in types else None), types


def _report_no_window(fields: Fields) -> None:
    """Report SD208 for layers that slide over a window that the config does not give."""
    is_off = fields.raw("use_sliding_window") is False or fields.raw("sliding_window") is not None
    fields.findings.add(
        "SD208",
        where=fields.where("layer_types"),
        message="`layer_types` has sliding layers and "
        + ("`use_sliding_window` is not true" if is_off else "`sliding_window` is not set"),
        expected="`use_sliding_window`: true" if is_off else "`sliding_window`",
        found=str(fields.raw("use_sliding_window" if is_off else "sliding_window") or "nothing"),
        # Some engines slide by the layer's type and the stated width, whatever the switch says.
        severity="warning" if fields.raw("sliding_window") is not None else None,
    )


def _window(fields: Fields, family: Family, path: str) -> int | None:
    window_path = f"{path}.sliding_window"
    if family in ("qwen2", "qwen3") and not fields.flag("use_sliding_window"):
        fields.findings.derived(
            window_path, fields.where("use_sliding_window"), "no window unless it is switched on"
        )
        return None
    if family == "llama" and not fields.has("layer_types"):
        fields.findings.derived(window_path, fields.where("sliding_window"), "llama has no window")
        return None
    if "sliding_window" in fields.data and not fields.has("sliding_window"):
        fields.findings.read(window_path, fields.where("sliding_window"))
        return None  # a written null means no window; only an absent key is the class default
    return fields.integer("sliding_window", window_path)


def _report_denied(
    tensors: Mapping[str, TensorRef], suffix: str, fields: Fields, flag: str
) -> None:
    stored = [ref for role, ref in tensors.items() if role.endswith(suffix)]
    if stored:
        fields.findings.add(
            "SD506",
            where=tensor_place(stored[0]),
            message=f"`{stored[0].key}` is stored and `{flag}` is false",
            expected=f"`{flag}`: true",
            found="false",
        )
