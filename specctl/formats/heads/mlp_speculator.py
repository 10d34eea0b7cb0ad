"""MLPSpeculator: one small recurrent step for each place, over the target's last state.

Step i embeds the token just proposed, adds the projected state, norms, and gives the next state;
`head.i` makes logits of it. Tied weights share one embedding, head and norm among all steps and one
projection among all but the first, which alone may change the width; such files hold the shared
tensors once, or under every number. `ln0` has no parameters.
*Source:* foundation-model-stack/fms-extras `speculator.py`; vLLM `mlp_speculator.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from specctl.checkpoint import Checkpoint
from specctl.contract.roles import ALWAYS, OPTIONAL
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import assemble
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.heads.indexed import MAX_HEADS, Row, match, numbers, table, with_sizes
from specctl.formats.vocabulary import identity_vocabulary

_HEAD = r"(?:speculator\.)?(?:emb|head|proj)\.(\d+)\.weight"
COUNT_KEY = "n_predict"


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    _refuse_other_kinds(root)
    is_tied = bool(root.flag("tie_weights"))
    found = len(numbers(checkpoint.tensors, _HEAD))
    steps = root.integer(COUNT_KEY, maximum=MAX_HEADS, is_required=True) or found
    _check_count(root, steps, found, is_tied=is_tied)
    tables = table(step_rows(steps, is_tied=is_tied))
    matched = match(checkpoint, tables, root, conditions=frozenset())
    width = root.integer("emb_dim", "draft.target_hidden_size", is_required=True)
    inner = root.integer("inner_dim", minimum=0) or width
    sizes = {"E": width, "I": inner}
    return assemble(
        checkpoint,
        format="mlp-speculator",
        algorithm="mlp_speculator",
        roles=tables.roles,
        root=root,
        layers=with_sizes(root, {"hidden_size": width}, "`emb_dim`"),
        matched=matched,
        decoder=None,
        target_hidden_size=width,
        target_num_layers=None,
        aux=NO_AUX,
        vocabulary=identity_vocabulary(root),
        num_speculative_tokens=root.integer("num_lookahead_tokens") or steps or None,
        geometry=None,
        sizes={symbol: size for symbol, size in sizes.items() if size is not None},
        details={
            COUNT_KEY: steps,
            "tie_weights": is_tied,
            "scale_input": bool(root.flag("scale_input")),
            "top_k_tokens_per_head": root.raw("top_k_tokens_per_head"),
            "n_candidates": root.raw("n_candidates"),
        },
    )


def step_rows(steps: int, *, is_tied: bool) -> Iterator[Row]:
    """Yield names and shapes of as many steps; tied ones may be stored once."""
    for i in range(steps):
        when = OPTIONAL if is_tied and i > 0 else ALWAYS
        shapes = {"emb": ("V", "I"), "head": ("V", "I"), "ln.weight": ("I",), "ln.bias": ("I",)}
        for name, shape in shapes.items():
            stem, _, kind = name.partition(".")
            key = f"{stem}.{i}.{kind or 'weight'}"
            role = f"{stem}.{i}" + (f".{kind}" if kind else "")
            yield Row(role=role, keys=(f"speculator.{key}", key), shape=shape, when=when)
        key = f"proj.{i}.weight"
        yield Row(
            role=f"proj.{i}",
            keys=(f"speculator.{key}", key),
            shape=("I", "E" if i == 0 else "I"),
            when=OPTIONAL if is_tied and i > 1 else ALWAYS,
        )


def _check_count(root: Fields, steps: int, found: int, *, is_tied: bool) -> None:
    """Report SD328 when the tensors are of another number of steps than the config says."""
    fewest = min(steps, 2) if is_tied else steps
    if found and not fewest <= found <= steps:
        root.findings.add(
            "SD328",
            where=root.where(COUNT_KEY),
            message=f"`{COUNT_KEY}` is {steps} and the file holds tensors of {found} steps",
            expected=found,
            found=steps,
        )


def _refuse_other_kinds(root: Fields) -> None:
    kind = root.text("method")
    if kind not in (None, "sum_rnn"):
        root.findings.add(
            "SD205",
            where=root.where("method"),
            message=f"speculators of kind `{kind}` are not read",
            expected="`sum_rnn`, or no such key",
            found=kind,
        )
