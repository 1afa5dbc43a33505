"""Changes of the global batch size for groups that keep their slots.

Gradient noise grows during training, so larger batches become more efficient. The batch size of a
group is changed only if the new size clearly speeds up its progress. A group that grows or shrinks
gets the batch size for its new number of workers immediately (`policy.Grow`, `policy.Shrink`).
"""

from __future__ import annotations

from collections.abc import Container

from service.domain.scheduling.elastic import sizing
from service.domain.scheduling.placement.slots import count, fits
from service.domain.scheduling.policy.records import Snapshot

LASTS_S = 60.0
"""Minimum time in seconds between two changes of a batch size, since each change requires a new
rendezvous."""


def batch_changes(snapshot: Snapshot, but: Container[str]) -> dict[str, int]:
    """Return the new batch sizes, keyed by job id. Jobs in `but` keep their batch sizes, because
    the plan changes these jobs in other ways."""
    found: dict[str, int] = {}
    for running in snapshot.running:
        job = snapshot.elastic.get(running.job_id)
        if job is None or job.batch_range is None or running.job_id in but:
            continue
        if running.same_batch_s < LASTS_S or running.is_leaving or running.recalled:
            continue
        bundle = running.request.bundle
        per_node = max([fits(bundle, node.total) for node in snapshot.nodes], default=0)
        size = sizing.best_batch(job, count(running.slices), max(1, per_node))
        if size != job.batch_size:
            found[running.job_id] = size
    return found
