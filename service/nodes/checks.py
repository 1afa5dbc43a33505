"""Self-tests of nodes, as users request and see them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.self_tests import DeviceOutcome, TestedDevice
from service.db.models import NodeCheckRow
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import node_checks as repository
from service.db.session import Database
from service.db.types import storable
from service.domain.errors import NodeNotFound
from service.domain.events import ANONYMOUS
from service.domain.node_checks import CheckCause, SlowMeasure, slow
from service.lifecycle import node_checks

logger = logging.getLogger(__name__)


def by_hostname(session: Session) -> dict[str, views.NodeCheck]:
    """Return the newest test of each host."""
    return {one.hostname: one for one in as_viewed(repository.every(session))}


def as_viewed(rows: Sequence[NodeCheckRow]) -> list[views.NodeCheck]:
    """Return the tests. To find slow GPUs, `rows` must contain the tests of all hosts."""
    tested = {row.hostname: [_device(one) for one in row.devices] for row in rows}
    slow_gpus = slow({one.gpu: one for devices in tested.values() for one in devices if one.gpu})
    return [
        views.NodeCheck.model_validate(
            {
                "hostname": row.hostname,
                "id": row.id,
                "state": row.state,
                "cause": row.cause,
                "why": row.why,
                "job_id": row.job_id,
                "asked_at": row.asked_at,
                "began_at": row.began_at,
                "ended_at": row.ended_at,
                "outcome": row.outcome,
                "message": row.message,
                "devices": [
                    _viewed(one, slow_gpus.get(one.gpu, [])) for one in tested[row.hostname]
                ],
            }
        )
        for row in rows
    ]


def _device(stored: dict[str, Any]) -> TestedDevice:
    return TestedDevice(**{**stored, "outcome": DeviceOutcome(stored["outcome"])})


def _viewed(device: TestedDevice, found: Sequence[SlowMeasure]) -> views.CheckedDevice:
    return views.CheckedDevice(
        gpu=device.gpu or None,
        index=device.index,
        model=device.model,
        outcome=cast("Any", device.outcome.value),
        reason=device.reason,
        values=device.values,
        slow=[views.SlowMeasurement(**vars(one)) for one in found],
    )


class NodeChecks:
    """Use cases for self-tests."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def check(self, hostname: str, *, actor: str = ANONYMOUS) -> views.NodeCheck:
        """Request a test of the free GPUs of a node, and return the test immediately. If a test of
        the node is already waiting or running, return this test. Raises NodeNotFound."""

        def work(session: Session) -> views.NodeCheck:
            names = _hostnames(session)
            if not storable(hostname) or hostname not in names:
                raise NodeNotFound(
                    f"there is no node named {hostname!r}",
                    hint="`dray cluster` lists the nodes",
                )
            self._ask(session, hostname, actor)
            return by_hostname(session)[hostname[:255]]

        asked = await self._database.write(work)
        logger.info("%s asked for a self-test of %s", actor, hostname)
        return asked

    async def check_all(self, *, actor: str = ANONYMOUS) -> views.NodeCheckList:
        """Request tests of all nodes."""

        def work(session: Session) -> views.NodeCheckList:
            names = _hostnames(session)
            for hostname in names:
                self._ask(session, hostname, actor)
            found = by_hostname(session)
            return views.NodeCheckList(items=[found[hostname[:255]] for hostname in names])

        asked = await self._database.write(work)
        logger.info("%s asked for self-tests of all nodes", actor)
        return asked

    def _ask(self, session: Session, hostname: str, actor: str) -> None:
        now = self._database.time(session)
        node_checks.ask(session, hostname, CheckCause.ASKED, f"{actor} asked for it", now)


def _hostnames(session: Session) -> list[str]:
    return sorted({node.hostname for node in cluster_repository.nodes(session) if node.alive})
