"""Use cases for files with examples that users upload, to which documents refer with
`upload://FILE_ID`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from dray.spec.training.data import uploaded_files
from ray_workers.shared.names import UPLOADS_FOLDER, upload_name
from service.db.models import DataFileRow
from service.db.repositories.submission import data_files as repository
from service.db.session import Database
from service.db.types import storable
from service.domain.errors import (
    BadUpload,
    Conflict,
    FileNotFound,
    InvalidDocument,
    StorageUnavailable,
)
from service.domain.ids import new_file_id
from service.storage.quota import refuse_if_full
from service.storage.storage import Storage, in_storage_thread

logger = logging.getLogger(__name__)

LEFT = timedelta(hours=1)
"""Time after which an upload that was not stored counts as interrupted."""
LEFT_AT_ONCE = 20
MAX_NAMED_JOBS = 3
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line. Parsed JSON can need 30 times as much memory as its text, and other
threads wait while a line is parsed."""


class DataFiles:
    """The use cases. Owners can't see each other's files."""

    def __init__(
        self, database: Database, storage: Storage, *, clock: Callable[[], datetime] | None = None
    ) -> None:
        self._database = database
        self._storage = storage
        self._clock = clock or database.clock

    async def upload(
        self, owner: str, name: str, content: bytes, *, lasts: timedelta | None = None
    ) -> DataFileRow:
        """Store a file of JSON lines. lasts: time after which the file expires. Raises
        QuotaExceeded, StorageUnavailable, and BadUpload if a line is not a JSON object."""
        num_lines = await asyncio.to_thread(count_examples, content)
        digest = await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest())
        now = self._clock()
        row = DataFileRow(
            id=new_file_id(now),
            owner=owner,
            name=name,
            size_bytes=len(content),
            sha256=digest,
            num_lines=num_lines,
            state=repository.PENDING,
            created_at=now,
            changed_at=now,
            expires_at=None if lasts is None else now + lasts,
        )
        file_id = row.id

        def begin(session: Session) -> None:
            refuse_if_full(session)
            repository.insert(session, row)

        def finish(session: Session) -> DataFileRow | None:
            repository.set_state(
                session, file_id, repository.PENDING, repository.STORED, self._clock()
            )
            return repository.get(session, owner, file_id, now)

        await self._database.write(begin)
        await in_storage_thread(self._storage.write_bytes, key_of(file_id), content)
        stored = await self._database.write(finish)
        await self.remove_left()
        if stored is None:
            raise StorageUnavailable("writing the file took too long: upload it again")
        return stored

    async def get(self, owner: str, file_id: str, *, pointer: str | None = None) -> DataFileRow:
        """Return a file of the owner. Raises FileNotFound, with this pointer, if there is no such
        file."""
        row = None
        if storable(file_id):
            now = self._clock()
            row = await self._database.read(lambda s: repository.get(s, owner, file_id, now))
        if row is None:
            raise _not_found(file_id, pointer)
        return row

    async def page(
        self, owner: str, after: str | None, limit: int, *, is_ascending: bool = False
    ) -> Sequence[DataFileRow]:
        """Return the owner's files that follow the file `after`, the newest first unless
        `is_ascending`."""
        if after is not None and not storable(after):
            return []
        now = self._clock()
        return await self._database.read(
            lambda s: repository.page(s, owner, after, limit, now, is_ascending=is_ascending)
        )

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises FileNotFound, and Conflict if a job that has not ended reads it."""
        if not storable(file_id):
            raise _not_found(file_id)
        now = self._clock()
        is_deleted = False

        def work(session: Session) -> None:
            nonlocal is_deleted
            if repository.get(session, owner, file_id, now, lock=True) is None:
                if is_deleted:  # an earlier try committed, but its answer was lost
                    return
                raise _not_found(file_id)
            if jobs := repository.jobs_with(session, file_id, MAX_NAMED_JOBS):
                raise Conflict(
                    f"the file {file_id} is read by jobs that have not ended: {', '.join(jobs)}",
                    hint="cancel the jobs, or wait until they have ended",
                )
            repository.set_state(session, file_id, repository.STORED, repository.DELETED, now)
            is_deleted = True

        await self._database.write(work)
        await self._remove(file_id)

    async def _remove(self, file_id: str) -> None:
        """Delete the content and the row of a file. If the storage is unavailable, `remove_left`
        tries again."""
        try:
            await in_storage_thread(self._storage.delete_tree, f"{UPLOADS_FOLDER}/{file_id}")
        except StorageUnavailable as error:
            logger.warning("the content of %s can't be deleted yet: %s", file_id, error)
        else:
            await self._database.write(lambda session: repository.remove(session, file_id))

    async def remove_expired(self) -> None:
        """Delete the expired files that no job reads."""
        now, after = self._clock(), ""

        def work(session: Session) -> tuple[list[str], list[str]]:
            rows = repository.expired(session, now, after, LEFT_AT_ONCE)
            unused = [row.id for row in rows if not repository.jobs_with(session, row.id, 1)]
            for file_id in unused:
                repository.set_state(session, file_id, repository.STORED, repository.DELETED, now)
            return [row.id for row in rows], unused

        while True:
            seen, unused = await self._database.write(work)
            for file_id in unused:
                await self._remove(file_id)
            if len(seen) < LEFT_AT_ONCE:
                return
            after = seen[-1]

    async def remove_left(self) -> None:
        """Delete what interrupted uploads and deletions have left."""
        before = self._clock() - LEFT
        for file_id in await self._database.read(
            lambda s: repository.left(s, before, LEFT_AT_ONCE)
        ):
            await self._remove(file_id)


def use(session: Session, sources: Iterable[tuple[str, str]], owner: str, now: datetime) -> None:
    """Prevent the deletion of the uploaded files among the sources of a document, which are given
    with their pointers. Raises InvalidDocument if one of the files does not exist, has expired, or
    belongs to another user."""
    for pointer, source in sources:
        for file_id in uploaded_files(source):
            if repository.get(session, owner, file_id, now, lock=True) is None:
                raise InvalidDocument(
                    f"names the uploaded file {file_id}, which does not exist", pointer=pointer
                )


def _not_found(file_id: str, pointer: str | None = None) -> FileNotFound:
    return FileNotFound(f"there is no file {file_id[:64]!r}", pointer=pointer)


def key_of(file_id: str) -> str:
    """Return the storage key of a file's content."""
    return f"{UPLOADS_FOLDER}/{upload_name(file_id)}"


def count_examples(content: bytes) -> int:
    """Return the number of JSON objects in JSON lines. Raises BadUpload, which names the first line
    that is not a JSON object."""
    num = start = number = 0
    while start < len(content):
        number += 1
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if end - start > MAX_LINE_BYTES:
            raise BadUpload(f"line {number:,} of the file has more than {MAX_LINE_BYTES:,} bytes")
        line = content[start:end]
        start = end + 1
        if not (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip():
            continue
        try:
            found = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            raise BadUpload(f"line {number:,} of the file is not UTF-8 text") from None
        except (ValueError, RecursionError) as error:
            raise BadUpload(f"line {number:,} of the file is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise BadUpload(
                f"line {number:,} of the file is a JSON {type(found).__name__}, but each line must "
                "be a JSON object"
            )
        num += 1
    if not num:
        raise BadUpload("the file has no examples: it must have a JSON object in each line")
    return num
