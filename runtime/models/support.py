"""What the decoder layers cannot run, found from facts before any weight is read.

Facts that contradict each other are found when the manifest is read; here only what is consistent
but has no arithmetic in this runtime.
"""

from __future__ import annotations

from runtime.models.layers import rope_problems
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import Decoder, Draft

_LAYER_TYPES = ("full_attention", "sliding_attention")


def decoder_problems(decoder: Decoder, *, where: str) -> list[Diagnostic]:
    """Return every reason why a stack of layers cannot run.

    Args:
        decoder: facts of the stack.
        where: its place, `manifest#/target/decoder` or `manifest#/draft/decoder`.

    Returns:
        SD811 and SD812 (rotary embedding), SD813 (activation), SD814 (layer types and window).
    """
    return [
        *rope_problems(decoder.rope, head_dim=decoder.head_dim, where=f"{where}/rope"),
        *_activation_problems(decoder, where),
        *_attention_problems(decoder, where),
    ]


def last_state_problems(draft: Draft) -> list[Diagnostic]:
    """Return every reason in the facts why a draft over the target's last state cannot run.

    Codes: those of `decoder_problems`, and SD509.
    """
    return [
        *decoder_problems(draft.decoder, where="manifest#/draft/decoder"),
        *_fed_back_problems(draft),
    ]


def _fed_back_problems(draft: Draft) -> list[Diagnostic]:
    """Return SD509 when a draft's own output cannot stand in for the target's state."""
    hidden = draft.decoder.hidden_size
    if hidden == draft.target_hidden_size:
        return []
    return [
        diagnose(
            "SD509",
            where="manifest#/draft/decoder/hidden_size",
            message="the output of a step is fed back in place of the target's state, and the "
            f"widths differ: {hidden} and {draft.target_hidden_size}",
            expected=draft.target_hidden_size,
            found=hidden,
        )
    ]


def _activation_problems(decoder: Decoder, where: str) -> list[Diagnostic]:
    if decoder.hidden_act == "silu":
        return []
    return [
        diagnose(
            "SD813",
            where=f"{where}/hidden_act",
            message=f"activation `{decoder.hidden_act}` is not supported",
            expected="silu",
            found=decoder.hidden_act,
        )
    ]


def _attention_problems(decoder: Decoder, where: str) -> list[Diagnostic]:
    found = [
        diagnose(
            "SD814",
            where=f"{where}/layer_types/{index}",
            message=f"attention of kind `{kind}` is not supported",
            expected=" or ".join(_LAYER_TYPES),
            found=kind,
        )
        for index, kind in enumerate(decoder.layer_types)
        if kind not in _LAYER_TYPES
    ]
    if "sliding_attention" in decoder.layer_types and not decoder.sliding_window:
        found.append(
            diagnose(
                "SD814",
                where=f"{where}/sliding_window",
                message="a layer slides but `sliding_window` is not set",
                expected="a positive number of tokens",
                found=decoder.sliding_window,
            )
        )
    return found
