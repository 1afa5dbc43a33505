"""Create the waiting job that would exist if a job's document were resubmitted with one change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dray.spec import JobSpec
from service.db.models import JobRow
from service.domain.documents import DocumentRefused, read
from service.domain.scheduling.outlook import forecast
from service.domain.scheduling.outlook.counterfactuals import Change
from service.domain.scheduling.placement import slots
from service.domain.scheduling.policy import WaitingJob
from service.outlook.step_times import Kind, RunTimes

NEWEST_SEQ = 2**63 - 1
"""Sequence number of a job that has not been submitted; such a job would be the last in the
queue."""
FIELDS = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker", "memory": "memory_bytes"}


@dataclass(frozen=True)
class Resubmission:
    """Implements `Resubmit` for the job of a row."""

    row: JobRow
    earlier: RunTimes

    def __call__(self, job: WaitingJob, change: Change) -> WaitingJob | None:
        # Skip jobs that belong to an array, because they have no document of their own to change.
        # Skip jobs with silos, because their ranks are pinned to nodes.
        if self.row.array_id is not None or job.request.homes:
            return None
        spec = self._checked(change)
        if spec is None:
            return None
        request = slots.request_of_job(spec)
        kind = Kind(self.row.owner, self.row.name, request.num_workers)
        return replace(
            job,
            attempt=0,
            seq=NEWEST_SEQ,
            request=request,
            left_s=forecast.seconds_left(None, 0.0, self.earlier.get(kind, ())),
            waited_s=0.0,
            ends_within_s=change.max_runtime_s or self.row.max_runtime_s,
            place=0,
        )

    def _checked(self, change: Change) -> JobSpec | None:
        resources: dict[str, Any] = dict(self.row.spec.get("resources") or {})
        if change.num_workers is not None:
            resources["num_workers"] = change.num_workers
        if change.of_worker is not None:
            name, amount = change.of_worker
            resources[FIELDS[name]] = int(amount)
        if change.anywhere:
            resources["required_topology"] = None
        spec = {**self.row.spec, "resources": resources}
        if change.max_runtime_s is not None:
            spec["max_runtime_s"] = change.max_runtime_s
        if change.min_workers is not None:
            spec["elastic"] = {**spec["elastic"], "min_workers": change.min_workers}
        if change.num_spares is not None:
            spec["elastic"] = (
                {**spec["elastic"], "spares": change.num_spares} if change.num_spares else None
            )
        try:
            return read(spec)
        except DocumentRefused:
            return None
