"""The rate at which workers are lost, from the attempts so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """Attempts that ended."""

    worker_s: float = 0.0
    """Running time times the number of workers."""
    num_losses: int = 0
    """Attempts that ended because a worker, its node or its supervisor was lost."""


def worker_mtbf_s(everywhere: Seen, of_the_job: Seen, *, prior_s: float) -> float:
    """Mean time between the losses of one worker: the worse of what the deployment and what the
    job itself has seen.

    The deployment begins with one loss in `prior_s` (the mean of a gamma prior), which its own
    time soon outweighs; the job begins with what the deployment has seen, in the same way.
    """
    deployments = (prior_s + everywhere.worker_s) / (1 + everywhere.num_losses)
    own = (deployments + of_the_job.worker_s) / (1 + of_the_job.num_losses)
    return min(deployments, own)
