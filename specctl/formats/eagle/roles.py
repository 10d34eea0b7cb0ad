"""Tensor roles of the EAGLE relatives that have parts of their own.

*Source:* Speculators 0.9 and vLLM pull request 32887 (`mask_hidden`); Kimi-K2 drafts of
Model-Optimizer (DeepSeek-V2 attention); deepseek-ai/DeepSpec `Qwen3Eagle3Model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specctl.contract.roles import ALWAYS, EAGLE3_ROLES, PEAGLE_ROLES, TensorRole, relaxed

Q_LORA, NO_Q_LORA = "q_lora", "no_q_lora"


def _role(name: str, *shape: str, when: str = ALWAYS) -> TensorRole:
    return TensorRole(name=name, shape=shape, when=when)


def peagle_roles(mask_rank: int) -> tuple[TensorRole, ...]:
    """Return P-EAGLE's roles; `mask_hidden` is [1, 1, A*Ht] or [1, A*Ht], as the file stores it."""
    if mask_rank != 2:
        return PEAGLE_ROLES
    return (_role("mask_hidden", "1", "A*Ht"), *EAGLE3_ROLES)


# Layers after the first of DeepSpec's draft are like the first: they see the embedding again.
DEEPSPEC_ROLES: tuple[TensorRole, ...] = tuple(
    _role("layers.{i}.hidden_norm", "H") if role.name == "layers.0.hidden_norm" else role
    for role in EAGLE3_ROLES
)

MLA_SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "NH": "attention heads",
        "ND": "dimensions of a head without rotation",
        "RD": "rotated dimensions of a head",
        "VD": "value dimensions of a head",
        "QL": "rank of the query",
        "KL": "rank of key and value",
    }
)
"""Shape symbols of latent attention, beside those of `contract.roles`."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
_MLA_LAYER: tuple[TensorRole, ...] = (
    _role("layers.{i}.q_proj.weight", "NH*ND+NH*RD", "X", when=NO_Q_LORA),
    _role("layers.{i}.q_a_proj.weight", "QL", "X", when=Q_LORA),
    _role("layers.{i}.q_a_norm", "QL", when=Q_LORA),
    _role("layers.{i}.q_b_proj.weight", "NH*ND+NH*RD", "QL", when=Q_LORA),
    _role("layers.{i}.kv_a_proj.weight", "KL+RD", "X"),
    _role("layers.{i}.kv_a_norm", "KL"),
    _role("layers.{i}.kv_b_proj.weight", "NH*ND+NH*VD", "KL"),
    _role("layers.{i}.o_proj.weight", "H", "NH*VD"),
)
MLA_ROLES: tuple[TensorRole, ...] = (
    *(
        role
        for role in EAGLE3_ROLES
        if not (role.name.startswith("layers.{i}.") and role.name.split(".")[2] in _ATTENTION)
    ),
    *_MLA_LAYER,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Parts that ModelOpt can leave out of an EAGLE-3 draft.

    Args:
        has_aux_states: `fc` and the state's norm; without them the draft reads the target's last
            state, as EAGLE-1 does.
        has_first_norm: the norm of the embedding in the first layer.
        has_last_norm: the norm before the head.
    """

    has_aux_states: bool = True
    has_first_norm: bool = True
    has_last_norm: bool = True

    def roles(self, roles: tuple[TensorRole, ...]) -> tuple[TensorRole, ...]:
        """Return the table without the demand for what is left out."""
        names: list[str] = []
        if not self.has_aux_states:
            names += ["fc.weight", "layers.0.hidden_norm"]
        if not self.has_last_norm:
            names.append("norm")
        if not self.has_first_norm:
            names.append("layers.{i}.input_norm")
        return relaxed(roles, *names)
