"""Settles the dependencies on jobs that end in a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from service.domain.scheduling.outlook.job_classes import JobClasses


class Endings:
    """The jobs and arrays that have ended in one simulation."""

    def __init__(self, array_of: Mapping[str, str], others_of_arrays: Mapping[str, int]) -> None:
        """array_of: the array of each job. others_of_arrays: number of further unfinished jobs of
        each array."""
        self._array_of = array_of
        self._unfinished = Counter(array_of.values())
        self._unfinished.update(others_of_arrays)
        self._failed: dict[str, str] = {}
        """The jobs that did not succeed, and their arrays, each with the reason."""

    def settle(
        self, waiting: JobClasses, over: set[str], failed: Mapping[str, str]
    ) -> dict[str, str]:
        """Settle the dependencies of the waiting jobs on the jobs in `over`. For each job in `over`
        that did not succeed, `failed` contains the reason.

        Jobs that depend on the success of such a job are removed, then the jobs that depend on
        their success, and so on. Returns the removed jobs, each with the reason.
        """
        removed: dict[str, str] = {}
        while over:
            arrays = Counter(self._array_of[job_id] for job_id in over if job_id in self._array_of)
            self._unfinished.subtract(arrays)
            for job_id, why in failed.items():
                self._failed[job_id] = why
                if job_id in self._array_of:
                    self._failed.setdefault(self._array_of[job_id], why)
            ended = over | {array for array in arrays if not self._unfinished[array]}
            waiting.resolve(ended, self._failed)
            failed = {}
            for job_id, cause in waiting.never(self._failed).items():
                waiting.remove(job_id)
                failed[job_id] = f"depends on the success of {cause}, which {self._failed[cause]}"
            removed |= failed
            over = set(failed)
        return removed
