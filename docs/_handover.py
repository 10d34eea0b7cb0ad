"""docs/reference/handover.md: frames between decode and prefill servers, and their time limits."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from runtime.disagg.handshake import PROTOCOL_VERSION
from runtime.disagg.limits import BEATS_PER_SILENCE, Limits

# Read and not imported: frames carry tensors, and this page needs no torch.
FRAMES = (Path(__file__).parent.parent / "runtime" / "disagg" / "frames.py").read_text("utf-8")
Table = Callable[[Iterable[str], Iterable[Iterable[str]]], list[str]]

INTRO = f"""
The decode server dials the prefill server over TCP. Each frame is four bytes of length, most
significant first, then a msgpack map; `type` names the kind. KV does not travel here: the prefill
server writes it into the decode server's memory through the transport.

Version {PROTOCOL_VERSION} of the protocol. Order on a connection: `hello` of the decode side,
`hello` of the prefill side in answer, `offer` of the decode side, then any number of prompts.
Either side refuses the other with SD860 when a fact differs, and prints what both said. Facts are
compared in the order of the `hello`: protocol, transport, then those of the model, the draft, the
kernels and the settings; layouts may differ.

A prefill server of several processes names in its `hello` where its other ranks listen. The decode
server greets each of them too, with the same `session`, before it offers its pools: each must be a
rank of that server and layout (SD870) and compute the same bits (SD860). These connections carry
beats only, so that every process that writes hears, and is heard of, by itself. Prompts and answers
go over the connection of rank 0. `offer` lists the pool of every rank of the decode server.

For each `prefill` the prefill side answers with one of `prefilled`, `failed` or, after an `abort`,
`released`. After any of the three it writes nothing more for that request, and the decode server's
blocks are free to be used again.

A side that is stopped sends what is queued, then `leaving` on every connection, and ends them: its
writes are over. It is not lost, and the other side logs no SD861 for it; a decode server still has
one prefill server less, which its `/health` says.
"""

LOST = f"""
## Time limits

Both sides send a `beat` {BEATS_PER_SILENCE} times in `silence_s` when they have nothing else to
say. A connection that ends, or on which nothing comes for `silence_s`, is lost. The blocks of its
requests stay untouched for `fence_s`, and for `silence_s` and `linger_s` more where the peer may
live on (it fell silent, or did not acknowledge an abort): a prefill server that hears nothing for
`silence_s` starts no write any more, and one that stands on a dead network arrives within
`linger_s` or not at all (30 with `mooncake`, 10 with `nixl`, 0 within a machine; the carrier's own,
no setting). Then the request is asked of another peer. `silence_s` is part of the handshake.
Of several ranks the first that is lost ends all: the others get `fence_s` to end by themselves,
then their connections are cut, and they count as peers that may live on.

What this does not cover: a machine between the two that ends a connection with a reset while the
prefill server goes on writing past `fence_s`, a prefill server that is suspended in the middle of
one write and resumed after the fence, and a `nixl` transfer that is given up after
`--transfer-timeout-s` although its bytes still move.
"""


def handover_page(notice: str, table: Table) -> str:
    """Return the page."""
    lines = ["# Frames between decode and prefill servers", "", notice, "", INTRO.strip(), ""]
    for kind in _kinds():
        lines += [f"## `{_tag(kind)}`", "", _summary(kind), ""]
        rows = [(f"`{name}`", f"`{text}`") for name, text in _annotations(kind)]
        lines += [*table(("field", "type"), rows), ""] if rows else []
    lines += [*LOST.strip().splitlines(), ""]
    defaults = Limits()
    lines += table(
        ("limit", "default"),
        ((f"`{item.name}`", f"{getattr(defaults, item.name):g}") for item in fields(Limits)),
    )
    return "\n".join(lines) + "\n"


def _kinds() -> list[ast.ClassDef]:
    """Return the classes that have a tag: frames, in the order of the module."""
    classes = [node for node in ast.parse(FRAMES).body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if _tag(node)]


def _tag(kind: ast.ClassDef) -> str:
    tags = [word.value for word in kind.keywords if word.arg == "tag"]
    return str(ast.literal_eval(tags[0])) if tags else ""


def _summary(kind: ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(kind) or "").partition("\n\n")[0].split())


def _annotations(kind: ast.ClassDef) -> list[tuple[str, str]]:
    """Return fields and their types as they are written."""
    return [
        (ast.unparse(node.target), ast.unparse(node.annotation).replace("|", "or"))
        for node in kind.body
        if isinstance(node, ast.AnnAssign)
    ]
