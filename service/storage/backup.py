"""Backups of a home directory that uses SQLite. A backup can be made while the service runs, and
is restored to another folder.

The archive is a plain tar file with `storage/...` (logs, checkpoints, artifacts), `dray.db`, and
finally `backup.json`. Without this file, the archive is invalid. The database is copied first, with
SQLite's online backup, and then the files. Since a file is written before the row that names it,
every row in the copy has its file, unless the file was deleted during the backup. Rows without a
file are left out. PostgreSQL and object stores have their own backup tools, such as `pg_dump`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dray
from service.config.home_lock import LOCK_NAME, HomeLock
from service.config.settings import Settings
from service.db.engines import normalise_url
from service.storage.storage import Storage

FORMAT = 1
DATABASE = "dray.db"
STORAGE = "storage"
ABOUT = "backup.json"


class BackupError(Exception):
    """A backup can't be made or restored; the message states why and what to do."""


@dataclass(frozen=True)
class BackupMetadata:
    """The metadata in the archive."""

    format: int
    dray: str
    created_at: str
    revision: str
    """Revision of the schema. An older schema is upgraded when the service starts."""
    storage_url: str
    has_files: bool
    """Whether the archive contains the storage's files; true only if the storage is a folder."""
    database_sha256: str
    num_jobs: int
    num_files: int


def backup(settings: Settings, dest: Path) -> BackupMetadata:
    """Write the home to the tar file `dest`, which must not exist. Raises BackupError."""
    database = _sqlite_path(settings.database_url)
    storage = Storage(settings.storage_url)
    if not database.exists():
        raise BackupError(f"there is no database at {database}: is DRAY_HOME correct?")
    if dest.exists():
        raise BackupError(f"{dest} already exists: specify a new file")
    partial = dest.with_name(f".{dest.name}.{os.getpid()}.partial")
    try:
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix=".dray-backup-") as scratch:
            copy = Path(scratch) / DATABASE
            _copy_database(database, copy)
            with open(partial, "xb", opener=_private) as file:
                with tarfile.open(fileobj=file, mode="w") as tar:
                    about = _fill(tar, copy, storage)
                file.flush()
                os.fsync(file.fileno())
        partial.rename(dest)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"the backup can't be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return about


def restore(source: Path, home: Path) -> BackupMetadata:
    """Restore a backup to `home`, which must be empty and unused.

    URLs in the database that point to the old storage are updated. Raises BackupError or HomeInUse.
    """
    home = home.expanduser().absolute()
    with HomeLock.acquire(home):
        existing = sorted(path.name for path in home.iterdir() if path.name != LOCK_NAME)
        if existing:
            raise BackupError(
                f"{home} is not empty (it contains {', '.join(existing[:3])}): "
                "specify an empty folder"
            )
        try:
            with tarfile.open(source, mode="r:") as tar:
                about = _read_about(tar, source)
                tar.extractall(home, members=_contents(tar), filter="data")
        except (OSError, tarfile.TarError) as error:
            raise BackupError(f"{source} can't be read as a backup: {error}") from error
        database = home / DATABASE
        if not database.exists() or _sha256(database) != about.database_sha256:
            raise BackupError(f"the database in {source} is damaged: use another backup")
        if about.has_files:
            (home / STORAGE).mkdir(exist_ok=True, mode=0o700)
            _move_urls(database, about.storage_url, (home / STORAGE).as_uri())
    return about


def _private(path: str, flags: int) -> int:
    """Open a file that only this user can access."""
    return os.open(path, flags, 0o600)


def _sqlite_path(url: str) -> Path:
    parsed = normalise_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database is None:
        raise BackupError("the database is PostgreSQL: copy it with pg_dump, then copy the storage")
    return Path(parsed.database)


def _copy_database(source: Path, dest: Path) -> None:
    """Copy a consistent snapshot of a database, without blocking its users."""
    with (
        contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as live,
        contextlib.closing(sqlite3.connect(dest)) as copy,
    ):
        live.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")


