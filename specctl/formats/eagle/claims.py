"""By which evidence each EAGLE format recognises its own.

SafeAILab and SpecForge write the same names; what tells them apart is what SpecForge adds to the
config. Nothing here looks at a path.
"""

from __future__ import annotations

from specctl.formats.format import Evidence

SPECFORGE_ARCHITECTURE = "LlamaForCausalLMEagle3"
_BLOCK_LAYOUTS = frozenset({"dspark", "dspark-flat", "dflash2", "domino", "xpress"})
_MIDLAYER = r"midlayer\..*"
_FLAT = r"layers\.\{i\}\.hidden_norm\.weight"
_WRAPPED = r"model\.(midlayer\..*|layers\.\{i\}\.hidden_norm\.weight)"
_LATENT = r"(midlayer|layers\.\{i\})\.self_attn\.kv_a_proj_with_mqa\.weight"


def safeailab(evidence: Evidence) -> str | None:
    """Return the mark of `midlayer.` names, or of a config alone, without SpecForge's fields."""
    if evidence.is_speculators or _has_specforge_config(evidence):
        return None
    return _first_layer(evidence)


def specforge(evidence: Evidence) -> str | None:
    """Return the mark of the same names under SpecForge's architecture or `eagle_config`."""
    if evidence.is_speculators or not _has_specforge_config(evidence):
        return None
    found = _first_layer(evidence)
    is_foreign = bool(_BLOCK_LAYOUTS & evidence.layouts.keys())
    if found is None and not _is_without_states(evidence) and (is_foreign or not evidence.layouts):
        # A damaged file: the architecture names the format, its reader names what is missing.
        # Heads of a block draft contradict it, which two claims show.
        return evidence.architecture_mark(SPECFORGE_ARCHITECTURE)
    return found


def modelopt(evidence: Evidence) -> str | None:
    """Return the mark of `layers.` names in a flat config."""
    if evidence.is_speculators or evidence.first_key(_MIDLAYER):
        return None
    if _is_without_states(evidence):
        # Without captured states there is no norm for them: the switch is the evidence.
        return evidence.first_key(r"layers\.\{i\}\.self_attn\.q_proj\.weight")
    return evidence.first_key(_FLAT)


def nemo(evidence: Evidence) -> str | None:
    """Return the mark of names inside a module `model`."""
    if evidence.is_speculators:
        return None
    return evidence.first_key(_WRAPPED) or (
        evidence.architecture_mark("LlamaEagle3DraftModel") if not evidence.generic else None
    )


def deepspec(evidence: Evidence) -> str | None:
    """Return the mark of DeepSpec's architectures."""
    return evidence.architecture_mark("Qwen3Eagle3Model", "Gemma4Eagle3Model")


def latent_attention(evidence: Evidence) -> str | None:
    """Return the mark of DeepSeek-V2's attention in an EAGLE-3 layer."""
    if evidence.is_speculators:
        return None
    if "eagle3" in evidence.layouts and (found := evidence.first_key(_LATENT)):
        return found
    return evidence.architecture_mark("Eagle3DeepseekV2ForCausalLM")


def parallel(evidence: Evidence) -> str | None:
    """Return the mark of P-EAGLE: its architecture, `mask_hidden`, or the config's switch."""
    if evidence.is_speculators:
        return None
    return (
        evidence.architecture_mark("PEagleDraftModel")
        or evidence.layout_mark("peagle")
        or (evidence.value_mark("parallel_drafting", True) if _is_eagle3(evidence) else None)
    )


def eagle1(evidence: Evidence) -> str | None:
    """Return the mark of an `fc` without any other draft's tensors."""
    if (
        evidence.layouts
        or evidence.is_speculators
        or "hidden_norm.weight" in evidence.generic
        or "dflash_config" in evidence.config
        or "d2t" in evidence.generic
        or "draft_vocab_size" in evidence.config
    ):
        return None
    return evidence.first_key(r"fc\.weight")


def vllm_wrapper(evidence: Evidence) -> str | None:
    """Return the mark of a config that nests the draft's under `model`."""
    if not isinstance(evidence.config.get("model"), dict):
        return None
    return evidence.value_mark("model_type", "eagle")


def speculators_eagle1(evidence: Evidence) -> str | None:
    """Return the mark of the old Speculators type, or of its `fusion_fc`."""
    return evidence.value_mark("speculators_model_type", "eagle") or (
        None if evidence.is_speculators else evidence.layout_mark("speculators-eagle")
    )


def _is_without_states(evidence: Evidence) -> bool:
    eagle = evidence.config.get("eagle_config")
    switches = (evidence.config, eagle if isinstance(eagle, dict) else {})
    return any(part.get("use_aux_hidden_state") is False for part in switches)


def _is_eagle3(evidence: Evidence) -> bool:
    return "eagle3" in evidence.layouts or "draft_vocab_size" in evidence.config


def _has_specforge_config(evidence: Evidence) -> bool:
    return (
        evidence.architecture == SPECFORGE_ARCHITECTURE
        or evidence.config.get("eagle_config") is not None
    )


def _first_layer(evidence: Evidence) -> str | None:
    if not evidence.generic and evidence.config.get("draft_vocab_size") is not None:
        return evidence.config_mark("draft_vocab_size")
    return evidence.first_key(_MIDLAYER)
