"""The use case by which an administrator releases the slots of a node that was found faulty."""

from __future__ import annotations

from sqlalchemy.orm import Session

from service.db.notifications import QUEUE
from service.db.repositories.scheduling import cluster as repository
from service.db.session import Database, notify
from service.db.types import storable
from service.domain.errors import QuarantineNotFound


class FaultyNodes:
    """The nodes whose slots are quarantined until an administrator releases them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def release(self, node: str) -> None:
        """Release the slots of a node, given by its id or its host name. Raises QuarantineNotFound
        if none of its slots were quarantined as faulty."""

        def work(session: Session) -> None:
            named = [node] if storable(node) else []
            on_host = [row for name in named for row in repository.nodes_of_host(session, name)]
            node_ids = {*named, *(row.node_id for row in on_host)}
            if not sum(repository.release_withheld(session, one) for one in node_ids):
                raise QuarantineNotFound(
                    f"no slots of a node {node!r} are quarantined as faulty",
                    hint="`dray cluster` shows the nodes; slots with processes of an ended job are "
                    "released once these processes have ended",
                )
            notify(session, QUEUE)

        await self._database.write(work)
