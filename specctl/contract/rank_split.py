"""Whether tensor-parallel ranks divide what they split: heads and intermediate features.

One rule for `specctl plan` and for the runtime. Vocabularies are padded and cannot fail.
"""

from __future__ import annotations

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import Decoder, Manifest


def rank_problems(
    manifest: Manifest, tensor_parallel: int, *, is_draft_split: bool = True
) -> list[Diagnostic]:
    """Return SD852 for each dimension of target and draft that the ranks do not divide.

    Args:
        manifest: sizes.
        tensor_parallel: ranks of a stage.
        is_draft_split: False leaves the draft out: it is whole on every rank.
    """
    stacks: list[tuple[str, Decoder]] = [("target", manifest.target.decoder)]
    if manifest.draft is not None and is_draft_split:
        stacks.append(("draft", manifest.draft.decoder))
    return [
        diagnose(
            "SD852",
            where=f"manifest#/{part}/decoder/{name}",
            message=f"the {part}'s {name} is {size}, which {tensor_parallel} ranks do not divide",
            expected=f"a divisor of {size}",
            found=tensor_parallel,
        )
        for part, decoder in stacks
        for name, size in (
            ("num_attention_heads", decoder.num_attention_heads),
            ("num_kv_heads", decoder.num_kv_heads),
            ("intermediate_size", decoder.intermediate_size),
        )
        if size % tensor_parallel
    ]
