"""Nodes whose GPUs get no new work because of a fault, until an admin releases them.

Ray chooses the GPU of a slot, and can't be asked to exclude a GPU. Therefore a fault of one GPU
withholds all GPUs of its node. Running jobs continue.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.gpu_faults import GpuFault
from service.cluster.port import ClusterNode
from service.db.models import WithheldRow
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import withheld as repository
from service.db.session import Database, notify, touch
from service.db.types import storable
from service.domain.errors import NothingWithheld
from service.domain.events import ANONYMOUS
from service.lifecycle.withholding import FAULTY_CPU, report_counted, withhold

logger = logging.getLogger(__name__)


def store_reports(session: Session, nodes: Sequence[ClusterNode], now: datetime) -> None:
    """Store the faults that the nodes report. A released fault is forgotten once its node no longer
    reports it, so that it counts as new when it happens again."""
    report_counted(session, now)
    reporting = _newest(nodes)
    if not reporting:
        return
    known = repository.every(session)
    marks = {(row.hostname, row.gpu, row.code): row.mark for row in known}
    for hostname, faults in reporting.items():
        for fault in faults.values():
            if marks.get((hostname[:255], fault.gpu[:128], fault.code[:64])) == fault.mark[:255]:
                continue
            withhold(
                session,
                hostname,
                fault.message,
                code=fault.code,
                now=now,
                gpu=fault.gpu,
                mark=fault.mark,
                jobs=fault.jobs,
                is_sick=fault.is_sick,
                count=fault.count,
            )
    current = {(name, *key) for name, faults in reporting.items() for key in faults}
    for row in known:
        is_reported = (row.hostname, row.gpu, row.code) in current
        if row.gpu and row.hostname in reporting and not row.is_active and not is_reported:
            repository.remove(session, row)


def _newest(nodes: Sequence[ClusterNode]) -> dict[str, dict[tuple[str, str], GpuFault]]:
    """Return the faults, keyed by GPU and code, of each host whose agent has reported. Several
    nodes can be on one host; each of them reports all of the host's GPUs."""
    found: dict[str, dict[tuple[str, str], GpuFault]] = {}
    for node in nodes:
        if node.gpu_faults is not None:
            faults = found.setdefault(node.hostname, {})
            for fault in node.gpu_faults:
                key = (fault.gpu, fault.code)
                faults[key] = max(fault, faults.get(key, fault), key=lambda one: one.since)
    return found


def by_hostname(session: Session) -> dict[str, list[WithheldRow]]:
    """Return the faults that withhold slots, keyed by host."""
    found: dict[str, list[WithheldRow]] = {}
    for row in repository.active(session):
        found.setdefault(row.hostname, []).append(row)
    return found


def has_faulty_cpu(faults: Sequence[WithheldRow]) -> bool:
    """Whether one of the faults was found on a CPU, so that no rank can run on the host."""
    return any(row.code == FAULTY_CPU for row in faults)


def resources_of(total: Mapping[str, float], *, is_cpu_faulty: bool = False) -> dict[str, float]:
    """Return the resources that a fault withholds on a node with these resources."""
    name = "GPU" if total.get("GPU") and not is_cpu_faulty else "CPU"
    return {name: total.get(name, 0.0)}


def as_viewed(rows: Sequence[WithheldRow]) -> list[views.WithheldSlots]:
    return [
        views.WithheldSlots(gpu=row.gpu or None, code=row.code, reason=row.reason, since=row.since)
        for row in rows
    ]


class WithheldNodes:
    """Use cases for withheld nodes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def release(self, hostname: str, *, actor: str = ANONYMOUS) -> views.ReleasedNode:
        """Give a node new work although it had faults. A fault that the agent still reports
        withholds the node again only if it happens again. Raises NothingWithheld."""

        def work(session: Session) -> views.ReleasedNode:
            repository.lock_changes(session)
            rows = repository.active(session, hostname) if storable(hostname) else []
            if not rows:
                raise NothingWithheld(
                    f"no slots of {hostname!r} are withheld",
                    hint="`dray cluster` lists the withheld slots by the node's name",
                )
            released = as_viewed(rows)
            for row in rows:
                row.is_active = False
            touch(session)
            notify(session, QUEUE)
            return views.ReleasedNode(hostname=hostname, released=released)

        released = await self._database.write(work)
        logger.info("the slots of %s were released by %s", hostname, actor)
        return released
