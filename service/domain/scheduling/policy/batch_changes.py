"""New global batches for groups that keep their slots and make clearly more progress with them.

The noise of gradients grows while a model is trained, so that larger batches become better. A group
that grows or shrinks gets the batch for its new size at once (`policy.Grow`, `policy.Shrink`).
"""

from __future__ import annotations

from collections.abc import Container

from service.domain.scheduling.elastic import sizing
from service.domain.scheduling.placement.slots import count, fits
from service.domain.scheduling.policy.records import Snapshot

LASTS_S = 60.0
"""Seconds for which a batch is kept, to make up for forming the group again."""


def batch_changes(snapshot: Snapshot, but: Container[str]) -> dict[str, int]:
    """Return the new batches by job. but: jobs that the plan changes in another way."""
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
