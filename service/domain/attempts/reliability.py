"""Estimates, from earlier attempts, the rate at which workers are lost. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """Sums over ended attempts."""

    worker_s: float = 0.0
    """Running time in seconds, multiplied by the number of workers."""
    num_losses: int = 0
    """Number of attempts that ended because a worker, its node or its supervisor was lost."""


def worker_mtbf_s(everywhere: Seen, of_the_job: Seen, *, prior_s: float) -> float:
    """Return the mean time between losses of a worker, in seconds: the smaller of the deployment's
    and the job's estimates.

    The deployment's estimate starts from the assumption that one loss occurred in `prior_s` seconds
    (the mean of a gamma prior). The observed time soon outweighs this assumption. In the same way,
    the job's estimate starts from the deployment's estimate.
    """
    deployments = (prior_s + everywhere.worker_s) / (1 + everywhere.num_losses)
    own = (deployments + of_the_job.worker_s) / (1 + of_the_job.num_losses)
    return min(deployments, own)
