"""Empty databases for tests, at little cost."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

from service.db.migrate import migrate
from service.db.models import Base
from service.db.repositories.catalog import document_values
from service.db.session import Database
from service.domain.tracking.document_values import defaults


def migrate_as_at_start(url: str) -> None:
    """Do with a database what the service does with it on startup."""
    database = Database(url)
    try:
        migrate(database)
        database.write_sync(lambda s: document_values.insert_shared(s, defaults()))
    finally:
        database.close()


@cache
def migrated_sqlite() -> bytes:
    """Return the file of an empty, migrated SQLite database."""
    with tempfile.TemporaryDirectory(prefix="dray-template-") as folder:
        path = Path(folder, "template.db")
        migrate_as_at_start(f"sqlite:///{path}")
        return path.read_bytes()


class PostgresCleaner:
    """Empties a migrated PostgreSQL database: creating a new one takes a hundred times as long.

    The connection is kept, because a new one would read the catalog of all tables again.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[Any] | None = None
        names = Base.metadata.tables.keys() - {"document_values"}
        self._with_rows = " UNION ALL ".join(
            f"SELECT '{name}' WHERE EXISTS (SELECT FROM {name})" for name in sorted(names)
        )

    def empty(self) -> None:
        """End all other connections and delete all rows that the migrations didn't insert."""
        try:
            self._empty()
        except psycopg.OperationalError:  # a test has ended this connection as well
            self.close()
            self._empty()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _empty(self) -> None:
        if self._connection is None:
            self._connection = psycopg.connect(self._url, autocommit=True)
            # Foreign keys are not checked while their tables are emptied one by one.
            self._connection.execute("SET session_replication_role = replica")
        run = self._connection.execute
        run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        # DELETE is much faster than TRUNCATE, which creates files for each table and index.
        deletes = [f"DELETE FROM {name}" for (name,) in run(self._with_rows).fetchall()]
        if deletes:
            deletes.append("INSERT INTO queues (name) VALUES ('default')")  # as the migrations do
        run("; ".join([*deletes, "DELETE FROM document_values WHERE holder NOT LIKE 'defaults-%'"]))
        run(
            "SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false)"
            " FROM pg_sequences WHERE last_value IS NOT NULL"
        )


def share_compiled_statements() -> None:
    """Let all engines with equal dialects share SQLAlchemy's cache of compiled statements.

    Each test has its own engines. To compile their statements anew takes longer than to run them.
    """
    caches: dict[type, LRUCache[Any, Any]] = defaultdict(lambda: LRUCache(2_000))
    init = Engine.__init__

    def init_with_shared_cache(
        self: Engine, pool: Any, dialect: Any, url: Any, **options: Any
    ) -> None:
        init(self, pool, dialect, url, **options)
        if self._compiled_cache is not None:
            self._compiled_cache = caches[type(dialect)]

    Engine.__init__ = init_with_shared_cache  # type: ignore[method-assign, assignment]
    # The keys in the cache contain the dialect.
    DefaultDialect.__eq__ = _compiles_alike  # type: ignore[method-assign, assignment]
    DefaultDialect.__hash__ = lambda self: hash(type(self))  # type: ignore[method-assign, assignment]


def _compiles_alike(one: DefaultDialect, other: object) -> bool:
    return one is other or (type(one) is type(other) and _options(one) == _options(other))


def _options(dialect: Any) -> tuple[Any, ...]:
    """What statements, and the functions that convert their values, depend on."""
    return (
        getattr(dialect, "server_version_info", None),
        getattr(dialect, "_json_serializer", None),
        getattr(dialect, "_json_deserializer", None),
    )
