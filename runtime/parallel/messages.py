"""What the last stage tells the stages before it, as one row of integers.

The first numbers state every width, so a receiver that expects another shape notices before it
reads a value and no one waits for columns that were never sent. A message holds the rows of one
forward and, for each request in them, what became of its rows before: stages keep the length of
every slot themselves and refuse a message that does not follow from it.

Legend: N rows, B requests, T blocks of the longest table, A captured layer ids.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

MAGIC = 0x5DC7
VERSION = 2
NUM_HEADER = 15


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
        batch: rows; every optional field is absent.
        news: one for each request of the batch, in order.
        aux_layer_ids: states that the last stage wants.
    """

    kind: Kind
    round_number: int
    engine: int = 0
    num_kv_blocks: int = 0
    kv_block_size: int = 0
    batch: PreparedBatch | None = None
    news: tuple[SlotNews, ...] = ()
    aux_layer_ids: tuple[int, ...] = ()


def encode(message: StageInput) -> torch.Tensor:
    """Return int64 [NUM_HEADER + ...] on the CPU; the first number is the whole length."""
    batch = message.batch
    sizes = (0, 0, 0, 0, 0)
    if batch is not None:
        tables = batch.block_tables_BT.shape
        sizes = (batch.num_rows, *tables, batch.max_length, batch.rows_per_request or 0)
    parts = [torch.tensor(message.aux_layer_ids, dtype=torch.int64)]
    parts += [
        torch.tensor([n.slot, n.start, n.num_rows, n.num_final_rows], dtype=torch.int64)
        for n in message.news
    ]
    if batch is not None:
        parts += [_flat(batch.ids_target_N), _flat(batch.positions_N), _flat(batch.slots_N)]
        parts += [_flat(batch.row_request_N), _flat(batch.block_tables_BT)]
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
    num_aux, num_news, num_rows, num_tables, width, max_length, dense = head[8:]
    sizes = [num_aux, 4 * num_news, num_rows, num_rows, num_rows, num_rows, num_tables * width]
    if min(sizes) < 0 or NUM_HEADER + sum(sizes) != numbers.numel():
        raise DiagnosticError(_not_a_message(f"{numbers.numel()} numbers for parts of {sizes}"))
    parts = torch.split(numbers[NUM_HEADER:], sizes)
    aux, news, ids, positions, slots, requests, tables = parts
    batch = None
    if kind == Kind.RUN:
        batch = PreparedBatch(
            ids_target_N=ids.to(device),
            positions_N=positions.to(device),
            slots_N=slots.to(device),
            row_request_N=requests.to(device, torch.int32),
            block_tables_BT=tables.view(num_tables, width).to(device, torch.int32),
            max_length=max_length,
            rows_per_request=dense or None,
        )
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


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu", torch.int64).flatten()


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
