"""The options of `build-token-map` that say what is counted and how, and what they become."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from specctl.tokenmap.count_corpus import HELD_OUT, CorpusSpec, CountOptions
from specctl.tokenmap.documents import ASSISTANT_ROLES

_STDIN = "-"


class CountEngine(str, Enum):
    """What runs the counting."""

    local = "local"
    ray = "ray"


class CountMethod(str, Enum):
    """How tokens are counted; both give the same counts."""

    auto = "auto"
    batch = "batch"


class TokenIdType(str, Enum):
    """Element types of raw files of token ids."""

    u16 = "u16"
    u32 = "u32"
    i64 = "i64"


Corpus = Annotated[
    list[str],
    typer.Argument(
        metavar="CORPUS...",
        help="Files, directories, quoted patterns, NAME=PATH for a domain, - for standard input.",
    ),
]
Field = Annotated[
    list[str] | None,
    typer.Option(
        "--field", metavar="NAME", help="Field of jsonl lines or rows; again to join several."
    ),
]
Role = Annotated[
    list[str] | None,
    typer.Option(
        "--role", metavar="NAME", help="Count chat messages of this role only; repeatable."
    ),
]
AssistantOnly = Annotated[
    bool, typer.Option("--assistant-only", help="Count what assistants say in chats only.")
]
ChatTemplate = Annotated[
    bool,
    typer.Option(
        "--chat-template",
        help="Render messages with the target's template; with roles each such turn is a document.",
    ),
]
IdType = Annotated[
    TokenIdType | None,
    typer.Option("--id-type", help="Type of the token ids in `.bin` files, little-endian."),
]
LanguageField = Annotated[
    str | None,
    typer.Option(
        "--language-field", metavar="NAME", help="Field that names the language of a document."
    ),
]
HeldOut = Annotated[
    list[str] | None,
    typer.Option(
        "--held-out",
        metavar="PATH|X",
        help=f"Measure coverage on these files, or on this share of documents ({HELD_OUT:g}).",
    ),
]
Counts = Annotated[
    Path | None,
    typer.Option(
        "--counts",
        metavar="FILE",
        help="Keep the counts; used again for the same corpus, gone on with when interrupted.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Processes that count; default: one for each core."),
]
Method = Annotated[
    CountMethod,
    typer.Option("--method", help="auto: the fast way where it is exact; batch: text by text."),
]
Engine = Annotated[
    CountEngine, typer.Option("--engine", help="local processes, or Ray for many machines.")
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="ADDRESS", help="Ray cluster; default: a local one."),
]


@contextmanager
def with_standard_input(corpus: list[str]) -> Iterator[list[str]]:
    """Yield the corpus with `-` and `NAME=-` as a file: text is read more than once.

    What begins with a brace is jsonl. Nothing is kept in memory; the file goes when the body ends.
    """
    marked = [argument for argument in corpus if argument.rpartition("=")[2] == _STDIN]
    if not marked:
        yield corpus
        return
    if len(marked) > 1:
        raise typer.BadParameter("standard input can be read once", param_hint="CORPUS")
    with tempfile.TemporaryDirectory(prefix="specctl-stdin-") as directory:
        first = sys.stdin.buffer.read(1)
        path = Path(directory, "stdin.jsonl" if first == b"{" else "stdin.txt")
        with path.open("wb") as stream:
            stream.write(first)
            shutil.copyfileobj(sys.stdin.buffer, stream)
        name = marked[0].rpartition("=")[0] or "stdin"
        yield [f"{name}={path}" if argument == marked[0] else argument for argument in corpus]


def corpus_spec(
    *,
    corpus: list[str],
    field: list[str] | None,
    role: list[str] | None,
    assistant_only: bool,
    chat_template: bool,
    id_type: TokenIdType | None,
    language_field: str | None,
    held_out: list[str] | None,
) -> CorpusSpec:
    """Return what is to be counted; roles that contradict each other are wrong usage."""
    if assistant_only and role:
        raise typer.BadParameter("`--role` names other roles", param_hint="--assistant-only")
    share, paths = HELD_OUT, []
    for text in held_out or ():
        number = _share(text)
        if number is None:
            paths.append(text)
        elif len(held_out or ()) > 1:
            raise typer.BadParameter(
                "give one share of documents, or files", param_hint="--held-out"
            )
        else:
            share = number
    return CorpusSpec(
        sources=tuple(corpus),
        fields=tuple(field or ()),
        roles=ASSISTANT_ROLES if assistant_only else tuple(role or ()),
        uses_chat_template=chat_template,
        id_type=None if id_type is None else id_type.value,
        language_field=language_field,
        held_out=share,
        held_out_sources=tuple(paths),
    )


def _share(text: str) -> float | None:
    """Return a share of documents, None for a path; a number that is no share is wrong usage."""
    if Path(text).exists():
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if not 0 <= number < 1:
        raise typer.BadParameter(
            f"`{text}` is not a share of documents from 0 to below 1", param_hint="--held-out"
        )
    return number


def count_options(
    *,
    counts: Path | None,
    workers: int | None,
    method: CountMethod,
    engine: CountEngine,
    ray_address: str | None,
) -> CountOptions:
    """Return how it is counted; an address without Ray is wrong usage."""
    if ray_address is not None and engine is not CountEngine.ray:
        raise typer.BadParameter("it needs `--engine ray`", param_hint="--ray-address")
    if counts is not None and not counts.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory `{counts.parent}`", param_hint="--counts")
    return CountOptions(
        workers=workers,
        counts=counts,
        method=method.value,
        engine=engine.value,
        ray_address=ray_address,
    )
