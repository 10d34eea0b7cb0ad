"""A tiny byte-level tokenizer with the files a target keeps beside it, and a corpus to count."""

from __future__ import annotations

import json
from pathlib import Path

TRAINING_TEXT = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps",
    "def add(left, right):\n    return left + right\n",
    "Die Katze sitzt auf der Matte und schaut aus dem Fenster.",
]
SPECIALS = ["<|end|>", "<|start|>", "<|fim|>", "<|reserved_special_token_0|>"]


def write_target(directory: Path) -> Path:
    """Write tokenizer.json and its configs; ids 0..3 are the specials, `<think>` is the last."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    # Both would falsify counts if they were left on.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    configs = {
        "config.json": {"eos_token_id": 0, "bos_token_id": 1, "vocab_size": size + 11},
        "generation_config.json": {"eos_token_id": [0, 40]},
        "tokenizer_config.json": {
            "eos_token": "<|end|>",
            "bos_token": {"content": "<|start|>"},
            "chat_template": "{{ '<|start|>' + role }}<think>{{ content }}<|end|>",
        },
    }
    for name, value in configs.items():
        (directory / name).write_text(json.dumps(value))
    return directory


def write_corpus(root: Path) -> Path:
    """Write 60 documents in text, Markdown and jsonl files, and two files that are none."""
    (root / "deep" / "er").mkdir(parents=True)
    words = ("the", "dog", "fox", "lazy", "brown", "quick", "jumps", "over", "and", "sleeps")
    for number in range(20):
        text = " ".join(words[(number * k) % len(words)] for k in range(1, 40))
        (root / f"{number:02}.txt").write_text(f"{text} {number}\n")
        (root / "deep" / f"{number:02}.md").write_text(f"# {number}\n\n{text[::-1]}\n")
    lines = [json.dumps({"text": f"line {n} of the quick fox"}) for n in range(20)]
    (root / "deep" / "er" / "chat.jsonl").write_text("\n".join(lines) + "\n\n")
    (root / "ignored.py").write_text("import nothing")
    (root / ".hidden.txt").write_text("hidden")
    return root
