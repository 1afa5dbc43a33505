"""Migrates a database to the current schema, using Alembic without an ini file."""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from service.config.start_refusals import StartRefused
from service.db.damage import DatabaseUnusable, sentence
from service.db.session import Database

logger = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
ADVISORY_LOCK = 0x64726179
"""Key of the lock that prevents processes that start at the same time from migrating concurrently.
The number is arbitrary."""


FIRST = "0042"
"""The oldest revision that can be upgraded."""
LAST_BEFORE = "1beec0b5"
"""The last commit of dray whose code can upgrade older revisions to `FIRST`."""


class SchemaTooNew(StartRefused):
    """Raised if the database was migrated by a newer version of dray."""


class SchemaTooOld(StartRefused):
    """Raised if the database has a revision that is older than `FIRST`."""


def alembic_config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def migrate(database: Database) -> None:
    """Upgrade to the latest revision in one transaction.

    Raises SchemaTooNew if the database's revision is newer, SchemaTooOld if it is too old to
    upgrade, and DatabaseUnusable if the file is not a database or the server does not respond.
    """
    try:
        _migrate(database)
    except DBAPIError as error:
        raise DatabaseUnusable(sentence(database.url, error)) from error


def _migrate(database: Database) -> None:
    with database.engine.begin() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
        config = alembic_config(connection)
        scripts = ScriptDirectory.from_config(config)
        head = scripts.get_current_head()
        current = MigrationContext.configure(connection).get_current_revision()
        if current == head:
            return
        known = {script.revision for script in scripts.walk_revisions()}
        if current is not None and current not in known:
            at = f"the database {database.url.render_as_string()} is at revision {current}"
            if current < FIRST:
                raise SchemaTooOld(
                    f"{at}, but this version of dray can only upgrade from revision {FIRST}: "
                    f"first start dray at commit {LAST_BEFORE} once to upgrade to revision {FIRST}"
                )
            raise SchemaTooNew(
                f"{at}, which is unknown to this version of dray: run the newer version that "
                "migrated the database, or restore an earlier backup"
            )
        if current is None:
            logger.info("creating the database schema at revision %s", head)
        else:
            logger.info("migrating the database from revision %s to %s", current, head)
        command.upgrade(config, "head")
