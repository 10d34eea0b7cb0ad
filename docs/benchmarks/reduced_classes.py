"""Prompts of `reduced_maps.py`: what is counted, and the classes that are timed.

Deterministic, as target ids. The first half of GSM8K and of HumanEval is answered to be counted,
the second half makes classes; nothing of MT-Bench is counted.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runtime.bench.prompts import PromptEncoder
from runtime.engine.text import TemplateRenderer, load_tokenizer

Prompts = list[list[int]]
MATHS = (
    "{}",
    "Write a short story about this situation: {}",
    "Write a friendly letter that tells of this, and give some advice: {}",
)
CODE = (
    "Complete the following Python function.\n{}",
    "Explain to a beginner what this function is for and how it could be written.\n{}",
    "Write unit tests for this function.\n{}",
)
PROSE = ("writing", "roleplay")
NUM_RARE_WORDS = 24


def encode_of(target: Path) -> Callable[[str], list[int]]:
    """Return what makes a user's message the ids of a prompt."""
    chat = TemplateRenderer(target)
    encoder = PromptEncoder(tokenizer=load_tokenizer(target), chat=chat)
    return lambda text: list(encoder.messages([{"role": "user", "content": text}], "prompt"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def halves(data: Path) -> tuple[tuple[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """Return (counted, timed) rows of GSM8K and of HumanEval."""
    maths = rows_of(data / "gsm8k" / "test_first100.jsonl")
    code = rows_of(data / "humaneval" / "HumanEval.jsonl")
    return (maths[:50], maths[50:]), (code[:82], code[82:])


def mt_bench(data: Path) -> Prompts:
    """Return the 80 first turns of MT-Bench."""
    path = data / "prompts" / "smollm2_prompt_ids.json"
    prompts: Prompts = json.loads(path.read_text(encoding="utf-8"))["mt_bench"]
    return prompts


def counting_prompts(target: Path, data: Path, *, limit: int | None) -> dict[str, Prompts]:
    """Return domain -> prompts whose answers are counted."""
    encode, ((maths, _), (code, _)) = encode_of(target), halves(data)
    texts = {
        "maths": [form.format(row["question"]) for form in MATHS for row in maths],
        "code": [form.format(row["prompt"].strip()) for form in CODE for row in code],
    }
    return {name: [encode(text) for text in rows[:limit]] for name, rows in texts.items()}


def class_prompts(
    target: Path, data: Path, *, limit: int, long_tokens: int, kept: frozenset[int]
) -> dict[str, Prompts]:
    """Return class -> prompts.

    Args:
        limit: prompts of each class.
        long_tokens: ids of a prompt of the long class, at most.
        kept: ids that some map holds; words of the rare class are none of them.
    """
    encode, ((_, maths), (_, code)) = encode_of(target), halves(data)
    questions = zip(rows_of(data / "mt_bench" / "question.jsonl"), mt_bench(data), strict=True)
    prose = [ids for row, ids in questions if row["category"] in PROSE]
    edits = [text for row in code if (text := edit_text(row)) is not None]
    return {
        "prose": prose[:: max(1, len(prose) // limit)][:limit],
        "code": [encode(CODE[0].format(row["prompt"].strip())) for row in code[:limit]],
        "edit": [encode(text) for text in edits[:limit]],
        "long": [long_prompt(encode, maths, first, long_tokens) for first in range(limit)],
        "rare words": [encode(text) for text in rare_texts(target, kept, limit)],
    }


def edit_text(row: dict[str, Any]) -> str | None:
    """Return the request to repeat a solution with its first variable renamed, if it has one."""
    source = row["prompt"] + row["canonical_solution"]
    names = [
        node.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and len(node.id) > 1
    ]
    if not names:
        return None
    request = f"Repeat this Python code, but rename the variable `{names[0]}` to `renamed`."
    return f"{request} Change nothing else.\n\n```python\n{source.strip()}\n```"


def long_prompt(
    encode: Callable[[str], list[int]], rows: list[Any], first: int, num_tokens: int
) -> list[int]:
    """Return solved problems, as many as fit, and one to solve; `first` turns their order."""
    turned = rows[7 * first :] + rows[: 7 * first]
    asked = f"Now solve this problem step by step.\n{turned[0]['question']}"
    solved: list[str] = []
    ids = encode(asked)
    # The rows are fewer tokens than the context: they are gone through again until it is full.
    for row in (turned[1:] * 4)[: 4 * len(rows)]:
        solved.append(f"Problem: {row['question']}\nSolution: {row['answer']}\n")
        longer = encode("\n".join((*solved, asked)))
        if len(longer) > num_tokens:
            break
        ids = longer
    return ids


def rare_texts(target: Path, kept: Iterable[int], limit: int) -> list[str]:
    """Return requests to repeat words that are one token each and that no map holds."""
    vocabulary = load_tokenizer(target).get_vocab(with_added_tokens=False)
    held = frozenset(kept)
    words = [
        token[1:]
        for token, target_id in sorted(vocabulary.items(), key=lambda item: item[1])
        if target_id not in held and token.startswith("\u0120") and len(token) > 6
        and token[1:].isascii() and token[1:].isalpha() and token[1:].islower()
    ]  # fmt: skip
    step = max(1, len(words) // (NUM_RARE_WORDS * limit))
    texts = []
    for number in range(limit):
        some = words[number * step :: step * limit][:NUM_RARE_WORDS]
        texts.append(f"Repeat this list of words three times: {', '.join(some)}.")
    return texts
