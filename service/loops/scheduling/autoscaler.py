"""The autoscaler: a loop that requests nodes from Ray for waiting jobs, and withdraws requests.

The scheduler passes each plan to the autoscaler. A separate loop sends the request, so that no
round of the scheduler waits for Ray. The request is repeated periodically, because Ray and the
gateway forget it when they restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.cluster.port import Cluster, ClusterNode, ClusterSnapshot, ClusterUnavailable
from service.config.settings import Settings
from service.db.models import AutoscalingRow
from service.db.repositories.scheduling import cluster as repository
from service.db.session import touch
from service.domain.scheduling import autoscaling, policy
from service.domain.scheduling.placement.slots import EPSILON
from service.domain.scheduling.policy.windows import Windows
from service.domain.scheduling.rules.reservations import reserved_soon
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings

logger = logging.getLogger(__name__)

WITHDRAWAL_LIMIT_S = 5.0
"""Maximum number of seconds for which a stopping service waits until its request is withdrawn."""


@dataclass(frozen=True)
class _Wanted:
    """A request to Ray and the gateway."""

    demand: autoscaling.Demand = autoscaling.NOTHING
    released: tuple[str, ...] = ()

    @property
    def request(self) -> tuple[object, ...]:
        return self.demand.bundles, self.released


class Autoscaler(Stage):
    """Requests and releases nodes. If the settings contain no node types, the autoscaler only
    withdraws the request of an earlier service with other settings."""

    def __init__(
        self, database: LoopDatabase, cluster: Cluster, settings: Settings, timings: LoopTimings
    ) -> None:
        self._database = database
        self._cluster = cluster
        self._types = settings.autoscale_nodes
        self._idle = timedelta(seconds=settings.autoscale_idle_s)
        self._timings = timings
        self._wanted: _Wanted | None = None if self._types else _Wanted()
        """None before the first plan, while the request of the previous leader remains."""
        self._is_asking = False
        """Whether Ray might still hold a node request that was sent during this term as leader."""
        self._stored: autoscaling.Demand | None = None
        self._sent_released: frozenset[str] = frozenset()
        """Nodes for which a release request was sent to the gateway; the gateway might not have
        received the request."""
        self._changed = asyncio.Event()
        self._asked_at: dict[str, datetime] = {}
        """The time at which nodes were first requested for each job."""
        self._session = ""
        self._first_nodes: frozenset[str] = frozenset()
        """Nodes of the session's first plan, which can include the head node and nodes of other
        types."""
        self._memory: Mapping[int, float] = {}
        """The largest amount of memory that any added node of a type had, keyed by the type's index
        in the setting."""
        self._real_types = self._types
        self._idle_since: dict[str, datetime] = {}
        """The time at which each idle node became idle. A node is idle if nothing runs on it and no
        waiting job needs it."""

    def as_left(self, cluster: ClusterSnapshot | None) -> ClusterSnapshot | None:
        """Return the cluster, with nodes that are about to be released marked as released.

        No job starts on such a node, because the release might have taken effect since the
        snapshot. If a job needs the node, the release is withdrawn.
        """
        wanted = () if self._wanted is None else self._wanted.released
        leaving = self._sent_released.union(wanted)
        if cluster is None or not leaving:
            return cluster
        nodes = (
            replace(node, accepted=False, is_released=True) if node.node_id in leaving else node
            for node in cluster.nodes
        )
        return replace(cluster, nodes=tuple(nodes))

    def look(self, session: Session, seen: SchedulerRound) -> None:
        """Extend the snapshot with the nodes that could become usable. A refused node might be
        repaired or replaced, so it doesn't count as a node of the cluster."""
        cluster = seen.cluster
        if not self._types or cluster is None:
            return
        usable = [node for node in _staying(cluster) if node.accepted]
        joining = [_as_node(node) for node in cluster.nodes if _is_joining(node)]
        to_come = (*joining, *autoscaling.may_come(self._types, usable))
        seen.snapshot = replace(seen.snapshot, to_come=to_come)

    async def after(self, seen: SchedulerRound) -> None:
        """Request the nodes that the plan needs but that do not exist, and mention the request in
        the decisions' reasons."""
        cluster, snapshot, decisions, now = seen.cluster, seen.snapshot, seen.decisions, seen.now
        if not self._types or cluster is None:
            return
        carriers = {node_id for attempt in seen.live for node_id in attempt.node_ids}
        carriers |= {part.node_id for holder in snapshot.holders for part in holder.slices}
        in_use = carriers | {n.node_id for n in cluster.nodes if _is_used(n, cluster.shared)}
        planned = {node.id: node for node in snapshot.nodes}
        present = [_as_planned(n, planned[n.node_id]) for n in cluster.nodes]
        self._learn(present, cluster.session)
        to_come = autoscaling.may_come(self._real_types, _staying(cluster))
        fenced = Windows(replace(snapshot, nodes=tuple(present), to_come=to_come), now).apply()
        nodes = fenced.nodes, fenced.to_come
        found = autoscaling.demand(fenced, decisions, *nodes, in_use)
        going = {n.node_id for n in cluster.nodes if n.is_released and n.drained_by is not None}
        staying = in_use.union(n.node_id for n in cluster.nodes if n.is_never_released)
        staying |= {node.id for node in snapshot.nodes if node.is_tested}
        staying |= reserved_soon(snapshot.reservations, present, now)
        released = self._long_idle(present, found.needed | staying, now) | going
        self._want(_Wanted(found, tuple(sorted(released))))
        self._asked_at = {job_id: self._asked_at.get(job_id, now) for job_id in found.nodes_of}
        requests = {job.job_id: job.request for job in snapshot.queue}
        seen.decisions = [self._with_request(decision, found, requests) for decision in decisions]

    def _learn(self, present: Sequence[policy.Node], session: str) -> None:
        """Determine the actual memory of each node type from the nodes that were added. The result
        is not stored, so that it is determined again after the setting has been corrected and the
        service restarted."""
        if session != self._session:
            self._session = session
            self._first_nodes = frozenset(node.id for node in present)
        came = [node for node in present if node.id not in self._first_nodes]
        if came:
            self._memory = autoscaling.memory_seen(self._types, came, self._memory)
            self._real_types = autoscaling.as_seen(self._types, self._memory)

    def _long_idle(
        self, present: Sequence[policy.Node], needed: frozenset[str], now: datetime
    ) -> set[str]:
        """Return the nodes that have been idle for long enough to be released."""
        idle = {node.id for node in present if node.accepted} - needed
        self._idle_since = {node_id: self._idle_since.get(node_id, now) for node_id in sorted(idle)}
        return {n for n, since in self._idle_since.items() if now - since >= self._idle}

    def _want(self, wanted: _Wanted) -> None:
        if self._wanted is None or wanted.request != self._wanted.request:
            self._changed.set()
        self._wanted = wanted

    def _with_request(
        self,
        decision: policy.Decision,
        demand: autoscaling.Demand,
        requests: Mapping[str, policy.Request],
    ) -> policy.Decision:
        """Add the nodes requested for a waiting job or group to the reason why it waits."""
        if not isinstance(decision, policy.Wait | policy.Stay):
            return decision
        job_id, reason = decision.job_id, decision.reason
        if job_id in demand.nodes_of:
            at = self._asked_at[job_id]
            more = autoscaling.sentence(demand.nodes_of[job_id], at)
        elif job_id in demand.without_hope:
            more = "no more nodes can currently be added for the job (DRAY_AUTOSCALE_NODES)"
            if job_id in requests and self._real_types != self._types:
                types = self._types, self._real_types
                more = autoscaling.why_too_small(requests[job_id], *types) or more
        else:
            return decision
        return replace(decision, reason=replace(reason, message=f"{reason.message}; {more}"))

    async def run(self) -> None:
        """Run until cancelled."""
        if self._types:
            await self._changed.wait()
        elif not await self._is_anything_left():
            await asyncio.get_running_loop().create_future()
        while True:
            self._changed.clear()
            pause_s = self._timings.request_period_s
            try:
                await self._send()
            except ClusterUnavailable as error:
                logger.info("nodes can't be requested from Ray at the moment: %s", error)
                pause_s = self._timings.unavailable_pause_s
            except Exception:
                logger.exception("a round of the autoscaler failed; the loop continues")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def _is_anything_left(self) -> bool:
        """Whether the last request to Ray, which may still be in effect, asks for nodes. Waits for
        the database."""
        while True:
            try:
                return await self._database.read(_was_asked)
            except Exception:
                logger.exception("the last request to Ray could not be read; trying again")
            await asyncio.sleep(self._timings.unavailable_pause_s)

    async def withdraw(self) -> None:
        """Withdraw the request before a stop, if Ray and the database respond in time."""
        self._want(_Wanted())
        with contextlib.suppress(Exception):
            async with asyncio.timeout(WITHDRAWAL_LIMIT_S):
                if self._is_asking or await self._database.read(_was_asked):
                    await self._send()

    async def _send(self) -> None:
        wanted = self._wanted or _Wanted()
        bundles = [(dict(kind), number) for kind, number in wanted.demand.bundles]
        # Set both attributes before the call, because the request may reach Ray even if the
        # response is lost.
        self._is_asking = self._is_asking or bool(bundles)
        self._sent_released = self._sent_released.union(wanted.released)
        await self._cluster.request_nodes(bundles, wanted.released)
        self._is_asking, self._sent_released = bool(bundles), frozenset(wanted.released)
        if wanted.demand != self._stored:
            await self._database.write(lambda s, at: _store(s, wanted.demand, at))
            self._stored = wanted.demand


