"""Random schedules, pauses, outages, kills and clocks that are set back, compared with a model that
looks at every minute."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dray.views import JobState
from service.db.session import Database
from service.loops.schedule_runner import ScheduleRunner
from service.loops.shared.fencing import LoopDatabase
from service.storage.storage import Storage
from tests.unit.service.schedules.scheduled import MIDNIGHT, Scheduled

MINUTE = timedelta(minutes=1)


class Killed(BaseException):
    pass


class Killing(LoopDatabase):
    """Ends the process before or after the commit of one write."""

    def __init__(self, database: Database, write: int, *, commits: bool) -> None:
        super().__init__(database)
        self.left, self.commits = write, commits

    async def write(self, work: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.commits:
            raise Killed
        found = await super().write(work)
        if self.left == 0:
            raise Killed
        return found


def killed_runner(service: Scheduled, write: int, *, commits: bool) -> ScheduleRunner:
    runner = service.new_runner()
    runner._database = Killing(service.database, write, commits=commits)
    return runner


@dataclass
class Model:
    """The rules of the guide, minute by minute. Times are minutes since MIDNIGHT."""

    every: int
    overlap: str
    missed: str
    deadline_s: int | None
    decided: int = 0
    outcomes: list[tuple[int, str]] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)

    def times(self, now: int) -> list[int]:
        return [minute for minute in range(self.decided + 1, now + 1) if minute % self.every == 0]

    def look(self, now: int) -> None:
        times = self.times(now)
        late_s = self.deadline_s or (300 if self.missed == "skip" else 10**9)
        chosen = times[-100:] if self.missed == "all" else times[-1:]
        for time in chosen:
            if (now - time) * 60 > late_s:
                continue
            if self.overlap == "skip" and self.unfinished:
                self.outcomes.append((time, "skipped"))
                continue
            if self.overlap == "replace":
                self.unfinished.clear()
            self.outcomes.append((time, "submitted"))
            self.unfinished.append(time)
        self.decided = max([self.decided, *times])

    def skip(self, now: int) -> None:
        self.decided = max([self.decided, *self.times(now)])


async def one_case(service: Scheduled, seed: int) -> None:
    rng = random.Random(seed)
    every = rng.choice((1, 5, 20, 60))
    rules: dict[str, Any] = {
        "overlap": rng.choice(("skip", "queue", "replace")),
        "missed": rng.choice(("skip", "last", "all")),
        "deadline_s": rng.choice((None, None, 120, 1200)),
    }
    service.now = MIDNIGHT
    name = f"seed-{seed}"
    cron = {1: "* * * * *", 60: "@hourly"}.get(every, f"*/{every} * * * *")
    await service.create(name, cron=cron, **rules)
    model = Model(every, **rules)
    minute, paused, story = 0, False, [f"{seed}: {cron} {rules}"]
    for _ in range(8):
        action = rng.choice(("run", "run", "run", "outage", "pause", "finish", "back", "kill"))
        story.append(f"{action} at {minute}")
        if action == "back":
            service.now = MIDNIGHT + MINUTE * max(0, minute - rng.randrange(100))
            await service.until(service.now)
            continue
        if action == "finish" and model.unfinished:
            ended = model.unfinished.pop(rng.randrange(len(model.unfinished)))
            at = MIDNIGHT + MINUTE * ended
            (job,) = [one for one in await service.jobs_of(name) if one.scheduled_at == at]
            await service.finish(job.id)
        if action == "pause":
            service.now = MIDNIGHT + MINUTE * minute
            await service.change_schedule(name, paused=not paused)
            if paused and model.missed == "skip":
                model.skip(minute)
            paused = not paused
        minute += rng.choice((0, 1, 3, 7, 30, 61)) if action != "outage" else rng.randrange(200)
        service.now = MIDNIGHT + MINUTE * minute
        if action == "kill":
            runner = killed_runner(service, rng.randrange(1, 4), commits=rng.random() < 0.5)
            try:
                await service.until(service.now, runner)
            except Killed:
                story.append("killed")
        await service.until(service.now)
        if not paused:
            model.look(minute)
        runs = [run for run in await service.runs(name) if run.outcome != "missed"]
        found = [((run.at - MIDNIGHT) // MINUTE, str(run.outcome)) for run in runs]
        assert found == model.outcomes[-len(found) :], story
        assert len(found) >= min(len(model.outcomes), 50), story
    jobs = await service.jobs_of(name)
    submitted = [time for time, outcome in model.outcomes if outcome == "submitted"]
    times = [one.scheduled_at and (one.scheduled_at - MIDNIGHT) // MINUTE for one in jobs]
    assert times == submitted, story
    waiting = [one for one in jobs if one.state is JobState.QUEUED]
    left = [one.scheduled_at and (one.scheduled_at - MIDNIGHT) // MINUTE for one in waiting]
    assert left == model.unfinished, story
    await service.change_schedule(name, paused=True)


@pytest.fixture
def quick(sqlite_url: str, storage: Storage, tmp_path: Path) -> Scheduled:
    return Scheduled(Database(sqlite_url), storage, tmp_path)


async def test_random_schedules_follow_the_rules(quick: Scheduled) -> None:
    for seed in range(12):
        await one_case(quick, seed)
    quick.database.close()


@pytest.mark.parametrize("queue", ["default", "gone"])
@pytest.mark.parametrize("commits", [False, True])
async def test_a_kill_at_any_write_neither_loses_nor_repeats_a_run(
    scheduled: Scheduled, queue: str, commits: bool
) -> None:
    kills = 0
    for write in range(1, 5):
        name = f"killed-{write}"
        scheduled.now = MIDNIGHT
        await scheduled.queue("gone")
        await scheduled.create(name, job={"recipe": "image_classification", "queue": queue})
        await scheduled.queues.delete("gone")
        at = datetime(2027, 3, 1, 1, tzinfo=UTC)
        try:
            await scheduled.until(at, killed_runner(scheduled, write, commits=commits))
        except Killed:
            kills += 1
        await scheduled.until(at)
        (run,) = await scheduled.runs(name)
        assert run.outcome == ("submitted" if queue == "default" else "refused")
        assert len(await scheduled.jobs_of(name)) == (queue == "default")
        await scheduled.change_schedule(name, paused=True)
    assert 2 <= kills < 4, "the last process is not killed"
