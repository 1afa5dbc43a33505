"""Forecasts of jobs with deadlines, and of the jobs that depend on them."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from service.domain.scheduling.outlook.simulation import Expected
from service.domain.scheduling.policy import WaitingJob
from service.domain.scheduling.rules.dependencies import Dependency
from tests.seeds import drawn
from tests.unit.service.domain.scheduling.outlook.test_outlook import in_s, runs, starts, waits
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

LATE = {"start_by": NOW + timedelta(hours=1), "begins_at": NOW + timedelta(hours=2)}
"""Fields of a job that can't start before its deadline."""


def after(*conditions: tuple[str, str]) -> tuple[Dependency, ...]:
    return tuple(Dependency(job_id, on, "QUEUED") for job_id, on in conditions)  # type: ignore[arg-type]


def reasons(found: dict[str, Expected]) -> dict[str, str | None]:
    return {job_id: each.why and each.why.code for job_id, each in found.items()}


def test_a_deadline_comes_nearer_while_a_job_waits() -> None:
    """In an hour, the small job can run for at most 54 minutes, so it ends before the large job,
    which waits for the remaining slots, can start."""
    running = [
        runs("long", {"n": 2}, 2 * HOUR, priority=90),
        runs("short", {"n": 2}, HOUR, priority=90),
    ]
    large = waits("large", 4, priority=90, seq=1)
    ends_by = NOW + timedelta(hours=1.9)
    limits = {"ends_by": ends_by, "start_by": ends_by, "ends_within_s": 1.9 * HOUR}
    found = starts([large, waits("small", 1, left_s=None, **limits)], running)
    assert in_s(found, "small") == HOUR
    assert in_s(found, "large") == 2 * HOUR


def test_jobs_that_depend_on_a_missed_deadline_end_or_start_as_they_would() -> None:
    queue = [
        waits("late", **LATE),
        waits("success", after=after(("late", "success"))),
        waits("failure", after=after(("late", "failure"))),
        waits("end", after=after(("late", "end"))),
        waits("next", after=after(("success", "success"))),
        waits("last", after=after(("next", "end"))),
    ]
    found = starts(queue, [])
    assert reasons(found) == {
        "late": "deadline_passed",
        "success": "waiting_for_jobs",
        "next": "waiting_for_jobs",
        **dict.fromkeys(("failure", "end", "last")),
    }
    why = found["next"].why
    assert why is not None
    assert why.message.startswith(
        "depends on the success of success, which depends on the success of late, which is not "
        "expected to start by"
    )


def test_an_array_has_failed_if_one_of_its_jobs_misses_its_deadline() -> None:
    queue = [
        waits("late", **LATE),
        waits("other"),
        waits("success", after=after(("array-1", "success"))),
        waits("failure", after=after(("array-1", "failure"))),
        waits("end", after=after(("array-1", "end"))),
    ]
    found = starts(queue, [], arrays={"late": "array-1", "other": "array-1"})
    assert reasons(found) == {
        "late": "deadline_passed",
        "success": "waiting_for_jobs",
        **dict.fromkeys(("other", "failure", "end")),
    }
    assert in_s(found, "end") >= HOUR


def test_a_preempted_job_keeps_its_deadline() -> None:
    ends_by = NOW + timedelta(hours=3)
    leaving = runs("a", {"n": 4}, 9 * HOUR, yields=True, is_leaving=True, ends_by=ends_by)
    first = waits("first", 4, priority=90, left_s=4 * HOUR)
    behind = waits("behind", 4, after=after(("a", "success")))
    found = starts([first, behind], [leaving])
    assert reasons(found) == {"first": None, "behind": "waiting_for_jobs"}


def drawn_jobs(seed: int) -> list[WaitingJob]:
    die = random.Random(seed)
    jobs: list[WaitingJob] = []
    for n in range(12):
        of = die.sample([job.job_id for job in jobs], min(len(jobs), die.choice((0, 1, 1, 2))))
        on = [(one, die.choice(("success", "failure", "end"))) for one in of]
        late = LATE if die.random() < 0.3 else {}
        jobs.append(waits(f"job-{n}", left_s=600.0, after=after(*on), **late))
    die.shuffle(jobs)
    return jobs


def outcome(job: WaitingJob, jobs: dict[str, WaitingJob]) -> str:
    """Return whether the job starts, is cancelled, or waits forever."""
    outcomes = [(one.on, outcome(jobs[one.id], jobs)) for one in job.after]
    if job.start_by is not None or ("success", "cancelled") in outcomes:
        return "cancelled"
    waits_for_ever = any(it == "waits" for _, it in outcomes) or ("failure", "starts") in outcomes
    return "waits" if waits_for_ever else "starts"


@pytest.mark.parametrize("seed", drawn(40))
def test_random_jobs_start_if_their_dependencies_allow_it(seed: int) -> None:
    jobs = {job.job_id: job for job in drawn_jobs(seed)}
    found = starts(list(jobs.values()), [], {"GPU": 20.0})
    for job_id, job in jobs.items():
        wanted = outcome(job, jobs)
        assert (found[job_id].at is not None) == (wanted == "starts"), (job_id, wanted)
