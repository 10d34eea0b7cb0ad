"""Rows of parquet and Arrow files and zstd streams, through their optional packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap.documents import CHAT_FIELDS, PAIR_FIELDS, TEXT_FIELDS

if TYPE_CHECKING:
    from specctl.tokenmap.readers import Reading

_ROWS = 1024


class TableRefusedError(Exception):
    """pyarrow does not read a file as a table."""


def read_rows(path: str, reading: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a parquet, Arrow or Feather file, `_ROWS` rows in memory at a time.

    Only the columns that may hold a text are read.

    Raises:
        DiagnosticError: SD435 without pyarrow.
        TableRefusedError: for a file that pyarrow refuses.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise _missing("pyarrow", path) from error
    try:
        number = 0
        for batch in _batches(path, reading):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}#row{number}", row
    except pa.ArrowException as error:
        raise TableRefusedError(path) from error


def _batches(path: str, reading: Reading) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if Path(path).suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow.names, reading)
            yield from file.iter_batches(batch_size=_ROWS, columns=columns)
        return
    with pa.memory_map(path) as source:
        try:
            table = pa.ipc.open_file(source)
            parts = (table.get_batch(i) for i in range(table.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            table = pa.ipc.open_stream(source)
            parts = iter(table)
        columns = _columns(table.schema.names, reading)
        for part in parts:
            chosen = part.select(columns)
            for start in range(0, chosen.num_rows, _ROWS):
                yield chosen.slice(start, _ROWS)


def _columns(names: list[str], reading: Reading) -> list[str]:
    wanted = set(reading.fields or (*TEXT_FIELDS, *CHAT_FIELDS, *PAIR_FIELDS))
    wanted.add(reading.language_field or "")
    return [name for name in names if name in wanted]


def open_zstd(path: str) -> AbstractContextManager[IO[bytes]]:
    """Open a zstd file for reading.

    Raises:
        DiagnosticError: SD435 when no package reads it.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise _missing("pyarrow", path) from error
    import io

    stream = pa.CompressedInputStream(pa.OSFile(path), "zstd")
    return cast("AbstractContextManager[IO[bytes]]", io.BufferedReader(stream, 1 << 20))


def _missing(name: str, where: str) -> DiagnosticError:
    from specctl.tokenmap.readers import missing_package

    return missing_package(name, where)
