"""Before its begin time, a job affects neither the order of other jobs nor their slots."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from service.domain.scheduling.policy import (
    Decision,
    Node,
    Request,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules import order
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.snapshots import running, snapshot
from tests.unit.service.domain.scheduling.snapshots import waiting as recipe

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
HOUR = 3600.0
NODE = Node("n", {"GPU": 8.0}, {"GPU": 8.0})


def waiting(name: str, gpus: int, **fields: object) -> WaitingJob:
    return recipe(name, gpus, yields=False, **fields)


def decisions(*queue: WaitingJob, **more: object) -> dict[str, Decision]:
    busy = running("busy", {"n": 4}, yields=False)
    seen = replace(snapshot(queue, (busy,), {"n": 8.0}), **more)  # type: ignore[arg-type]
    found = plan(seen, NOW)
    return {decision.job_id: decision for decision in found}


def codes(found: dict[str, Decision]) -> dict[str, str]:
    return {name: d.reason.code for name, d in found.items() if isinstance(d, Wait)}


def test_no_slots_are_reserved_before_a_begin_time() -> None:
    gang, script = waiting("gang", 8, priority=90), waiting("script", 4)
    reserved = decisions(gang, script)
    assert set(codes(reserved)) == {"gang", "script"}, "the gang has reserved the slots"
    early = decisions(replace(gang, begins_at=LATER), script)
    assert codes(early) == {"gang": "begins_at"}
    assert isinstance(early["script"], Start)


def test_the_next_job_is_the_first_that_can_not_start() -> None:
    early = waiting("early", 8, priority=90, begins_at=LATER)
    gang, script = waiting("gang", 8, priority=70), waiting("script", 4)
    found = codes(decisions(early, gang, script))
    assert set(found) == {"early", "gang", "script"}
    assert found["early"] == "begins_at"


def test_a_job_that_begins_later_is_not_the_overdue_one() -> None:
    waited_s = order.LONGEST_WAIT_S + HOUR
    longest = waiting("longest", 4, waited_s=waited_s + HOUR, left_s=9 * HOUR, seq=1)
    long = waiting("long", 4, waited_s=waited_s, left_s=9 * HOUR, seq=2)
    short = waiting("short", 4, left_s=60.0, seq=3)
    assert isinstance(decisions(longest, long, short)["longest"], Start)
    found = decisions(replace(longest, begins_at=LATER), long, short)
    assert isinstance(found["long"], Start)


def test_the_owner_of_jobs_that_begin_later_is_not_active() -> None:
    """With three active users, ben has used less than a third, and comes before cid."""
    day = 86400.0
    ben = waiting("ben", 8, owner="ben", left_s=9 * HOUR, seq=1)
    cid = waiting("cid", 8, owner="cid", left_s=60.0, seq=2)
    used = {("default", "ben"): 5 * day, ("default", "cid"): 5 * day, ("default", "busy"): 0.0}
    more = {
        "queues": (Queue("default"),),
        "used_s": used,
        "running": (),
        "holders": (),
        "nodes": (NODE,),
    }
    ann = waiting("ann", 8, owner="ann", seq=3, left_s=90 * HOUR)
    assert isinstance(decisions(ben, cid, ann, **more)["ann"], Start), "ann has used least"
    found = decisions(ben, cid, replace(ann, begins_at=LATER), **more)
    assert isinstance(found["cid"], Start), "the shares of ben and cid are equal"
    assert codes(found)["ann"] == "begins_at"


def test_the_owner_of_a_job_that_waits_for_larger_nodes_is_not_active() -> None:
    """With two active users, ben has used less than half. With three, ben would have used more than
    a third, so that ben and cid would both be ahead."""
    day = 86400.0
    ben = waiting("ben", 8, owner="ben", left_s=9 * HOUR, seq=1)
    cid = waiting("cid", 8, owner="cid", left_s=60.0, seq=2)
    ann = waiting("ann", 99, owner="ann", seq=3)
    more = {
        "queues": (Queue("default"),),
        "used_s": {("default", "ben"): 5 * day, ("default", "cid"): 7 * day},
        "running": (),
        "holders": (),
        "nodes": (NODE,),
        "to_come": (replace(NODE, id="large", total={"GPU": 99.0, "CPU": 99.0}),),
    }
    found = decisions(ben, cid, ann, **more)
    assert codes(found)["ann"] == "waiting_for_nodes"
    assert isinstance(found["ben"], Start)
    found = decisions(ben, cid, replace(ann, request=ben.request, left_s=90 * HOUR), **more)
    assert isinstance(found["ann"], Start), "ann has used least"


def test_a_begin_time_is_the_reason_even_without_a_cluster() -> None:
    job = WaitingJob("early", 0, 50, 1, Request(1, {"CPU": 1.0}), begins_at=LATER)
    assert codes(decisions(job, nodes=(), connected=False)) == {"early": "begins_at"}
