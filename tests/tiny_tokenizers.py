"""Small tokenizers of every structure that counting treats in its own way."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

PYTHON = "def foo(bar, baz=1234):\n    return self.bar(baz) + 'it''s'  # 5\n\n\nclass Foo:\n\tpass"
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog's owner doesn't care at all.",
    PYTHON,
    "Der schnelle Fuchs springt \u00fcber den Hund. Stra\u00dfe 12, Gr\u00f6\u00dfe 3.",
    "\u0411\u044b\u0441\u0442\u0440\u0430\u044f \u043b\u0438\u0441\u0430, \u0441\u043e\u0431.",
    "\u3053\u308c\u306f\u30c6\u3002\u6771\u4eac\u306f\u3001\u3067\u3059\u3002",
] * 3
SPLITS = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen3.5": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
NAMES = (
    "gpt2",
    "gpt2-prefix",
    "smollm2",
    "llama3",
    "qwen2",
    "qwen3.5",
    "o200k",
    "llama2",
    "metaspace-bpe",
    "wordpiece",
    "unigram",
)


@cache
def tokenizer_json(name: str) -> str:
    """Return the tokenizer.json of one structure, trained on a few lines."""
    if name in ("llama2", "metaspace-bpe"):
        return _sentencepiece(name)
    if name == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
        )
    elif name == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        return _byte_level(name)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


def _byte_level(name: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(
        add_prefix_space=name == "gpt2-prefix", use_regex=name not in SPLITS
    )
    if name in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[name]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    elif name == "smollm2":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    else:
        tokenizer.pre_tokenizer = level
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


def _sentencepiece(name: str) -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    specials = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([*TEXT, "    four  two"], trainer)
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = [t for t in config["added_tokens"] if t["content"] in specials[:2]]
    if name == "llama2":
        config["pre_tokenizer"] = None
        config["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        }
    return json.dumps(config, ensure_ascii=False)
