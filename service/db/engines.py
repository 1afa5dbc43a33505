"""Creates the SQLAlchemy engines for SQLite and PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url

from service.config.home_lock import make_private
from service.db import damage
from service.db.types import from_json

THREADS = 8
BUSY_TIMEOUT_MS = 10_000
MAX_IDLE_MS = 30_000
"""Time after which PostgreSQL aborts an idle transaction. Without this limit, a process that is
suspended during a transaction would hold its locks indefinitely."""


VANISHED_HOST = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""Parameters of libpq that make a thread give up after about a minute if the database host has
vanished from the network. Without these parameters, the thread can wait for hours. The URL can
override their values."""


def normalise_url(url: str) -> URL:
    """Parse a SQLite or PostgreSQL URL (with psycopg 3 as the driver). Raises ValueError for
    other databases."""
    parsed = make_url(url)
    backend = parsed.drivername.split("+")[0]
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    raise ValueError(
        f"DRAY_DATABASE_URL uses {parsed.drivername!r}, which is not supported: use "
        "sqlite:////path/to/file or postgresql://user@host/database"
    )


def with_limits(url: URL) -> URL:
    """Add the parameters in `VANISHED_HOST` to a PostgreSQL URL, unless the URL already sets
    them."""
    limits = {name: value for name, value in VANISHED_HOST.items() if name not in url.query}
    return url.update_query_dict(limits)


def limit_idling(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.autocommit = True
        connection.execute(f"SET idle_in_transaction_session_timeout = {MAX_IDLE_MS}")
        connection.autocommit = False


def sqlite_engine(url: URL, *, writes: bool, pool_size: int = THREADS) -> Engine:
    assert url.database is not None
    if writes:
        folder = Path(url.database).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise damage.unusable_folder(folder, error) from error
        make_private(Path(url.database))
    engine = create_engine(
        url,
        pool_size=1 if writes else pool_size,
        max_overflow=0,
        connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False},
        json_deserializer=from_json,
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the function `begin` sends BEGIN
        pragmas = ["foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"]
        if writes:
            pragmas += ["journal_mode=WAL", "synchronous=FULL"]
        else:
            pragmas += ["query_only=ON", "wal_autocheckpoint=0"]
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    def begin(connection: Any) -> None:
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    # A listener for SQLAlchemy's `begin` event would be slower, because an engine with listeners
    # looks up the listeners for each statement.
    engine.dialect.do_begin = begin  # type: ignore[method-assign, assignment]
    return engine
