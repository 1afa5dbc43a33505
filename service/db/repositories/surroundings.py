"""A single query for the data that nearly every change to a job needs."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session

from service.db.models import ClusterRow, StorageStateRow, WebhookRow
from service.db.repositories.scheduling.cluster import THE_CLUSTER
from service.db.repositories.storage import THE_STORAGE

_FOUND = "surroundings"


def seen(session: Session) -> Row[Any]:
    """Return these facts, which are read once per transaction:

    - connected: whether the cluster is connected; None before the first connection
    - ray_dashboard: the address of the dashboard
    - storage_problem: why jobs are neither accepted nor started; None while there is enough space
    - webhook: the id of any enabled webhook; None if there is none
    """
    found: Row[Any] | None = session.info.get(_FOUND)
    if found is None:
        found = session.info[_FOUND] = session.connection().execute(_seen()).one()
    return found


@cache
def _seen() -> Select[Any]:
    cluster, storage = ClusterRow.__table__.c, StorageStateRow.__table__.c
    hooks = WebhookRow.__table__.c
    of_cluster = (cluster.connected, cluster.ray_dashboard)
    problem = select(storage.problem).where(storage.id == THE_STORAGE)
    enabled = select(hooks.id).where(hooks.disabled_at.is_(None)).limit(1)
    return select(
        *(
            select(column).where(cluster.id == THE_CLUSTER).scalar_subquery().label(column.key)
            for column in of_cluster
        ),
        problem.scalar_subquery().label("storage_problem"),
        enabled.scalar_subquery().label("webhook"),
    )