def _fill(tar: tarfile.TarFile, copy: Path, storage: Storage) -> BackupMetadata:
    with contextlib.closing(sqlite3.connect(copy)) as database:
        database.execute("PRAGMA foreign_keys=ON")
        written: dict[str, str] = {}
        if storage.folder is not None:
            for job_id in _job_ids(database):
                written |= _add_files(tar, storage.folder, f"jobs/{job_id}")
            _leave_out_what_is_gone(database, storage, written)
        (num_jobs,) = database.execute("SELECT count(*) FROM jobs").fetchone()
        (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    about = BackupMetadata(
        format=FORMAT,
        dray=dray.__version__,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        revision=revision,
        storage_url=storage.url,
        has_files=storage.folder is not None,
        database_sha256=_sha256(copy),
        num_jobs=num_jobs,
        num_files=len(written),
    )
    tar.add(copy, arcname=DATABASE)
    text = json.dumps(asdict(about), indent=1).encode()
    entry = tarfile.TarInfo(ABOUT)
    entry.size = len(text)
    tar.addfile(entry, io.BytesIO(text))
    return about


def _job_ids(database: sqlite3.Connection) -> list[str]:
    return [job_id for (job_id,) in database.execute("SELECT id FROM jobs ORDER BY number")]


def _add_files(tar: tarfile.TarFile, root: Path, key: str) -> dict[str, str]:
    """Add the files under the key, and return a mapping from file keys to SHA-256 hashes.

    Skip links, pipes, sockets, and hidden files. Hidden files are still being written.
    """
    added: dict[str, str] = {}
    for folder, _, names in os.walk(root / key):
        for name in sorted(names):
            path = Path(folder) / name
            if name.startswith(".") or path.is_symlink() or not path.is_file():
                continue
            # The content of an open file remains readable even if the file is replaced or deleted
            # in the meantime.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                inside = path.relative_to(root).as_posix()
                entry = tar.gettarinfo(arcname=f"{STORAGE}/{inside}", fileobj=file)
                hashing = _Hashing(file)
                tar.addfile(entry, hashing)
                added[inside] = hashing.sha256
    return added


class _Hashing(io.RawIOBase):
    """Forwards reads to a file, and computes the SHA-256 of the bytes that are read."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def _leave_out_what_is_gone(
    database: sqlite3.Connection, storage: Storage, written: dict[str, str]
) -> None:
    """Delete rows whose files were deleted after the database was copied.

    A checkpoint's row is also deleted if its manifest in the copy is not the committed manifest.
    """
    for job_id, url, sha256 in database.execute(
        "SELECT job_id, url, manifest_sha256 FROM checkpoints"
    ).fetchall():
        key = url.removeprefix(f"{storage.url}/")
        if written.get(f"{key}/manifest.json") != sha256:
            _delete(database, "checkpoints", "url", job_id, url)
    for job_id, url in database.execute("SELECT job_id, url FROM artifacts").fetchall():
        if url.removeprefix(f"{storage.url}/") not in written:
            _delete(database, "artifacts", "url", job_id, url)
    query = "SELECT job_id, storage_key FROM log_chunks WHERE storage_key IS NOT NULL"
    for job_id, key in database.execute(query).fetchall():
        if key not in written:
            _delete(database, "log_chunks", "storage_key", job_id, key)
    database.commit()


def _delete(database: sqlite3.Connection, table: str, column: str, job_id: str, value: str) -> None:
    database.execute(f"DELETE FROM {table} WHERE job_id = ? AND {column} = ?", (job_id, value))


def _read_about(tar: tarfile.TarFile, source: Path) -> BackupMetadata:
    try:
        file = tar.extractfile(ABOUT)
        assert file is not None
        about: dict[str, Any] = json.loads(file.read())
        if about["format"] != FORMAT:
            raise BackupError(
                f"{source} has format {about['format']}, but this version of dray reads {FORMAT}: "
                "restore it with the version of dray that wrote it"
            )
        return BackupMetadata(**about)
    except (KeyError, TypeError, ValueError, AssertionError):
        raise BackupError(f"{source} is not a backup, or is truncated") from None


def _contents(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the database and the storage's files, and nothing else from the archive.

    All files become private to this user, since older versions of dray may have stored them with
    public permissions.
    """
    for member in tar:
        if member.isreg() and (
            member.name == DATABASE or member.name.startswith(f"{STORAGE}/jobs/")
        ):
            yield member.replace(mode=0o600)


def _move_urls(database: Path, old: str, new: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for table in ("checkpoints", "artifacts"):
            connection.execute(
                f"UPDATE {table} SET url = ? || substr(url, ?) WHERE substr(url, 1, ?) = ?",
                (new, len(old) + 1, len(old) + 1, f"{old}/"),
            )
        query = "SELECT number, init_from FROM jobs WHERE init_from IS NOT NULL"
        if _has_column(connection, "jobs", "init_from"):
            for number, text in connection.execute(query).fetchall():
                origin = json.loads(text)
                if origin["url"].startswith(f"{old}/"):
                    origin["url"] = new + origin["url"].removeprefix(old)
                    connection.execute(
                        "UPDATE jobs SET init_from = ? WHERE number = ?",
                        (json.dumps(origin), number),
                    )
        connection.commit()


def _has_column(connection: sqlite3.Connection, table: str, column: str) -> bool:
    """Whether the table has the column. Backups from older versions of dray may lack columns."""
    rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
    return any(name == column for (name,) in rows)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
