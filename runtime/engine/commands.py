"""What the first rank tells the others before a step, and how each carries it out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import torch

from runtime.config import dtype_name
from runtime.engine.engine import Engine
from runtime.engine.request import RequestInput
from runtime.engine.role_rank import RoleNews, RoleRank


class Add(msgspec.Struct, tag="add", frozen=True, kw_only=True):
    """Queue a request; its seed is set."""

    request: RequestInput


class Abort(msgspec.Struct, tag="abort", frozen=True, kw_only=True):
    """Drop a request."""

    request_id: str


class Flush(msgspec.Struct, tag="flush", frozen=True, kw_only=True):
    """Clear logical state."""


class News(msgspec.Struct, tag="news", frozen=True, kw_only=True):
    """What the other side of a prefill or decode server said."""

    items: list[RoleNews]


Command: TypeAlias = Add | Abort | Flush | News


def _plain(value: object) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_COMMANDS = msgspec.msgpack.Decoder(list[Command])


def pack(value: object) -> bytes:
    """Return commands, or anything else that ranks tell each other, as bytes."""
    return _ENCODER.encode(value)


def unpack(payload: bytes) -> list[Command]:
    """Return the commands of a step; none of no bytes."""
    return _COMMANDS.decode(payload) if payload else []


def obey(engine: Engine | RoleRank, command: Command) -> None:
    """Carry a command out on another rank than the first."""
    if isinstance(command, Add):
        engine.add_request(command.request)
    elif isinstance(command, Abort):
        engine.abort(command.request_id)
    elif isinstance(command, News):
        assert isinstance(engine, RoleRank), "only engines of a role have peers"
        engine.port.hear(command.items)
    else:
        engine.flush_cache()
