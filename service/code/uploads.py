"""Use cases for uploads: describe code, upload missing parts, read code.

The parts of one request are stored as one object, called a pack. Once every part is stored, a
description with the locations of the parts is written next to the packs. Jobs can then use the
code.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from dray import views
from dray.code.manifest import (
    MAX_FILES,
    PART_BYTES,
    FileEntry,
    code_id,
    collision_in,
    fault_of,
    num_parts,
    part_size,
)
from service.config.settings import Settings
from service.db.models import CodeRow
from service.db.repositories.submission import code as repository
from service.db.repositories.submission.code import PartLocation
from service.db.session import Database
from service.domain.errors import BadUpload, CodeNotFound, StorageUnavailable, UploadTooLarge
from service.storage.quota import refuse_if_full
from service.storage.storage import Storage, in_storage_thread

logger = logging.getLogger(__name__)

KEPT = timedelta(hours=1)
"""How long unused parts and code are kept, because their upload may still be in progress."""
PACKS_AT_ONCE = 500


@dataclass(frozen=True)
class StoredFile:
    """A file of uploaded code in the storage."""

    path: str
    size_bytes: int
    is_executable: bool
    parts: tuple[tuple[str, PartLocation], ...]
    """(SHA-256, location) of each part."""


class CodeUploads:
    """Use cases for uploads. Owners can't see each other's parts, or find out whether a part
    exists."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        settings: Settings,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._storage = storage
        self._limit_bytes = settings.code_limit_bytes
        self._clock = clock or database.clock

    async def describe(self, files: Sequence[FileEntry], owner: str) -> views.Code:
        """Describe code, and return it with the list of parts that are missing.

        If no part is missing, the code is complete. Idempotent. Raises BadUpload for an invalid
        path or size, UploadTooLarge if the upload is too large, and QuotaExceeded if the storage is
        full.
        """
        total = self._check(files)
        identity = code_id(files)
        now = self._clock()
        wanted = {part for file in files for part in file.parts}

        def look(session: Session) -> tuple[CodeRow | None, dict[str, PartLocation]]:
            if (row := repository.use(session, owner, identity, now)) is not None:
                return row, {}
            refuse_if_full(session)
            return None, _kept_locations(session, owner, wanted, now)

        row, locations = await self._database.write(look)
        missing = sorted(wanted - locations.keys())
        if row is None and not missing:
            row = await self._complete(files, identity, owner, total, locations, now)
        if row is not None:
            missing = []
        return views.Code(
            id=identity,
            num_files=len(files),
            size_bytes=total,
            is_complete=row is not None,
            missing=missing,
        )

    def _check(self, files: Sequence[FileEntry]) -> int:
        """Check the files, and return their total size in bytes."""
        if not files:
            raise BadUpload("the list of files is empty", pointer="/files")
        if len(files) > MAX_FILES:
            raise UploadTooLarge(
                f"the list has {len(files)} files, but at most {MAX_FILES} are allowed",
                pointer="/files",
            )
        total = 0
        for number, file in enumerate(files):
            pointer = f"/files/{number}"
            if (fault := fault_of(file.path)) is not None:
                raise BadUpload(f"the path {file.path[:200]!r} {fault}", pointer=f"{pointer}/path")
            if len(file.parts) != num_parts(file.size_bytes):
                raise BadUpload(
                    f"a file of {file.size_bytes} bytes must have {num_parts(file.size_bytes)} "
                    f"parts of up to {PART_BYTES} bytes, not {len(file.parts)}",
                    pointer=f"{pointer}/parts",
                )
            total += file.size_bytes
        if total > self._limit_bytes:
            raise UploadTooLarge(
                f"the files total {total} bytes, but at most {self._limit_bytes} bytes are allowed",
                hint="exclude data with .drayignore, or raise DRAY_CODE_LIMIT_BYTES",
            )
        if (two := collision_in(file.path for file in files)) is not None:
            raise BadUpload(
                f"{two[0]!a} and {two[1]!a} can't both be files: their paths conflict",
                pointer="/files",
            )
        return total

    async def _complete(
        self,
        files: Sequence[FileEntry],
        identity: str,
        owner: str,
        total: int,
        locations: Mapping[str, PartLocation],
        now: datetime,
    ) -> CodeRow | None:
        """Write the description of the stored code. Return None if a part has been deleted in the
        meantime."""
        for number, file in enumerate(files):
            for index, part in enumerate(file.parts):
                if locations[part].size_bytes != part_size(file.size_bytes, index):
                    raise BadUpload(
                        f"size_bytes of {file.path!r} does not match the sizes of its parts",
                        pointer=f"/files/{number}/size_bytes",
                    )
        text = _description(files, locations)
        # Use a unique key, so that deleting older code with the same id doesn't delete this
        # description.
        key = f"{_folder(owner)}/{identity}-{secrets.token_hex(8)}.json"
        await self._write_object(key, text, owner, now)
        row = CodeRow(
            owner=owner,
            id=identity,
            num_files=len(files),
            size_bytes=total,
            manifest_key=key,
            manifest_sha256=hashlib.sha256(text).hexdigest(),
            created_at=now,
            used_at=now,
        )
        packs = {location.pack for location in locations.values()} | {key}

        def store(session: Session) -> CodeRow | None:
            # Read the clock again, because writing the description may have taken a long time.
            if repository.renew(session, packs, self._clock()) != packs:
                return None
            return repository.insert_code(session, row, packs)

        return await self._database.write(store)

    async def _write_object(self, key: str, content: bytes, owner: str, now: datetime) -> None:
        """Write an object. Objects that no code uses are deleted later."""
        await self._database.write(
            lambda session: repository.insert_pack(session, key, owner, len(content), now)
        )
        await in_storage_thread(self._storage.write_bytes, key, content)

    async def put_parts(self, parts: Mapping[str, bytes], owner: str) -> None:
        """Store new parts as one object. `parts` maps hashes to content.

        Raises BadUpload if a part has a different hash, is empty, or is larger than PART_BYTES.
        """
        for data in parts.values():
            if len(data) > PART_BYTES:
                raise BadUpload(
                    f"a part has {len(data)} bytes, but at most {PART_BYTES} bytes are allowed"
                )
            if not data:
                raise BadUpload("a part is empty: do not upload parts for an empty file")
        wrong = await asyncio.to_thread(_first_wrong, parts)
        if wrong is not None:
            raise BadUpload(
                f"the hash of part {wrong} does not match its content: the part was "
                "damaged in transit"
            )
        now = self._clock()

        def look(session: Session) -> set[str]:
            refuse_if_full(session)
            if repository.unused_bytes(session, owner) > 2 * self._limit_bytes:
                raise UploadTooLarge(
                    "there are too many uploaded parts from incomplete uploads",
                    hint="complete an upload with POST /v1/code, or wait: unused parts are deleted "
                    "an hour after they were uploaded",
                )
            return set(_kept_locations(session, owner, set(parts), now))

        existing = await self._database.write(look)
        new = {sha256: data for sha256, data in parts.items() if sha256 not in existing}
        if not new:
            return
        key = f"{_folder(owner)}/packs/{secrets.token_hex(16)}"
        locations, start = {}, 0
        for sha256, data in new.items():
            locations[sha256] = PartLocation(key, start, len(data))
            start += len(data)
        await self._write_object(key, b"".join(new.values()), owner, now)
        await self._database.write(
            lambda session: repository.insert_parts(session, owner, locations)
        )

    async def files(self, owner: str, identity: str) -> list[StoredFile]:
        """Return the files of the code. Raises CodeNotFound or StorageUnavailable."""
        row = await self._database.read(lambda s: repository.get(s, owner, identity))
        if row is None:
            raise code_not_found(identity)
        text = await self._read(row.manifest_key, row.manifest_sha256)
        return [
            StoredFile(
                path=file["path"],
                size_bytes=file["size_bytes"],
                is_executable=file["is_executable"],
                parts=tuple(
                    (p["sha256"], PartLocation(p["pack"], p["start"], p["size_bytes"]))
                    for p in file["parts"]
                ),
            )
            for file in json.loads(text)["files"]
        ]

    async def pieces(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield a file's bytes, part by part. Raises StorageUnavailable if a part can't be read or
        is damaged."""
        for sha256, location in file.parts:
            yield await self._read(
                location.pack, sha256, location.start, location.start + location.size_bytes
            )

    async def _read(self, key: str, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a part from an object, and verify its hash."""
        try:
            data = await in_storage_thread(self._storage.read_bytes, key, start, end)
        except FileNotFoundError:
            raise StorageUnavailable(f"{key} is missing from the storage") from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise StorageUnavailable(f"the stored copy of {key} is damaged")
        return data

    async def sweep(self, now: datetime) -> int:
        """Delete code and parts that have not been used for an hour. Return the number of deleted
        objects."""
        before = now - KEPT

        def forget(session: Session) -> list[str]:
            repository.delete_unused(session, before)
            repository.begin_deleting_packs(session, before, now)
            return repository.packs_being_deleted(session, PACKS_AT_ONCE)

        keys = await self._database.write(forget)
        for key in keys:
            await in_storage_thread(self._storage.delete_tree, key)
        if keys:
            await self._database.write(lambda s: repository.end_deleting_packs(s, keys))
        return len(keys)


def code_not_found(identity: str) -> CodeNotFound:
    return CodeNotFound(
        f"you have no code {identity}",
        pointer="/script/code",
        hint="`dray submit --code FOLDER -- train.py` uploads code and submits a job with it",
    )


def _kept_locations(
    session: Session, owner: str, parts: set[str], now: datetime
) -> dict[str, PartLocation]:
    """Return the locations of the parts that are stored, and restart their retention time."""
    locations = repository.locations(session, owner, parts)
    kept = repository.renew(session, {location.pack for location in locations.values()}, now)
    return {part: location for part, location in locations.items() if location.pack in kept}


def _first_wrong(parts: Mapping[str, bytes]) -> str | None:
    return next(
        (name for name, data in parts.items() if hashlib.sha256(data).hexdigest() != name), None
    )


def _description(files: Sequence[FileEntry], locations: Mapping[str, PartLocation]) -> bytes:
    """Return the description that nodes read: each file with the locations and hashes of its
    parts."""
    described = [
        {
            "path": file.path,
            "size_bytes": file.size_bytes,
            "is_executable": file.is_executable,
            "parts": [
                {
                    "sha256": part,
                    "pack": locations[part].pack,
                    "start": locations[part].start,
                    "size_bytes": locations[part].size_bytes,
                }
                for part in file.parts
            ],
        }
        for file in sorted(files, key=lambda file: file.path)
    ]
    return json.dumps({"version": 1, "files": described}, separators=(",", ":")).encode()


def _folder(owner: str) -> str:
    """Return the folder for an owner's code. The folder's name is a hash, because owners' names can
    contain any characters."""
    return f"code/{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
