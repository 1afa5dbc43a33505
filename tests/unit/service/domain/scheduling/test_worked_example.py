"""The worked example in docs/explanation/scheduling.md: each row of its tables is what `plan`
decides about its jobs, and each computed number is the factor that the plan compares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from service.domain.scheduling.outlook.factors import Factors
from service.domain.scheduling.policy import (
    Preempt,
    RunningJob,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.reservations import Reservation
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW, running, snapshot, waiting

PAGE = Path(__file__).resolve().parents[5] / "docs" / "explanation" / "scheduling.md"
NODES = {"n1": 4.0, "n2": 4.0}
"""GPUs of each node."""


@dataclass(frozen=True)
class Step:
    """A moment of the example: waiting and running jobs, with what the page says about each of
    them."""

    queue: Sequence[tuple[WaitingJob, str]]
    there: Sequence[tuple[RunningJob, str]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> Snapshot:
        jobs = [job for job, _ in self.queue]
        return snapshot(jobs, [job for job, _ in self.there], NODES, **self.facts)

    def rows(self) -> list[str]:
        """Return the rows of the page's table: the running jobs, and then the waiting jobs in the
        order of the queue."""
        decisions = plan(self.seen, NOW)
        told = {job.job_id: f"runs on {_nodes(job)}" for job, _ in self.there}
        for each in decisions:
            if isinstance(each, Preempt):
                told[each.job_id] += f", is asked to leave for `{each.because_of}`"
            elif isinstance(each, Start):
                told[each.job_id] = f"starts on {_nodes(each)}"
            elif isinstance(each, Wait):
                told[each.job_id] = each.reason.message
        jobs = {job.job_id: (job, text) for job, text in [*self.there, *self.queue]}
        rows = []
        for job_id, decision in told.items():
            job, text = jobs[job_id]
            rows.append(
                f"| `{job_id}` | {job.owner} | {job.request.num_workers} | {text} | {decision} |"
            )
        return rows


def _nodes(placed: RunningJob | Start) -> str:
    return ", ".join(part.node_id for part in placed.slices)


def script(name: str, gpus: int, limit_s: float, **fields: Any) -> WaitingJob:
    """A script of an owner without earlier jobs, so half of its limit is the guess."""
    return waiting(name, gpus, yields=False, guess_s=limit_s / 2, ends_within_s=limit_s, **fields)


def running_script(name: str, slices: Mapping[str, int], limit_s: float) -> RunningJob:
    times = {"left_s": None, "guess_s": limit_s / 2, "ends_within_s": limit_s, "held_s": HOUR}
    return running(name, slices, owner="ada", yields=False, **times)


GANG = script("gang", 8, HOUR, seq=1, owner="bob")
QUEUE = [
    (GANG, "script, limit 1 h"),
    (waiting("eval", seq=2, owner="carol"), "recipe, unknown"),
    (script("render", 1, HOUR, seq=3, owner="ada"), "script, limit 1 h"),
    (script("crawl", 1, 6 * HOUR, seq=4, owner="carol"), "script, limit 6 h"),
    (waiting("sweep", seq=5, owner="carol", left_s=10 * HOUR), "recipe, 10 h"),
]
PRETRAIN = (running_script("pretrain", {"n1": 4}, 2 * HOUR), "script, 2 h until its limit")
USED = {("default", "ada"): 9 * HOUR, ("default", "carol"): 9 * HOUR}

FIRST = Step(QUEUE, [PRETRAIN], {"used_s": USED})
OVERDUE = Step(
    [(replace(GANG, waited_s=25 * HOUR), "script, limit 1 h"), *QUEUE[1:3]],
    [PRETRAIN],
    {"used_s": {**USED, ("default", "bob"): 9 * HOUR}},
)
MAINTENANCE = Reservation(
    "repair", NOW + timedelta(hours=3), NOW + timedelta(hours=5), frozenset({"n2"})
)
RESERVED = Step(QUEUE, [PRETRAIN], {"used_s": USED, "reservations": (MAINTENANCE,)})
LONG = running("long", {"n1": 4, "n2": 4}, owner="ada", left_s=10 * HOUR)
NEW = waiting("new", 2, seq=7, owner="bob")
ROOM = Step([(NEW, "recipe, unknown")], [(LONG, "recipe, 10 h")])
QUOTA = Step(
    [(waiting("serve", 4, owner="dan", queue="prod", left_s=20 * HOUR), "recipe, 20 h")],
    [(running_script("batch", {"n1": 4, "n2": 4}, HOUR), "script, 1 h until its limit")],
    {"queues": (Queue("default"), Queue("prod", quota={"GPU": 4.0}))},
)
STEPS = (FIRST, OVERDUE, RESERVED, ROOM, QUOTA)


def work(step: Step, job_id: str) -> float | None:
    (found,) = [each.value for each in Factors(step.seen, NOW).of(job_id) if each.name == "work"]
    return found


def test_each_table_of_the_page_is_what_the_plan_decides() -> None:
    on_page = re.findall(r"^\| `\w+` \|.*$", PAGE.read_text(), re.MULTILINE)
    assert on_page == [row for step in STEPS for row in step.rows()]


def test_the_work_of_each_job_is_as_the_page_says() -> None:
    named = {"gang": 2100, "eval": 0, "render": 490, "crawl": 2589, "sweep": 8467}
    text = " ".join(PAGE.read_text().split())
    for job_id, expected in named.items():
        assert round(work(FIRST, job_id) or 0) == expected
        assert f"{expected:,} for `{job_id}`" in text


def test_without_usage_the_gang_would_come_after_the_render_job() -> None:
    decided = [each.job_id for each in plan(replace(FIRST.seen, used_s={}), NOW)]
    assert decided[:3] == ["eval", "render", "gang"]


@pytest.mark.parametrize(
    ("left_s", "others_left_s", "is_asked"),
    [(540.0, 10 * HOUR, False), (30 * HOUR, 10 * HOUR, False), (30 * HOUR, 5 * HOUR, True)],
)
def test_the_new_job_leaves_only_if_it_has_more_than_twice_the_work(
    left_s: float, others_left_s: float, is_asked: bool
) -> None:
    there = running("new", {"n1": 2}, owner="bob", left_s=left_s)
    waits = waiting("long", 8, owner="ada", left_s=others_left_s)
    step = Step([(waits, "")], [(there, "")])
    assert any(isinstance(each, Preempt) for each in plan(step.seen, NOW)) == is_asked


def test_the_works_of_the_two_jobs_are_as_the_page_says() -> None:
    works = {
        "318": waiting("new", 2, left_s=540.0),
        "36,300": waiting("long", 8, left_s=10 * HOUR),
        "41,038": waiting("new", 2, left_s=30 * HOUR),
        "18,300": waiting("long", 8, left_s=5 * HOUR),
    }
    for text, job in works.items():
        assert f"{work(Step([(job, '')], []), job.job_id):,.0f}" == text
        assert text in PAGE.read_text()
