"""The record of the cluster's capacity, and of why jobs wait."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dray import views
from service.db.session import Database
from service.domain.callers import Caller
from service.domain.scheduling.policy import Reason, Snapshot, Wait
from service.jobs.usage import UsageReports
from service.loops.scheduling import usage_sampler
from service.loops.scheduling.stages import SchedulerRound
from service.loops.scheduling.usage_sampler import MAX_SAMPLE, UsageSampler
from service.loops.shared.fencing import LoopDatabase
from tests.seeds import drawn
from tests.unit.service.domain.scheduling import snapshots
from tests.unit.service.loops.world import World, eventually

ADMIN = Caller("root", is_admin=True)
CODES = ("waiting_for_slots", "behind_in_queue", "held")


class Context:
    """The part of the loops' context that the sampler uses."""

    def __init__(self, database: Database) -> None:
        self.database = LoopDatabase(database)


def sampler(database: Database) -> UsageSampler:
    context: Any = Context(database)
    return UsageSampler(context)


def seen(now: datetime, gpus: float, waiting: Counter[tuple[str, str]]) -> SchedulerRound:
    """A round in which these numbers of jobs wait, keyed by (queue, code)."""
    queue, decisions = [], []
    for (name, code), number in waiting.items():
        for _ in range(number):
            job = snapshots.waiting(f"job-{len(queue)}", queue=name)
            queue.append(job)
            decisions.append(Wait(job.job_id, Reason(code, "it waits"), len(queue)))
    found = SchedulerRound(None, Snapshot(tuple(queue), (), connected=True), (), now)
    found.total, found.decisions = {"CPU": 4 * gpus, "GPU": gpus}, decisions
    return found


async def report(database: Database, now: datetime, **wanted: Any) -> views.UsageReport:
    return await UsageReports(database, clock=lambda: now).report(ADMIN, per="hour", **wanted)


@pytest.mark.parametrize("seed", drawn(2))
async def test_the_record_is_that_of_a_count_by_second(database: Database, seed: int) -> None:
    die, stage = random.Random(seed), sampler(database)
    now = begin = datetime(2026, 1, 1, 11, 40, 30, tzinfo=UTC)
    gpus_by_hour: dict[int, float] = defaultdict(float)
    waits: dict[tuple[int, str], float] = defaultdict(float)
    measured = 0
    for _ in range(100):
        gpus = float(die.choice((4, 8)))
        keys = [(queue, code) for queue in ("default", "night") for code in CODES]
        waiting = Counter({key: die.randint(0, 3) for key in die.sample(keys, 3)})
        await stage.after(seen(now, gpus, waiting))
        await stage.after(seen(now + timedelta(seconds=1), 0.0, Counter()))  # it is too early
        step = die.choice((5, 11, 29, 30, 90))
        for _ in range(step):
            if step <= MAX_SAMPLE.total_seconds():
                measured += 1
                gpus_by_hour[now.hour] += gpus
                for (_, code), number in waiting.items():
                    waits[now.hour, code] += number
            now += timedelta(seconds=1)
    await stage.after(seen(now, 1.0, Counter()))
    await stage.after(seen(now + timedelta(minutes=2), 1.0, Counter()))  # stores the rest
    found = await report(database, now + timedelta(minutes=2), since=begin)
    assert sum(found.capacity.measured_s) == measured
    hours = [start.hour for start in found.starts]
    assert found.capacity.gpu_hours == pytest.approx(
        [gpus_by_hour[hour] / 3600 for hour in hours], abs=1e-5
    )
    assert found.capacity.cpu_hours == pytest.approx(
        [4 * gpus_by_hour[hour] / 3600 for hour in hours], abs=1e-5
    )
    for wait in found.waits:
        expected = [waits[hour, wait.code] / 3600 for hour in hours]
        assert wait.job_hours == pytest.approx(expected, abs=1e-5)
    assert {wait.code for wait in found.waits} == {code for _, code in waits}
    totals = [sum(wait.job_hours) for wait in found.waits]
    assert totals == sorted(totals, reverse=True)


async def test_sums_that_can_not_be_stored_are_stored_later(database: Database) -> None:
    stage, now = sampler(database), datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
    write, fails = LoopDatabase.write, True

    async def refused(self: LoopDatabase, work: Any) -> Any:
        if fails:
            raise ConnectionError("the database is away")
        return await write(self, work)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LoopDatabase, "write", refused)
        for second in range(0, 130, 10):
            await stage.after(seen(now + timedelta(seconds=second), 2.0, Counter()))
        assert sum((await report(database, now + timedelta(hours=1))).capacity.measured_s) == 0
        fails = False
        for second in range(130, 200, 10):
            await stage.after(seen(now + timedelta(seconds=second), 2.0, Counter()))
    found = await report(database, now + timedelta(hours=1))
    assert sum(found.capacity.measured_s) >= 120


async def test_the_scheduler_records_why_a_job_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAMPLE_PERIOD", "STORE_PERIOD"):
        monkeypatch.setattr(usage_sampler, name, timedelta(0))
    runtime = await world.open()
    for _ in range(5):
        await world.submit(runtime, "waits", workers=2)

    async def recorded() -> bool:
        found = await UsageReports(runtime.database).report(ADMIN, per="hour")
        codes = {wait.code for wait in found.waits if sum(wait.job_hours) > 0}
        return "waiting_for_slots" in codes and found.capacity.cpu_hours[-1] > 0

    await eventually(recorded, "no job's wait was recorded")
