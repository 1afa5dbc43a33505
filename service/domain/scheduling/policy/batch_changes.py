"""Groups that keep their slots, and make clearly more progress with another global batch now.

The noise of gradients grows while a model is trained, and larger batches are worth more. A group
that grows or shrinks gets the batch for its new size with it (`policy.Grow`, `policy.Shrink`).
"""

from __future__ import annotations

from collections.abc import Container

from service.domain.scheduling.elastic import sizing
from service.domain.scheduling.placement.slots import count, fits
from service.domain.scheduling.policy.records import Snapshot

LASTS_S = 60.0
"""How long a batch is kept, which must make up for forming the group anew."""


def batch_changes(snapshot: Snapshot, but: Container[str]) -> dict[str, int]:
    """The new batch of each job that gets one. but: jobs that the plan changes otherwise."""
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
