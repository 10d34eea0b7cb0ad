"""Family 8: runtime start-up.

SD804-SD809 and SD830 on: settings, budgets and start-up probes. SD810-SD829: models and loading.
"""

from __future__ import annotations

from specctl.contract.codes.table import Code

_SETTINGS: tuple[Code, ...] = (
    Code(
        code="SD804",
        slug="kv-budget-too-small",
        severity="error",
        summary="The KV pool cannot hold one request of the longest length that is allowed.",
        why=(
            "A request that grows to `max_model_len` while nothing is left to preempt could never "
            "finish; it would hang instead of failing."
        ),
        fix="Lower `--max-model-len`, or raise `--num-kv-blocks` or `--kv-memory-fraction`",
    ),
    Code(
        code="SD805",
        slug="setting-has-no-effect",
        severity="warning",
        summary="A setting was given that nothing reads with the other settings.",
        why="A setting ignored in silence looks like one that was tried and made no difference.",
        fix="Leave the setting out, or change the one that makes it idle",
    ),
    Code(
        code="SD806",
        slug="more-tokens-than-draft-has",
        severity="error",
        summary="More speculative tokens are asked for than one forward of the block draft yields.",
        why=(
            "A block draft has a trained number of slots. Slots beyond it were never trained; "
            "asking for them does not crash, it pulls accept length toward 1."
        ),
        fix="Lower `--num-speculative-tokens` to the manifest's value",
    ),
    Code(
        code="SD807",
        slug="proposer-unavailable",
        severity="error",
        summary="The proposer that was asked for cannot run with this manifest.",
        why=(
            "A draft-model proposer needs a draft of its own algorithm in the manifest, and the "
            "oracle proposer needs something to replay."
        ),
        fix="Choose `--proposer ngram` or `none`, or use a manifest with a draft of that algorithm",
    ),
    Code(
        code="SD808",
        slug="draft-context-shorter",
        severity="warning",
        summary="The draft knows fewer positions than a request may reach.",
        why=(
            "Drafting stops for a request at the draft's last position and goes on plainly; the "
            "answer is the same, the speed-up ends there."
        ),
        fix="Nothing needs to be done; `--max-model-len` at the draft's limit makes it explicit",
    ),
    Code(
        code="SD809",
        slug="dtype-unsupported",
        severity="error",
        summary="The device does not run the element type that was asked for.",
        why="Running in another type than the one named would give other logits without saying so.",
        fix="Choose one of the types named under `expected` with `--dtype`",
    ),
)

_MODELS: tuple[Code, ...] = (
    Code(
        code="SD810",
        slug="proposer-unsupported",
        severity="error",
        summary="The manifest's draft uses an algorithm that this runtime does not run.",
        why=(
            "Its tensors could be read but nothing here computes its proposals; running another "
            "algorithm on them would propose noise and be slower than no draft at all."
        ),
        fix="Use an EAGLE-3 draft, or start with `--proposer none` or `--proposer ngram`",
    ),
    Code(
        code="SD811",
        slug="rope-unsupported",
        severity="error",
        summary="The rotary embedding has a kind, a number or a head size that is not supported.",
        why=(
            "Wrong rotary numbers do not crash: text stays fluent for a while and degrades with "
            "position. Kinds that change with the running length (dynamic, longrope) would also "
            "give a token other bits depending on what was computed beside it."
        ),
        fix="Use a checkpoint with one of the kinds named under `expected`",
        source="transformers modeling_rope_utils",
    ),
    Code(
        code="SD812",
        slug="rope-parameter-missing",
        severity="error",
        summary="A number that the rotary embedding's kind needs is not in the manifest.",
        why="There is no value that fits every checkpoint; a guess would shift every position.",
        fix="Add the number to the checkpoint's config.json and run `specctl manifest` again",
        source="transformers modeling_rope_utils",
    ),
    Code(
        code="SD813",
        slug="activation-unsupported",
        severity="error",
        summary="The feed-forward layers use an activation that has no kernel here.",
        why="Every layer would compute another function than the one that was trained. `validate` "
        "gives it as a note only: other engines have more activations.",
        fix="Use a checkpoint whose `hidden_act` is `silu`",
    ),
    Code(
        code="SD814",
        slug="attention-unsupported",
        severity="error",
        summary="A layer's attention is of a kind, or lacks a number, that is needed to run it.",
        why=(
            "A layer that should slide and does not (or the reverse) reads keys that it was not "
            "trained to read; nothing fails until the context is longer than the window."
        ),
        fix="Use a checkpoint with full or sliding attention whose `sliding_window` is stated",
    ),
    Code(
        code="SD815",
        slug="target-keys-unknown",
        severity="error",
        summary="The target's embedding key does not end as the keys of its family do.",
        why=(
            "The keys of the layers are found beside the embedding's; without that prefix any "
            "choice of tensors would be a guess."
        ),
        fix="Use a checkpoint whose embedding is `<prefix>embed_tokens.weight`",
    ),
    Code(
        code="SD816",
        slug="tied-head-differs",
        severity="error",
        summary="The head is declared tied to the embedding, but a different head is stored.",
        why=(
            "One reader uses the stored head, another the embedding; the two give different text "
            "and neither fails."
        ),
        fix="Delete the stored head, or set `tie_word_embeddings` to false, and emit again",
    ),
    Code(
        code="SD817",
        slug="weights-not-finite",
        severity="error",
        summary="A weight is NaN or infinite in the dtype that the model runs in.",
        why=(
            "One such value makes every logit NaN, and the answer is the same token for ever "
            "without any error; in a draft it pulls accept length to 1. The file was damaged, "
            "training diverged, or float16 cannot hold a bfloat16 value."
        ),
        fix="Fetch the file again, or choose another `--dtype` when the stored values are finite",
    ),
)

