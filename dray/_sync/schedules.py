# Written by `make blocking` from dray/_async/schedules.py: change that file instead.
"""Schedules, which submit jobs at the times of a cron expression."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from typing import Any

from dray import views
from dray._http.transport import Call, present, segment
from dray._sync.submitting import Spec, SubmitCalls
from dray.views import MissedRuns, Overlap

PAGE = 100


class ScheduleCalls(SubmitCalls):
    def create_schedule(
        self,
        name: str,
        cron: str,
        spec: Spec,
        *,
        time_zone: str = "UTC",
        overlap: Overlap | str = Overlap.SKIP,
        missed: MissedRuns | str = MissedRuns.LAST,
        deadline_s: int | None = None,
        paused: bool = False,
    ) -> views.JobSchedule:
        """Submit a job at each time of a cron expression, such as `30 2 * * MON-FRI` or `@daily`.

        spec: the job document, as in `submit`; its code is uploaded now, and is kept as long as the
        schedule exists. overlap: what happens if the previous run has not ended (skip, queue or
        replace). missed: which runs are submitted later if the service did not run, or the schedule
        was paused, at their times (skip, last or all). deadline_s: the number of seconds after
        which a run counts as missed.

        Raises ScheduleExists, TooManySchedules, InvalidDocument, and the exceptions of `submit`.
        """
        given = present(deadline_s=deadline_s)
        document = {
            "name": name,
            "cron": cron,
            "time_zone": time_zone,
            "job": self._uploaded(spec),
            "overlap": Overlap(overlap),
            "missed": MissedRuns(missed),
            "paused": paused,
            **given,
        }
        return self._read(views.JobSchedule, Call.with_json("POST", "/v1/schedules", document))

    def schedules(self) -> Generator[views.JobSchedule, None, None]:
        """Yield your schedules, the oldest first. Admins get the schedules of all users."""
        return self._items(views.SchedulePage, "/v1/schedules", page_size=PAGE)

    def schedule(self, schedule: str) -> views.JobSchedule:
        """Return a schedule, given its id or the name of one of your schedules, as in all methods
        for schedules. Raises ScheduleNotFound."""
        return self._read(views.JobSchedule, Call("GET", _path(schedule)))

    def schedule_runs(self, schedule: str) -> list[views.ScheduleRun]:
        """Return the latest 100 runs of a schedule, the latest first, including runs that were
        skipped, missed or refused."""
        return self._list(views.ScheduleRunPage, f"{_path(schedule)}/runs")

    def change_schedule(
        self,
        schedule: str,
        *,
        cron: str | None = None,
        spec: Spec | None = None,
        time_zone: str | None = None,
        overlap: Overlap | str | None = None,
        missed: MissedRuns | str | None = None,
        deadline_s: int | None = None,
        no_deadline: bool = False,
    ) -> views.JobSchedule:
        """Change a schedule. The change applies from the next run on. `no_deadline` removes the
        deadline. Raises the exceptions of `create_schedule`."""
        changes: dict[str, Any] = present(
            cron=cron,
            time_zone=time_zone,
            job=None if spec is None else self._uploaded(spec),
            overlap=None if overlap is None else Overlap(overlap),
            missed=None if missed is None else MissedRuns(missed),
            deadline_s=deadline_s,
        )
        if no_deadline:
            changes["deadline_s"] = None
        return self._changed(schedule, changes)

    def pause_schedule(self, schedule: str) -> views.JobSchedule:
        """Submit no runs until the schedule is resumed. Submitted jobs continue."""
        return self._changed(schedule, {"paused": True})

    def resume_schedule(self, schedule: str) -> views.JobSchedule:
        """Submit runs again. `missed` decides what happens to the runs whose times passed during
        the pause."""
        return self._changed(schedule, {"paused": False})

    def run_schedule(self, schedule: str, *, idempotency_key: str | None = None) -> views.Job:
        """Submit a job of the schedule now, even if the schedule is paused. Raises RunUnfinished if
        `overlap` is `skip` and the previous run has not ended, and the exceptions of `submit`."""
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        call = Call("POST", f"{_path(schedule)}/run", headers={"Idempotency-Key": key})
        return self._read(views.Job, call)

    def delete_schedule(self, schedule: str) -> None:
        """Delete a schedule and the record of its runs. Its jobs remain."""
        self._send(Call("DELETE", _path(schedule)))

    def _changed(self, schedule: str, changes: dict[str, Any]) -> views.JobSchedule:
        call = Call.with_json("PATCH", _path(schedule), changes)
        return self._read(views.JobSchedule, call)


def _path(schedule: str) -> str:
    return f"/v1/schedules/{segment(schedule)}"
