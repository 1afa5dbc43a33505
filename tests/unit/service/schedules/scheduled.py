"""A service with schedules, whose loop runs round by round on a clock that the test sets."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dray import views
from dray.filters import JobFilter
from dray.schedule_requests import ScheduleChangeRequest, ScheduleRequest
from service.db.session import Database
from service.domain.callers import Caller
from service.loops.schedule_runner import ScheduleRunner
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.schedules.service import Schedules
from service.storage.storage import Storage
from tests.unit.service.helpers import Service

ANN, ADMIN = Caller("ann", is_admin=False), Caller("root", is_admin=True)
SCRIPT = {"name": "night", "script": {"entrypoint": "train.py"}}
MIDNIGHT = datetime(2027, 3, 1, tzinfo=UTC)


class Scheduled(Service):
    def __init__(self, database: Database, storage: Storage, home: Path, **settings: Any) -> None:
        super().__init__(database, storage, home, **settings)
        self.now = MIDNIGHT
        database.clock = lambda: self.now
        database.time = lambda session: self.now  # type: ignore[method-assign]
        self.schedules = Schedules(database, self.jobs, self.settings)
        self.runner = self.new_runner()

    def new_runner(self) -> ScheduleRunner:
        """The loop of a service that has just started."""
        return ScheduleRunner(
            LoopDatabase(self.database),
            self.database.signals,
            self.jobs,
            self.settings,
            LoopTimings(),
        )

    async def create(self, name: str = "night", *, owner: str = "ann", **fields: Any) -> str:
        wanted = {"name": name, "cron": "0 * * * *", "job": SCRIPT, **fields}
        made = await self.schedules.create(ScheduleRequest.model_validate(wanted), owner=owner)
        return made.id

    async def change_schedule(self, schedule: str, **fields: Any) -> views.JobSchedule:
        wanted = ScheduleChangeRequest.model_validate(fields)
        return await self.schedules.change(schedule, wanted, ANN)

    async def until(self, at: datetime, runner: ScheduleRunner | None = None) -> None:
        """Run the loop at this time until it has nothing to do."""
        self.now = at
        while await (runner or self.runner).run_once() <= 0:
            pass

    async def runs(self, schedule: str = "night", caller: Caller = ANN) -> list[views.ScheduleRun]:
        """The runs of a schedule, the oldest first."""
        return (await self.schedules.runs(schedule, caller)).items[::-1]

    async def outcomes(self, schedule: str = "night") -> list[tuple[str, str]]:
        """The local times and the outcomes of all runs, the oldest first."""
        return [(f"{run.at:%d %H:%M}", str(run.outcome)) for run in await self.runs(schedule)]

    async def jobs_of(self, schedule: str = "night") -> list[views.Job]:
        """The jobs of a schedule, the oldest first."""
        found = await self.jobs.list(JobFilter(schedule=schedule), limit=500)
        return found.items[::-1]

    async def finish(self, job_id: str) -> None:
        """End a waiting job."""
        await self.jobs.cancel(job_id)