def _store(session: Session, demand: autoscaling.Demand, now: datetime) -> None:
    touch(session)
    before = repository.autoscaling(session)
    bundles = [[dict(kind), number] for kind, number in demand.bundles]
    since = None if before is None else before.asked_at
    asked_at = (since or now) if demand.num_nodes else None
    row = AutoscalingRow(num_nodes=demand.num_nodes, bundles=bundles, asked_at=asked_at)
    repository.put_autoscaling(session, row)


def _was_asked(session: Session, _: datetime) -> bool:
    row = repository.autoscaling(session)
    return row is not None and bool(row.bundles)


def _staying(cluster: ClusterSnapshot) -> list[policy.Node]:
    return [_as_node(node) for node in cluster.nodes if node.drained_by is None]


def _as_node(node: ClusterNode) -> policy.Node:
    usable = node.accepted or _is_joining(node)
    seen = (node.node_id, node.resources, node.available)
    return policy.Node.labelled(*seen, node.labels, accepted=usable)


def _as_planned(node: ClusterNode, planned: policy.Node) -> policy.Node:
    """Return the node; if it is accepted, it has the free resources that it had in the plan. No
    node is requested in place of a node that is being tested, because a test takes only a
    moment."""
    if not node.accepted:
        return _as_node(node)
    if planned.after_test is not None:
        return replace(_as_node(node), available_to_us=planned.after_test)
    free, withheld = planned.available_to_us, planned.withheld
    return replace(_as_node(node), available_to_us=free, withheld=withheld)


def _is_joining(node: ClusterNode) -> bool:
    return node.drained_by is None and (node.is_starting or node.is_released)


def _is_used(node: ClusterNode, is_shared: bool) -> bool:
    """Whether anything other than dray's attempts uses the node."""
    return bool(node.quarantined) or (is_shared and _is_taken(node.resources, node.available))


def _is_taken(total: Mapping[str, float], available: Mapping[str, float]) -> bool:
    return any(available.get(name, 0.0) + EPSILON < amount for name, amount in total.items())
