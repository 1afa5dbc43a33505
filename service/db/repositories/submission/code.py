"""SQL for uploaded code: its descriptions, packs and parts.

A pack is deleted when no code uses it and its parts have not been requested for some time. Before
new code uses a stored part, the part's pack must be renewed. On PostgreSQL, renewing also waits for
an ongoing deletion of the pack to finish.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import delete, exists, func, insert, select, update
from sqlalchemy.orm import Session

from service.db.models import CodePackRow, CodePartRow, CodeRow, CodeUseRow, JobRow, ScheduleRow
from service.db.repositories.bulk import insert_of

T = TypeVar("T")
MOST_AT_ONCE = 5000
"""Maximum number of parameters in one statement."""


@dataclass(frozen=True)
class PartLocation:
    """The location of a part in the storage."""

    pack: str
    start: int
    size_bytes: int


def get(session: Session, owner: str, code_id: str) -> CodeRow | None:
    return session.get(CodeRow, (owner, code_id))


def use(session: Session, owner: str, code_id: str, now: datetime) -> CodeRow | None:
    """Return the code and restart its retention period; None if the code does not exist."""
    session.execute(
        update(CodeRow).where(CodeRow.owner == owner, CodeRow.id == code_id).values(used_at=now)
    )
    return session.get(CodeRow, (owner, code_id), populate_existing=True)


def locations(session: Session, owner: str, parts: Collection[str]) -> dict[str, PartLocation]:
    """Return the locations of these parts, keyed by hash. Parts that the owner has not uploaded are
    omitted."""
    found: dict[str, PartLocation] = {}
    for some in _batches(sorted(parts), MOST_AT_ONCE):
        rows = session.execute(
            select(
                CodePartRow.sha256, CodePartRow.pack, CodePartRow.start, CodePartRow.size_bytes
            ).where(CodePartRow.owner == owner, CodePartRow.sha256.in_(some))
        )
        found |= {row[0]: PartLocation(row[1], row[2], row[3]) for row in rows}
    return found


def renew(session: Session, packs: Collection[str], now: datetime) -> set[str]:
    """Restart the retention period of the packs that are not being deleted, and return these
    packs."""
    kept: set[str] = set()
    for some in _batches(sorted(packs), MOST_AT_ONCE):
        kept |= set(
            session.scalars(
                update(CodePackRow)
                .where(CodePackRow.key.in_(some), CodePackRow.deleted_at.is_(None))
                .values(used_at=now)
                .returning(CodePackRow.key)
            )
        )
    return kept


def insert_pack(session: Session, key: str, owner: str, size_bytes: int, now: datetime) -> None:
    """Add the row of a pack before the pack is written, so that unfinished packs can be found
    later."""
    session.execute(
        insert(CodePackRow).values(
            key=key, owner=owner, size_bytes=size_bytes, used_at=now, deleted_at=None
        )
    )


def insert_parts(session: Session, owner: str, parts: Mapping[str, PartLocation]) -> None:
    """Add the parts of a written pack that no other pack contains. Repeating this is harmless."""
    insert_ = insert_of(session)
    rows: list[dict[str, Any]] = [
        {
            "owner": owner,
            "sha256": sha256,
            "pack": location.pack,
            "start": location.start,
            "size_bytes": location.size_bytes,
        }
        for sha256, location in sorted(parts.items())
    ]
    for some in _batches(rows, MOST_AT_ONCE // 5):
        session.execute(insert_(CodePartRow).values(list(some)).on_conflict_do_nothing())


def insert_code(session: Session, row: CodeRow, packs: Iterable[str]) -> CodeRow | None:
    """Add code whose upload is complete, and its packs. Returns the row of the code, which another
    request might have added."""
    values = {column.name: getattr(row, column.name) for column in CodeRow.__table__.columns}
    insert_ = insert_of(session)
    session.execute(insert_(CodeRow).values(values).on_conflict_do_nothing())
    uses = [{"owner": row.owner, "code": row.id, "pack": pack} for pack in sorted(set(packs))]
    for some in _batches(uses, MOST_AT_ONCE // 3):
        session.execute(insert_(CodeUseRow).values(list(some)).on_conflict_do_nothing())
    return session.get(CodeRow, (row.owner, row.id), populate_existing=True)


def delete_unused(session: Session, before: datetime) -> None:
    """Delete code that no job and no schedule uses and that was last used before this time."""
    unused = (
        ~exists().where(row.code == CodeRow.id, row.owner == CodeRow.owner)
        for row in (JobRow, ScheduleRow)
    )
    session.execute(delete(CodeRow).where(CodeRow.used_at < before, *unused))


def begin_deleting_packs(session: Session, before: datetime, now: datetime) -> None:
    """Start deleting packs that no code uses and that were last used before `before`: mark the
    packs, and delete their parts' rows."""
    in_use = exists().where(CodeUseRow.pack == CodePackRow.key)
    doomed = list(
        session.scalars(
            update(CodePackRow)
            .where(CodePackRow.used_at < before, CodePackRow.deleted_at.is_(None), ~in_use)
            .values(deleted_at=now)
            .returning(CodePackRow.key)
        )
    )
    for some in _batches(doomed, MOST_AT_ONCE):
        session.execute(delete(CodePartRow).where(CodePartRow.pack.in_(some)))


def packs_being_deleted(session: Session, limit: int) -> list[str]:
    query = select(CodePackRow.key).where(CodePackRow.deleted_at.is_not(None)).limit(limit)
    return list(session.scalars(query))


def end_deleting_packs(session: Session, keys: Sequence[str]) -> None:
    """Delete the rows of packs whose objects have been deleted."""
    session.execute(delete(CodePackRow).where(CodePackRow.key.in_(keys)))


def unused_bytes(session: Session, owner: str) -> int:
    """Return the total bytes of an owner's packs that no code uses."""
    in_use = exists().where(CodeUseRow.pack == CodePackRow.key)
    query = select(func.coalesce(func.sum(CodePackRow.size_bytes), 0))
    return int(session.scalar(query.where(CodePackRow.owner == owner, ~in_use)) or 0)


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
