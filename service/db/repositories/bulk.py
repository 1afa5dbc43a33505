"""Helpers for statements on many rows, in chunks of bounded size and without ORM objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.db.models import Base

CHUNK = 500
"""Number of ids per statement. SQLite accepts 32,766 values; PostgreSQL accepts twice as many."""

T = TypeVar("T")


def in_chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def change(row: Base, **columns: Any) -> None:
    """Set the columns whose values differ. Unchanged columns are not set, because setting a column
    is slower than comparing its value."""
    for name, value in columns.items():
        if getattr(row, name) != value:
            setattr(row, name, value)


def table_of(kind: type[Base]) -> Table:
    table = kind.__table__
    assert isinstance(table, Table)
    return table


def insert_of(session: Session) -> Any:
    """Return the database's `insert`, whose statements can ignore conflicts."""
    is_postgres = session.get_bind().dialect.name == "postgresql"
    return postgresql.insert if is_postgres else sqlite.insert
