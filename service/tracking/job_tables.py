"""Writes lists of jobs to files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import BinaryIO

from sqlalchemy.orm import Session

from dray import views
from dray.filters import JobTable, JobTableFile
from service.db.session import Database
from service.domain.errors import InvalidSearch
from service.domain.tracking.columns import TableColumn, parse_columns
from service.jobs import listing
from service.tracking.table_files import CsvWriter, ParquetWriter, TableWriter

MAX_JOBS = 100_000
MAX_BYTES = 256 * 2**20
"""Maximum size of the values. Parquet is written from memory."""
COLUMNS = "/columns"


class JobTables:
    """Use case: the file with a row for each job of a list."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def write(self, wanted: JobTableFile, file: BinaryIO) -> int:
        """Write the list to a file that is open for binary writing. Returns the size of the file in
        bytes.

        Raises InvalidSearch if the search expression or a column can't be parsed, if arrays are
        collapsed, or if the list has more than `MAX_JOBS` jobs or values of more than `MAX_BYTES`.
        A job whose position in the order changes meanwhile is written once or not at all.
        """
        columns = parse_columns(wanted.columns)
        listing.refuse_collapsed(wanted)
        writer = await asyncio.to_thread(_writer, wanted, columns, file)
        table = JobTable.model_construct(**wanted.model_dump(exclude={"format"}))
        known: set[str] = set()
        size, cursor, is_last = 0, None, not listing.can_match(wanted)
        if not is_last:
            await self._database.read(lambda session: _refuse_long(session, table))
        while not is_last:
            page = await self._page(table, cursor)
            items = [one for one in page.items if one.id not in known]
            known.update(one.id for one in items)
            size += await asyncio.to_thread(writer.add, items)
            if size > MAX_BYTES:
                raise InvalidSearch(
                    f"the values of the columns take more than {MAX_BYTES // 2**20} MiB",
                    pointer=COLUMNS,
                    hint="leave out columns that contain large objects, or narrow the list down",
                )
            cursor, is_last = page.next_cursor, page.next_cursor is None
        await asyncio.to_thread(writer.finish)
        return file.tell()

    async def _page(self, table: JobTable, cursor: str | None) -> views.JobPage:
        after = listing.position(table, cursor)
        return await self._database.read(
            lambda session: listing.page(session, table, limit=listing.MAX_PAGE, after=after)
        )


def _writer(wanted: JobTableFile, columns: Sequence[TableColumn], file: BinaryIO) -> TableWriter:
    """Return the writer of the format. The first use of Parquet imports pyarrow."""
    return CsvWriter(columns, file) if wanted.format == "csv" else ParquetWriter(columns, file)


def _refuse_long(session: Session, table: JobTable) -> None:
    if len(listing.owners(session, table, limit=MAX_JOBS + 1)) > MAX_JOBS:
        raise InvalidSearch(
            f"more than {MAX_JOBS:,} jobs match",
            hint="narrow the list down with a time, a label or an owner",
        )
