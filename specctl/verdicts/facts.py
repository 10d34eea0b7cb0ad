"""Questions that rules of several engines ask."""

from __future__ import annotations

from specctl.checkpoint import WEIGHT_DTYPES
from specctl.contract.vocabulary_map import offsets_to_absolute
from specctl.verdicts.rule import Facts


def is_eagle3(facts: Facts) -> bool:
    """Tell whether it is an EAGLE-3 draft with Llama-like attention, in any dialect."""
    return facts.draft.algorithm == "eagle3" and not is_mla(facts)


def is_mla(facts: Facts) -> bool:
    """Tell whether the layers use latent attention."""
    return any("kv_a_proj" in role for role in facts.draft.tensors)


def is_flat(facts: Facts) -> bool:
    """Tell whether it is no Speculators dialect."""
    return not facts.is_speculators


def lacks_map(facts: Facts) -> bool:
    """Tell whether the reduced vocabulary comes without a map tensor."""
    return facts.is_reduced and "d2t" not in facts.draft.tensors


def lacks_head(facts: Facts) -> bool:
    """Tell whether the reduced vocabulary comes without a head."""
    return facts.is_reduced and "head" not in facts.draft.tensors


def stores_absolute_map(facts: Facts) -> bool:
    """Tell whether the stored map holds absolute ids, which every engine reads as offsets."""
    stored, ids = facts.draft.d2t, facts.draft.draft_to_target
    return (
        stored is not None
        and ids is not None
        and stored == ids
        and (offsets_to_absolute(stored) != ids)
    )


def has_qk_norm(facts: Facts) -> bool:
    """Tell whether the first layer norms queries and keys."""
    return "layers.0.q_norm" in facts.draft.tensors


def has_qkv_bias(facts: Facts) -> bool:
    """Tell whether the first layer's projections have biases."""
    return "layers.0.q_proj.bias" in facts.draft.tensors


def is_plain_in_quantized(facts: Facts) -> bool:
    """Tell whether prediction layers are plain floats under a config that quantizes."""
    return (
        facts.draft.algorithm == "mtp"
        and isinstance(facts.top("quantization_config"), dict)
        and facts.draft.dtype in WEIGHT_DTYPES
    )


def names_architecture(facts: Facts, *names: str) -> bool:
    """Tell whether the config's first architecture is one of the names."""
    return facts.draft.architecture in names
