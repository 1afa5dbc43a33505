"""The media of jobs: pictures, histograms and other values that are not numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from sqlalchemy.orm import Session

from dray import views
from dray.media.kinds import MAX_JOB_BYTES, MAX_RECORDS, MediaKind
from service.db.models import MediaRow
from service.db.repositories.telemetry import media as repository
from service.db.session import Database
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import ArtifactNotFound, BadCursor
from service.ingest.media import storage_key
from service.jobs.service import found


@dataclass(frozen=True)
class MediaSelection:
    """Selects records of a job; None selects all."""

    kind: MediaKind | None = None
    key: str | None = None
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class StoredMedia:
    """A file of a record."""

    key: str
    """Its key in the storage."""
    file: views.MediaFile


class MediaListing:
    """The use cases. Each raises NotFound if the job does not exist."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def overview(self, job_id: str) -> views.MediaOverview:
        """Return the series of a job, and how much it has reported."""

        def work(session: Session) -> views.MediaOverview:
            found(session, job_id)
            totals = repository.seen_totals(session, job_id)
            items = [
                views.MediaSeries(
                    kind=MediaKind(kind), key=key, rank=rank, steps=[row.step for row in rows]
                )
                for (rank, kind, key), rows in groupby(
                    repository.positions(session, job_id), key=lambda row: tuple(row[:3])
                )
            ]
            return views.MediaOverview(
                items=items,
                num_records=totals.num_records if totals else 0,
                num_bytes=totals.num_bytes if totals else 0,
                num_left_out=totals.num_left_out if totals else 0,
                max_records=MAX_RECORDS,
                max_bytes=MAX_JOB_BYTES,
            )

        return await self._database.read(work)

    async def page(
        self,
        job_id: str,
        wanted: MediaSelection,
        *,
        limit: int = 100,
        cursor: str | None = None,
    ) -> views.MediaPage:
        """Return records in the order of the ranks, kinds, keys and steps. Raises BadCursor for a
        cursor from another listing."""
        scope = f"media:{job_id}:{wanted}"
        after = None if cursor is None else _position(decode_cursor(scope, cursor))

        def work(session: Session) -> views.MediaPage:
            found(session, job_id)
            if wanted.key is not None and not storable(wanted.key):
                return views.MediaPage(items=[])
            rows = repository.records(session, job_id, **vars(wanted), after=after, limit=limit + 1)
            more = len(rows) > limit
            return views.MediaPage(
                items=[_view(row) for row in rows[:limit]],
                next_cursor=encode_cursor(scope, _of(rows[limit - 1])) if more else None,
            )

        return await self._database.read(work)

    async def spread(
        self, job_id: str, kind: MediaKind, key: str, rank: int, number: int
    ) -> views.MediaPage:
        """Return at most `number` records of a series at equal distances, with the first and the
        last."""

        def work(session: Session) -> views.MediaPage:
            found(session, job_id)
            if not storable(key):
                return views.MediaPage(items=[])
            rows = repository.spread(session, job_id, (rank, kind.value, key), number)
            return views.MediaPage(items=[_view(row) for row in rows])

        return await self._database.read(work)

    async def file(self, job_id: str, sha256: str) -> StoredMedia:
        """Return a file of the job's media. Raises ArtifactNotFound if there is no such file."""

        def work(session: Session) -> StoredMedia:
            found(session, job_id)
            row = repository.file(session, job_id, sha256) if storable(sha256) else None
            if row is None:
                raise ArtifactNotFound(f"the job {job_id} has no media file {sha256[:80]!r}")
            file = views.MediaFile(
                sha256=row.sha256, size_bytes=row.size_bytes, media_type=row.media_type
            )
            return StoredMedia(storage_key(job_id, row.sha256), file)

        return await self._database.read(work)


def _of(row: MediaRow) -> repository.Position:
    return row.rank, row.kind, row.key, row.step


def _position(given: object) -> repository.Position:
    if isinstance(given, list) and [type(part) for part in given] == [int, str, str, int]:
        rank, kind, key, step = given
        if 0 <= rank < 2**63 and 0 <= step < 2**63 and storable(kind) and storable(key):
            return rank, kind, key, step
    raise BadCursor("the cursor does not belong to this listing")


def _view(row: MediaRow) -> views.MediaRecord:
    return views.MediaRecord.model_validate(
        {
            "key": row.key,
            "rank": row.rank,
            "step": row.step,
            "attempt": row.attempt,
            "time": row.created_at,
            "value": row.value,
        }
    )