_MACHINE: tuple[Code, ...] = (
    Code(
        code="SD830",
        slug="device-unavailable",
        severity="error",
        summary="The device that was asked for is not present.",
        why="Falling back to another device would change speed and numbers without saying so.",
        fix="Run `specctl doctor` to see what this machine has, or use `--device auto`",
    ),
    Code(
        code="SD831",
        slug="rows-not-invariant",
        severity="error",
        summary="A matrix product gives a row other bits when more rows are computed with it.",
        why=(
            "Verifying several positions at once must equal decoding them one by one, bit for bit; "
            "on this machine that does not hold, so speculation could change answers."
        ),
        fix="Report the machine's CPU, torch version and thread count; run with `--proposer none`",
    ),
    Code(
        code="SD832",
        slug="setting-out-of-range",
        severity="error",
        summary="A setting has a value outside what the manifest or another setting allows.",
        why="Clamping it would run with another value than the one that was given.",
        fix="Set it within the range named under `expected`",
    ),
    Code(
        code="SD833",
        slug="context-limited-by-memory",
        severity="info",
        summary="`max_model_len` was lowered to what the KV pool holds.",
        why=(
            "The target's own limit would need more KV memory than there is. Longer prompts are "
            "refused instead of running out of memory half way."
        ),
        fix="Give `--max-model-len`, `--num-kv-blocks` or `--kv-memory-fraction` to choose",
    ),
    Code(
        code="SD834",
        slug="runtime-extra-missing",
        severity="error",
        summary="A Python package that the runtime needs is not installed.",
        why=(
            "The checkpoint tools install without torch; generating, serving and benchmarking "
            "need it."
        ),
        fix="Run pip install '.[runtime]' in a clone of the repository",
    ),
    Code(
        code="SD835",
        slug="address-unavailable",
        severity="error",
        summary="The server cannot listen at the address that was asked for.",
        why=(
            "Another process listens at that port, the port needs more rights, or the host is not "
            "an address of this machine. It is tried before the model loads, which can take long."
        ),
        fix="Choose another `--port` (0 takes a free one) or `--host`, or stop the other process",
    ),
    Code(
        code="SD836",
        slug="cost-table-missing",
        severity="error",
        summary="Draft counts are to be chosen, and nothing says what rounds cost.",
        why=(
            "How many drafts pay depends on what drafting and verifying them take on this machine. "
            "With made-up costs the choice would be arbitrary, and only the speed would show it."
        ),
        fix="Serve from a manifest file, or give `--cost-table FILE`; or set a number of drafts",
    ),
    Code(
        code="SD837",
        slug="cost-table-unfit",
        severity="error",
        summary="A cost table was measured on something else, or is no cost table.",
        why=(
            "Costs hold for one manifest, device, dtype, set of kernels and size of engine. Those "
            "of another setting would choose draft counts that slow decoding down."
        ),
        fix="Remove the file, and the next start measures again; or give another `--cost-table`",
    ),
    Code(
        code="SD838",
        slug="cost-table-not-saved",
        severity="warning",
        summary="Costs were measured and could not be written to their file.",
        why="They are used now, and the next start measures again, which takes time.",
        fix="Make the directory writable or give `--cost-table FILE` in one that is",
    ),
    Code(
        code="SD839",
        slug="cost-table-measured",
        severity="info",
        summary="There was no cost table, so costs were measured and saved.",
        why=(
            "Later starts read the file and are quicker; they also choose draft counts by the same "
            "costs. Other work on the machine during the measurement is in the figures."
        ),
        fix="Nothing to do; remove the file to measure again",
    ),
    Code(
        code="SD840",
        slug="anchor-layout-forced",
        severity="warning",
        summary="A block draft is read with another anchor layout than its manifest states.",
        why=(
            "Every slot then proposes the token beside the one that it was trained for. Nothing "
            "crashes and the output is the target's; the accept length falls toward 1."
        ),
        fix="Leave `--force-anchor-layout` out; it is for finding out what a draft was trained as",
    ),
    Code(
        code="SD841",
        slug="graphs-do-not-fit",
        severity="warning",
        summary="Device memory ran out before the graphs of all batch sizes were captured.",
        why=(
            "Rounds of the sizes that were left out run with the graphs of a larger batch, or "
            "kernel by kernel where there is none. The output is the same; it takes longer."
        ),
        fix="Lower `--kv-memory-fraction`, `--max-num-requests` or `--max-model-len`",
    ),
    Code(
        code="SD842",
        slug="grammar-in-one-process",
        severity="error",
        summary="A request with a grammar came to an engine of which it would be one part.",
        why=(
            "A grammar lives in the process that took the request. Other tensor-parallel ranks, "
            "and the prefill server that yields the first token, would choose without it."
        ),
        fix="Send the request to an engine without `--tp` and `--role`, or drop its grammar",
    ),
    Code(
        code="SD843",
        slug="grammar-vocabulary",
        severity="error",
        summary="A request's grammar was made for another number of ids than the target has.",
        why=(
            "Its masks would allow and forbid other tokens than it means: bits of a mask are ids. "
            "The tokenizer's size is not it where the target's head has rows beyond it."
        ),
        fix="Make the grammar for the target's `vocab_size`; `specctl inspect TARGET` shows it",
    ),
)

CODES: tuple[Code, ...] = (*_SETTINGS, *_MODELS, *_MACHINE)
