"""Find a target's input embedding and output head among all spellings, and never a copy.

Invariants: a key inside a layer, or of an MTP, NextN, EAGLE or other draft part, is never picked;
such copies are decoys (SD504). Two genuine spellings at once are SD505. The head of a tied target
is its embedding; transformers takes the root's `tie_word_embeddings` where a multimodal config
states it twice, and a contradiction is SD418. Nothing but headers is read; a tensor's bytes are
read by range (`read_rows`).
*Source:* the exclusion rule is SGLang pull request 39643.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specctl.checkpoint import DTYPE_BITS, Checkpoint, TensorEntry
from specctl.checkpoint.config_sections import TEXT_SECTIONS
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.contract.findings import Findings
from specctl.contract.manifest import TensorRef
from specctl.formats.fields import ReaderFindings
from specctl.formats.names import as_ref

EMBEDDING_KEYS: tuple[str, ...] = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.word_embeddings.weight",
    "tok_embeddings.weight",
    "embed.weight",
    "backbone.embeddings.weight",
    "language_model.backbone.embeddings.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
    "gpt_neox.embed_in.weight",
    "llm.embed.weight",
)
HEAD_KEYS: tuple[str, ...] = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "output.weight",
    "head.weight",
    "gpt_neox.embed_out.weight",
    "embed_out.weight",
    "llm.unembed.weight",
)
DRAFT_EMBEDDING_KEY = "embed_tokens.weight"
"""How a draft spells its own embedding; in a target it is no spelling of its own."""
TIE_FLAG = "tie_word_embeddings"

_STEMS = ("embed_tokens", "word_embeddings", "tok_embeddings", "embeddings", "wte", "embed_in")
_ENDS = tuple(f"{stem}.weight" for stem in (*_STEMS, "tok_emb"))
_DECOY_PART = re.compile(r"mtp|nextn|eagle|draft|speculator")
_IN_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block)\.\d+\.")
_OTHER_TOWER = re.compile(r"vision|visual|audio|image|encoder|position|patch|token_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """Where a checkpoint's embedding and head are.

    Args:
        embedding: key, shard file, byte range, shape and dtype; None when there is none.
        head: the same; the embedding for a tied target, None when there is neither.
        is_tied: the embedding serves as head; None when there is nothing to say it of.
        rule: how the head was decided, in words.
        stored_head: a head tensor of the files, used or not.
        decoys: copies inside layers and draft parts, by key.
        diagnostics: SD418, SD505.
    """

    embedding: TensorRef | None
    head: TensorRef | None
    is_tied: bool | None
    rule: str
    stored_head: TensorRef | None
    decoys: tuple[TensorRef, ...]
    diagnostics: tuple[Diagnostic, ...]


def locate(checkpoint: Checkpoint) -> Located:
    """Return where the input embedding and the output head of a checkpoint are.

    The files are those that `open_checkpoint` chose: by the index; without one, every shard; torch
    archives when there is no safetensors file.

    Args:
        checkpoint: an opened target; of a draft, its own embedding and head are returned.
    """
    findings = ReaderFindings()
    tensors = checkpoint.tensors
    embedding = find_embedding(tensors, findings)
    if embedding is None and DRAFT_EMBEDDING_KEY in tensors:
        embedding = as_ref(tensors[DRAFT_EMBEDDING_KEY])
    stored = find_head(tensors, findings)
    is_tied, rule = decide_tie(checkpoint.config or {}, findings, has_head=stored is not None)
    if embedding is None and stored is None:
        return _nothing(tensors, findings)
    return Located(
        embedding=embedding,
        head=embedding if is_tied else stored,
        is_tied=is_tied,
        rule=rule,
        stored_head=stored,
        decoys=tuple(as_ref(entry) for entry in find_decoys(tensors)),
        diagnostics=findings.result(),
    )


def read_rows(checkpoint: Checkpoint, ref: TensorRef, begin: int, end: int) -> bytes:
    """Return rows [begin, end) of a located matrix as stored, read by their byte range.

    Args:
        checkpoint: the one that was searched.
        ref: its embedding or head.
        begin: first row.
        end: row after the last.

    Raises:
        ValueError: the rows are not inside the matrix, or its element type is not of whole bytes.
        DiagnosticError: SD108 when the file ends before the range does, SD135 when the system
            refuses.
    """
    bits = DTYPE_BITS.get(ref.dtype, 0)
    if len(ref.shape) != 2 or bits % 8 or not 0 <= begin <= end <= ref.shape[0]:
        raise ValueError(f"rows {begin} to {end} are not inside {list(ref.shape)} {ref.dtype}")
    row_bytes = ref.shape[1] * bits // 8
    first = ref.begin + begin * row_bytes
    return checkpoint.read_range(ref.file, first, ref.begin + end * row_bytes)


def decide_tie(
    config: Mapping[str, object], findings: Findings, *, has_head: bool, default: bool | None = None
) -> tuple[bool, str]:
    """Return whether the embedding is the head, and the rule that says so; SD418.

    Args:
        config: the root's object.
        findings: receives SD418.
        has_head: a head tensor is stored.
        default: the model class's value for an absent flag, None when it is not known.
    """
    root = config.get(TIE_FLAG)
    section, nested = _nested_flag(config)
    if isinstance(root, bool) and isinstance(nested, bool) and root != nested:
        findings.add(
            "SD418",
            where=f"{CONFIG}#/{section}/{TIE_FLAG}",
            message=f"`{TIE_FLAG}` is {_word(nested)} here and {_word(root)} at the root",
            expected=_word(root),
            found=_word(nested),
        )
    if isinstance(root, bool):
        return root, f"{CONFIG}#/{TIE_FLAG}"
    if isinstance(nested, bool):
        return nested, f"{CONFIG}#/{section}/{TIE_FLAG}"
    if default is not None:
        return default, f"`{TIE_FLAG}` is absent: the class's default"
    if has_head:
        return False, f"`{TIE_FLAG}` is absent and a head is stored"
    return True, f"`{TIE_FLAG}` is absent and no head is stored"


def _nested_flag(config: Mapping[str, object]) -> tuple[str, object]:
    for name in TEXT_SECTIONS:
        section = config.get(name)
        if isinstance(section, dict) and TIE_FLAG in section:
            return name, section[TIE_FLAG]
    return TEXT_SECTIONS[0], None


def _word(flag: bool) -> str:
    return "true" if flag else "false"


def _nothing(tensors: Mapping[str, TensorEntry], findings: Findings) -> Located:
    return Located(
        embedding=None,
        head=None,
        is_tied=None,
        rule="no embedding and no head is stored",
        stored_head=None,
        decoys=tuple(as_ref(entry) for entry in find_decoys(tensors)),
        diagnostics=findings.result(),
    )


def trunk_prefix(embedding_key: str) -> str:
    """Return the prefix of the layers beside an embedding: `model.` of `model.embed_tokens.weight`.

    Original Meta and DeepSeek-V4 files have no prefix at all.
    """
    module = embedding_key.removesuffix(".weight").rpartition(".")[0]
    return f"{module}." if module else ""


def is_decoy(key: str) -> bool:
    """Tell whether a key lies inside a layer or a draft part of a checkpoint."""
    return bool(_IN_LAYER.search(key)) or is_decoy_part(key)


def is_decoy_part(key: str) -> bool:
    """Tell whether a key lies inside a draft part, whatever the layer."""
    return bool(_DECOY_PART.search(key.lower()))


def find_decoys(tensors: Mapping[str, TensorEntry]) -> tuple[TensorEntry, ...]:
    """Return the tensors that a match by suffix would take for the embedding, sorted by key."""
    ends = [key for key in tensors if key.endswith(_ENDS) and is_decoy(key)]
    return tuple(tensors[key] for key in sorted(ends) if _is_stem(key))


def _is_stem(key: str) -> bool:
    return key.removesuffix(".weight").rpartition(".")[2] in (*_STEMS, "tok_emb")


def find_embedding(
    tensors: Mapping[str, TensorEntry], findings: Findings | None
) -> TensorRef | None:
    """Return the target's input embedding; two spellings are SD505.

    A spelling that no list knows is taken when it is the only one that ends like an embedding and
    is no copy.

    Args:
        tensors: key -> entry of a checkpoint.
        findings: receives the diagnostics; None for a silent look-up.
    """
    known = _first(tensors, EMBEDDING_KEYS, "embedding", findings)
    if known is not None:
        return known
    key = only_embedding_like(key for key in tensors if len(tensors[key].shape) == 2)
    return None if key is None else as_ref(tensors[key])


def only_embedding_like(keys: Iterable[str]) -> str | None:
    """Return the key that ends like a text embedding when it is the only one, else None."""
    others = [
        key
        for key in keys
        if key.endswith(_ENDS)
        and _is_stem(key)
        and key != DRAFT_EMBEDDING_KEY
        and not is_decoy(key)
        and not _OTHER_TOWER.search(key)
    ]
    return others[0] if len(others) == 1 else None


def find_head(tensors: Mapping[str, TensorEntry], findings: Findings | None) -> TensorRef | None:
    """Return the target's output head, None when none is stored (a tied head, or a loss).

    A spelling that no list knows is taken when it is the only `lm_head` that is no copy.
    """
    known = _first(tensors, HEAD_KEYS, "head", findings)
    if known is not None:
        return known
    ends = [key for key in tensors if key.endswith(".lm_head.weight") and not is_decoy(key)]
    return as_ref(tensors[ends[0]]) if len(ends) == 1 else None


def _first(
    tensors: Mapping[str, TensorEntry],
    keys: tuple[str, ...],
    what: str,
    findings: Findings | None,
) -> TensorRef | None:
    present = [key for key in keys if key in tensors]
    if not present:
        return None
    if present[1:] and findings is not None:
        findings.add(
            "SD505",
            where=tensors[present[1]].describe(),
            message=f"`{present[0]}` and `{present[1]}` both name the {what}",
            expected="one spelling",
            found="two",
        )
    return as_ref(tensors[present[0]])
