"""The cluster as it will be after all running jobs have ended."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ray_workers.shared.slices import by_bundle
from service.domain.scheduling.placement.gangs import Gang, Gangs
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.placement.shared_gpus import with_shared_gpus
from service.domain.scheduling.placement.slots import WHOLE_GPUS, free_again
from service.domain.scheduling.placement.stock import Stock, When
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.policy.records import Snapshot


class Emptied:
    """The nodes as they will be when the slots of all running jobs are free. A job that doesn't fit
    even there waits for new nodes, or for slots of other programs, so it is unknown when the job
    can start."""

    def __init__(self, snapshot: Snapshot, gangs: Gangs) -> None:
        """`gangs` must contain the gangs of the waiting jobs."""
        self._snapshot = snapshot
        self._gangs = gangs

    def can_hold(self, gang: Gang) -> bool:
        """Whether the gang fits on the accepted nodes after all running jobs have ended. For a gang
        whose workers are placed together, the result is true if the gang might fit."""
        if gang.kind.is_whole:
            return self._pool.total(gang.kind) >= gang.least
        return self._pool.has(gang.kind, gang.least)

    def lets_claim(self, gang: Gang) -> bool:
        """Whether a job that can't start counts towards the limits and the quota of its queue. A
        job doesn't count if it waits for something besides the end of running jobs, such as the end
        of a reservation. The exception is a job that waits for new nodes: if it did not count, jobs
        behind it could use up the limit again and again, so that no nodes would be added for it."""
        waits_for_nodes = self._snapshot.to_come and not gang.request.is_bound
        return bool(waits_for_nodes) or self.can_hold(gang)

    @cached_property
    def _pool(self) -> Pool:
        nodes = {node.id: node for node in self._snapshot.nodes if node.accepted}
        lags = self._snapshot.slots_lag
        free = {
            name: dict(node.total if lags else node.available_to_us) for name, node in nodes.items()
        }
        for job in self._snapshot.holding():
            for part, bundle in by_bundle(job.slices, job.request.bundle, job.request.roles):
                if part.node_id in free:
                    free_again(free[part.node_id], nodes[part.node_id], bundle, part.num_workers)
        for name, has in free.items():
            if WHOLE_GPUS in nodes[name].available_to_us:
                free[name] = with_shared_gpus(has, ())
        empty = [replace(node, available_to_us=free[name]) for name, node in nodes.items()]
        topology = Topology(self._snapshot.topology, empty)
        return Pool(Stock(empty, self._gangs, topology), When.FREE)
