"""Health check of the service's loops, which have no port: is their snapshot of the cluster
recent?"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

from service.config.settings import Settings
from service.db.repositories.scheduling import cluster
from service.db.session import Database

FRESH = timedelta(seconds=45)
"""The loops store a snapshot at least every 10 s."""


def problem(database: Database, now: datetime) -> str | None:
    """Describe the problem in a sentence. None if the loops are healthy."""
    picture = database.read_sync(cluster.get)
    if picture is None:
        return "the service has not stored a snapshot of the cluster yet"
    if now - picture.updated_at > FRESH:
        return f"the snapshot of the cluster is from {picture.updated_at}: are the loops running?"
    return None if picture.connected else f"not connected to Ray: {picture.reason}"


if __name__ == "__main__":
    sys.exit(problem(Database(Settings().database_url), datetime.now(UTC)))
