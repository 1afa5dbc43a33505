"""Messages about a database that can't be used."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError

from service.config.start_refusals import StartRefused, reason_of

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_WHAT_TO_DO = "restore the home folder from a backup, or move the folder away to start without jobs"


class DatabaseUnusable(StartRefused):
    """Raised if the service can't start because its database can't be used."""


def is_damage(error: DBAPIError) -> bool:
    """Whether the SQLite file is damaged, in which case retrying is pointless."""
    return _code(error) in _DAMAGED


def sentence(url: URL, error: DBAPIError) -> str:
    """Return a message with the name of the database, the error, and what to do."""
    cause = str(error.orig).strip().split("\n")[0]
    if url.get_backend_name() != "sqlite":
        name = url.render_as_string(hide_password=True)
        return f"the database {name} can't be used: {cause}. Check DRAY_DATABASE_URL and the server"
    path = Path(url.database or "")
    if is_damage(error):
        return f"the database {path} is damaged ({cause}): {_WHAT_TO_DO}"
    if path.is_dir():
        return f"the database {path} is a folder instead of a file: move the folder away"
    if _code(error) == sqlite3.SQLITE_FULL:
        return f"the database {path} is on a full disk: free some space"
    return f"the database {path} can't be used ({cause}): give this user read and write access"


def refuse_emptied(url: URL, used_storage: Path | None) -> None:
    """Raise DatabaseUnusable if the SQLite file was emptied.

    SQLite opens an empty file as a new database. The database is really new only if `used_storage`,
    a file that the service writes to its storage, is also missing.
    """
    if url.get_backend_name() != "sqlite" or used_storage is None:
        return
    path = Path(url.database or "")
    if path.is_file() and not path.stat().st_size and used_storage.exists():
        raise DatabaseUnusable(f"the database {path} is damaged (the file is empty): {_WHAT_TO_DO}")


def unusable_folder(path: Path, error: OSError) -> DatabaseUnusable:
    return DatabaseUnusable(
        f"the database's folder {path} {reason_of(error)}: change DRAY_DATABASE_URL"
    )


def _code(error: DBAPIError) -> int:
    """Return SQLite's primary result code; 0 for other databases."""
    code: int = getattr(error.orig, "sqlite_errorcode", 0)
    return code & 0xFF
