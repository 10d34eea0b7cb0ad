"""What the last stage tells the stages before it, as one row of integers.

The first numbers state every width, so a receiver that expects another shape notices before it
reads a value and no one waits for columns that were never sent. A message holds the rows of one
forward and, for each request in them, what became of its rows before: stages keep the length of
every slot themselves and refuse a message that does not follow from it.

Legend: N rows, B requests, T blocks of the longest table, U tiles of rows, A captured layer ids.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from runtime.batch import PreparedBatch
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

MAGIC = 0x5DC7
VERSION = 3
NUM_HEADER = 16
_VECTOR = 2  # numbers of 16 bytes


class Kind(enum.IntEnum):
    """What a stage is to do."""

    RUN = 1
    STOP = 2
    ALIVE = 3
    """Nothing: the last stage is there and has no work."""
    OPEN = 4
    """Make a KV pool for an engine."""
    CLOSE = 5
    """Give an engine's KV pool up."""
    KV = 6
    """An order about KV that goes to another server; it comes as bytes behind the numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotNews:
    """What a stage must know of one request before it runs its rows.

    Args:
        slot: of the request.
        start: position of its first row in this message.
        num_rows: its rows in this message.
        num_final_rows: how many of its rows in the message before became final (accepted drafts
            and the token before them; all rows of a prefill chunk); -1: the request is new in its
            slot, or starts again after it was preempted.
    """

    slot: int
    start: int
    num_rows: int
    num_final_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageInput:
    """One message to a stage before the last.

    Args:
        kind: what to do; only RUN has rows.
        round_number: counts messages, from 0.
        engine: which engine of the last stage it is for; each has a KV pool and slots of its own.
        num_kv_blocks: of the pool to make; 0 in messages that open none.
        kv_block_size: tokens of a block of it.
        batch: rows; of the optional fields only tiles and rows per request may be there.
        news: one for each request of the batch, in order.
        aux_layer_ids: states that the last stage wants.
        order: of KV messages, beside the numbers.
    """

    kind: Kind
    round_number: int
    engine: int = 0
    num_kv_blocks: int = 0
    kv_block_size: int = 0
    batch: PreparedBatch | None = None
    news: tuple[SlotNews, ...] = ()
    aux_layer_ids: tuple[int, ...] = ()
    order: bytes = b""


def encode(message: StageInput) -> torch.Tensor:
    """Return int64 [NUM_HEADER + ...] on the CPU; the first number is the whole length."""
    batch = message.batch
    sizes = (0, 0, 0, 0, 0, 0)
    news = [n for item in message.news for n in astuple(item)]
    parts = [torch.tensor([*message.aux_layer_ids, *news], dtype=torch.int64)]
    if batch is not None:
        tables = batch.block_tables_BT.shape
        tiles_U2 = batch.block_tables_BT[:0] if batch.tiles_U2 is None else batch.tiles_U2
        num_tiles = tiles_U2.shape[0]
        dense = batch.rows_per_request or 0
        sizes = (batch.num_rows, *tables, num_tiles, batch.max_length, dense)
        rows = [batch.ids_target_N, batch.positions_N, batch.slots_N, batch.row_request_N]
        rows += [batch.block_tables_BT, tiles_U2]
        # One copy from the device for all of them.
        parts.append(torch.cat([x.detach().flatten().long() for x in rows]).cpu())
    length = NUM_HEADER + sum(part.numel() for part in parts)
    header = [length, MAGIC, VERSION, int(message.kind), message.round_number]
    header += [message.engine, message.num_kv_blocks, message.kv_block_size]
    header += [len(message.aux_layer_ids), len(message.news), *sizes]
    return torch.cat([torch.tensor(header, dtype=torch.int64), *parts])


def decode(numbers: torch.Tensor, *, device: torch.device) -> StageInput:
    """Return the message that `encode` made.

    Args:
        numbers: int64 on the CPU.
        device: where the batch's tensors go.

    Raises:
        DiagnosticError: SD853, the numbers are no message of this version.
    """
    head: list[int] = numbers[:NUM_HEADER].tolist()
    is_known = len(head) == NUM_HEADER and head[:3] == [numbers.numel(), MAGIC, VERSION]
    if not is_known or head[3] not in tuple(Kind):
        raise DiagnosticError(_not_a_message(f"{numbers.numel()} numbers that begin {head[:3]}"))
    kind, round_number, engine, num_kv_blocks, kv_block_size = head[3:8]
    num_aux, num_news, num_rows, num_tables, width, num_tiles, max_length, dense = head[8:]
    sizes = [num_rows, num_rows, num_rows, num_rows, num_tables * width, 2 * num_tiles]
    num_host = NUM_HEADER + num_aux + 4 * num_news
    if min(num_aux, num_news, *sizes) < 0 or num_host + sum(sizes) != numbers.numel():
        raise DiagnosticError(_not_a_message(f"{numbers.numel()} numbers for parts of {sizes}"))
    batch = None
    if kind == Kind.RUN:
        ids, positions, slots, requests, tables, tiles = _to_device(
            torch.split(numbers[num_host:], sizes), device
        )
        batch = PreparedBatch(
            ids_target_N=ids,
            positions_N=positions,
            slots_N=slots,
            row_request_N=requests.int(),
            block_tables_BT=tables.view(num_tables, width).int(),
            max_length=max_length,
            rows_per_request=dense or None,
            tiles_U2=tiles.view(num_tiles, 2).int() if num_tiles else None,
        )
    aux, news = torch.split(numbers[NUM_HEADER:num_host], [num_aux, 4 * num_news])
    return StageInput(
        kind=Kind(kind),
        round_number=round_number,
        engine=engine,
        num_kv_blocks=num_kv_blocks,
        kv_block_size=kv_block_size,
        batch=batch,
        news=tuple(
            SlotNews(slot=slot, start=start, num_rows=rows, num_final_rows=final)
            for slot, start, rows, final in news.view(-1, 4).tolist()
        ),
        aux_layer_ids=tuple(aux.tolist()),
    )


class SlotLengths:
    """The computed positions of every slot on one stage, kept from the messages alone."""

    def __init__(self) -> None:
        """Know no request."""
        self._spans: dict[int, tuple[int, int]] = {}  # slot -> start and rows of its last message

    def apply(self, news: tuple[SlotNews, ...]) -> None:
        """Take a message's news in.

        Raises:
            DiagnosticError: SD854, a request goes on from another length than this stage has.
        """
        for item in news:
            if item.num_final_rows >= 0:
                start, rows = self._spans.get(item.slot, (0, 0))
                expected = start + item.num_final_rows
                if item.num_final_rows > rows or item.start != expected:
                    raise DiagnosticError(_out_of_step(item, expected, rows))
            self._spans[item.slot] = (item.start, item.num_rows)

    def ends(self) -> dict[int, int]:
        """Return slot -> one past the last position that was computed for it."""
        return {slot: start + rows for slot, (start, rows) in self._spans.items()}


def _to_device(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy int64 parts in one piece; each begins where kernels load vectors from."""
    padded = [torch.nn.functional.pad(part, (0, -part.numel() % _VECTOR)) for part in parts]
    pieces = torch.split(torch.cat(padded).to(device), [piece.numel() for piece in padded])
    return [piece[: part.numel()] for piece, part in zip(pieces, parts, strict=True)]


def _not_a_message(found: str) -> Diagnostic:
    return diagnose(
        "SD853",
        where="pipeline",
        message="a stage received something else than the message it expects",
        expected=f"a message of version {VERSION}",
        found=found,
    )


def _out_of_step(item: SlotNews, expected: int, rows: int) -> Diagnostic:
    return diagnose(
        "SD854",
        where=f"pipeline, slot {item.slot}",
        message=f"a request goes on at position {item.start} after {item.num_final_rows} of its "
        f"{rows} rows became final, this stage stands at {expected}",
        expected=expected,
        found=item.start,
    )
