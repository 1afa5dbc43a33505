"""Expected starts: the times at which jobs would start according to a simulation of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_workers.shared.slices import Slice
from service.domain.scheduling.outlook import forecast
from service.domain.scheduling.outlook.active_jobs import LEAVING_S
from service.domain.scheduling.outlook.job_classes import JobClasses
from service.domain.scheduling.outlook.simulation import (
    HORIZON_S,
    RESOLUTION,
    Expected,
    Simulation,
)
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.shared_gpus import Fractions, with_shared_gpus
from service.domain.scheduling.policy import Preempt, Request, Shrink, Start, WaitingJob, plan
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency
from service.domain.scheduling.rules.eviction import MIN_RUN_S, RunningJob
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW, running, snapshot, waiting


def waits(name: str, gpus: int = 1, **more: Any) -> WaitingJob:
    return waiting(name, gpus, **{"left_s": HOUR, "seq": 100, "yields": False, **more})


def runs(name: str, slices: dict[str, int], left_s: float | None = HOUR, **more: Any) -> RunningJob:
    return running(name, slices, **{"left_s": left_s, "yields": False, **more})


def situation(
    queue: list[WaitingJob],
    running: list[RunningJob],
    totals: Mapping[str, float] | None = None,
    **more: Any,
) -> Situation:
    facts = {key: more.pop(key) for key in ("queues", "running_of_arrays") if key in more}
    return Situation(snapshot(queue, running, totals, **facts), **more)


def starts(
    queue: list[WaitingJob], running: list[RunningJob], *args: Any, **more: Any
) -> dict[str, Expected]:
    return Simulation(situation(queue, running, *args, **more), NOW).run()


def in_s(found: Mapping[str, Expected], name: str) -> float:
    at = found[name].at
    assert at is not None, found[name].why
    return (at - NOW).total_seconds()


def test_a_job_starts_when_what_holds_its_slots_ends() -> None:
    found = starts([waits("a", 4)], [runs("r", {"n": 4}, 600.0)])
    assert in_s(found, "a") == 600.0
    assert found["a"].num_assumed == 0


def test_jobs_start_one_after_the_other_in_the_order_of_the_policy() -> None:
    queue = [waits("long", 4, left_s=9000.0, seq=1), waits("short", 4, left_s=1000.0, seq=2)]
    found = starts(queue, [runs("r", {"n": 4}, 600.0)])
    assert in_s(found, "short") == 600.0
    assert in_s(found, "long") == pytest.approx(1600.0, rel=RESOLUTION)


def test_a_job_that_would_start_now_is_expected_now() -> None:
    assert in_s(starts([waits("a")], []), "a") == 0.0


def test_a_job_that_waits_for_its_environment_alone_has_no_time_and_says_why() -> None:
    found = starts([waits("a", preparing="its environment is being prepared")], [])
    assert (found["a"].at, found["a"].why) == (
        None,
        Reason("preparing_environment", "its environment is being prepared"),
    )
    later = starts([waits("a", 4, preparing="...")], [runs("r", {"n": 4}, 600.0)])
    assert in_s(later, "a") == 600.0


def test_a_time_limit_ends_a_job_that_would_run_on() -> None:
    found = starts([waits("a", 4)], [runs("r", {"n": 4}, ends_within_s=60.0)])
    assert in_s(found, "a") == 60.0


def test_a_job_of_unknown_length_is_assumed_to_be_as_long_as_usual_and_it_is_told() -> None:
    running = [runs("r", {"n": 4}, None, held_s=400.0)]
    found = starts([waits("a", 4)], running, usual_s=1000.0)
    assert in_s(found, "a") == 600.0
    assert found["a"].num_assumed == 1
    overdue = [runs("r", {"n": 4}, None, held_s=4000.0)]
    assert in_s(starts([waits("a", 4)], overdue, usual_s=1000.0), "a") == 4000.0


def test_a_job_of_higher_priority_starts_once_others_have_made_room_and_they_go_on_after_it() -> (
    None
):
    low = runs("low", {"n": 4}, HOUR, yields=True)
    found = starts([waits("high", 4, priority=90, left_s=600.0), waits("next", 4)], [low])
    assert in_s(found, "high") == LEAVING_S
    # `low` has no more remaining work than `next`, so it resumes first, followed by `next`.
    assert in_s(found, "next") >= HOUR


def test_a_job_waits_until_those_that_run_may_be_asked() -> None:
    low = runs("low", {"n": 4}, HOUR, held_s=MIN_RUN_S - 100.0)
    found = starts([waits("high", 4, priority=90)], [low])
    assert in_s(found, "high") == pytest.approx(100.0 + LEAVING_S, rel=RESOLUTION)


def test_a_held_job_has_no_time_and_says_why() -> None:
    found = starts([waits("a", held="ann")], [])
    assert found["a"].at is None
    assert found["a"].why is not None
    assert found["a"].why.code == "held"


def test_a_job_that_no_node_could_hold_has_no_time_and_says_why() -> None:
    found = starts([waits("a", 9)], [])
    assert found["a"].at is None
    assert found["a"].why is not None
    assert found["a"].why.code == "unsatisfiable"


def test_a_job_starts_after_the_jobs_and_arrays_that_it_waits_for() -> None:
    queue = [
        waits("second", after=(Dependency("first", "success", "QUEUED"),)),
        waits("last", after=(Dependency("array-1", "end", "2 of its jobs have not ended"),)),
    ]
    running = [
        runs("first", {"n": 1}, 60.0),
        runs("m1", {"n": 1}, 30.0),
        runs("m2", {"n": 1}, 90.0),
    ]
    found = starts(queue, running, arrays={"m1": "array-1", "m2": "array-1"})
    assert (in_s(found, "second"), in_s(found, "last")) == (60.0, 90.0)


def test_a_job_after_a_failure_has_no_time_because_jobs_are_assumed_to_succeed() -> None:
    after = (Dependency("first", "failure", "RUNNING"),)
    queue = [waits("repair", after=after), waits("other")]
    found = starts(queue, [runs("first", {"n": 1}, 60.0)])
    why = found["repair"].why
    assert found["repair"].at is None
    assert why is not None
    assert (why.code, why.message) == (
        "waiting_for_jobs",
        "waits for the failure of first (RUNNING)",
    )
    assert found["other"].at is not None


def test_a_job_after_one_that_is_held_has_no_time() -> None:
    after = (Dependency("first", "success", "QUEUED"),)
    found = starts([waits("first", held="ann"), waits("second", after=after)], [])
    assert found["second"].at is None
    why = found["second"].why
    assert why is not None
    assert why.code == "waiting_for_jobs"


def test_a_job_that_backs_off_starts_when_it_is_tried_again() -> None:
    found = starts([waits("a", not_before=NOW + timedelta(seconds=30))], [])
    assert in_s(found, "a") == 30.0


def test_members_of_an_array_start_as_its_limit_allows() -> None:
    limit = ArrayLimit("array-1", 1)
    queue = [waits("m2", array=limit, left_s=100.0, seq=1), waits("m3", array=limit, seq=2)]
    running = [runs("m1", {"n": 1}, 60.0)]
    arrays = {"m1": "array-1", "m2": "array-1", "m3": "array-1"}
    found = starts(queue, running, arrays=arrays, running_of_arrays={"array-1": 1})
    assert in_s(found, "m2") == 60.0
    assert in_s(found, "m3") == pytest.approx(160.0, rel=RESOLUTION)


def test_a_queue_in_which_nothing_runs_gives_no_time() -> None:
    found = starts([waits("a", queue="night")], [], queues=(Queue("night", max_running=0),))
    why = found["a"].why
    assert found["a"].at is None
    assert why is not None
    assert why.code == "queue_limit"


def test_an_elastic_job_that_starts_smaller_takes_longer() -> None:
    queue = [waits("a", 4, min_workers=2, left_s=1000.0, seq=1), waits("b", 4, left_s=9e4, seq=2)]
    found = starts(queue, [runs("r", {"n": 2}, 10.0)])
    assert in_s(found, "a") == 0.0
    assert in_s(found, "b") == pytest.approx(2000.0, rel=RESOLUTION)


def test_a_job_without_end_on_few_of_its_workers_ends_within_the_calendar() -> None:
    endless = waits("a", 4096, min_workers=1, left_s=forecast.LONGEST_S, seq=1)
    assert in_s(starts([endless], [], {"n": 1.0}), "a") == 0.0


def test_an_elastic_group_gives_slots_back_and_takes_longer() -> None:
    parts = (Slice("n1", 2), Slice("n2", 2))
    wide = runs("wide", {"n1": 2, "n2": 2}, 1000.0, spare=parts[1:])
    queue = [waits("a", 2, left_s=9e4, seq=1), waits("b", 4, left_s=9e5, seq=2)]
    found = starts(queue, [wide], {"n1": 2.0, "n2": 2.0})
    assert in_s(found, "a") == LEAVING_S
    # `wide` has only half of its workers, so its remaining work takes twice as long.
    ends_s = 2 * (1000.0 - LEAVING_S) + LEAVING_S
    assert in_s(found, "b") >= 9e4
    narrow = starts([queue[0], waits("c", 2, left_s=9e5, seq=3)], [wide], {"n1": 2.0, "n2": 2.0})
    assert in_s(narrow, "c") == pytest.approx(ends_s, rel=RESOLUTION)


def test_a_gpu_is_whole_again_once_all_that_share_it_have_ended() -> None:
    part = Request(2, {"GPU": 0.5})
    shares = replace(runs("shares", {"n": 2}, 600.0), request=part)
    there = situation([waits("a", 4)], [shares])
    (node,) = there.snapshot.nodes
    free = with_shared_gpus(node.available_to_us, [Fractions(0.5, 2)])
    nodes = (replace(node, available_to_us=free),)
    there = replace(there, snapshot=replace(there.snapshot, nodes=nodes))
    assert in_s(Simulation(there, NOW).run(), "a") == 600.0


def test_a_job_that_has_left_its_slots_still_ends_within_its_limit() -> None:
    """Therefore it may use reserved slots when it returns."""
    queue = [
        waits("high", 2, priority=60, left_s=100.0),
        waits("wide", 4, priority=55, left_s=100.0),
        waits("then", after=(Dependency("low", "success", "RUNNING"),), ends_within_s=60.0),
    ]
    low = runs("low", {"n": 2}, 300.0, priority=10, ends_within_s=400.0)
    stays = runs("stays", {"n": 2}, 10 * HOUR, priority=90)
    found = starts(queue, [low, stays])
    assert in_s(found, "high") == LEAVING_S
    assert in_s(found, "then") < 600.0


def test_slots_in_quarantine_come_back_with_no_jobs_end() -> None:
    there = situation([waits("a", 4)], [runs("ends", {"n": 4}, 600.0)])
    (node,) = there.snapshot.nodes
    nodes = (replace(node, quarantined={"GPU": 1.0}),)
    there = replace(there, snapshot=replace(there.snapshot, nodes=nodes))
    assert Simulation(there, NOW).run()["a"].at is None
    fewer = replace(there, snapshot=replace(there.snapshot, queue=(waits("b", 3),)))
    assert in_s(Simulation(fewer, NOW).run(), "b") == 600.0


def test_what_is_kept_of_an_array_is_bounded_and_jobs_after_it_wait_for_all_of_it() -> None:
    limit = ArrayLimit("array-1", 1)
    members = [waits(f"m{n}", array=limit, seq=n) for n in range(1000)]
    names = [job.job_id for job in members]
    there = situation(
        [*members, waits("after", after=(Dependency("array-1", "success", "QUEUED"),))],
        [runs("m-runs", {"n": 1})],
        arrays=dict.fromkeys([*names, "m-runs"], "array-1"),
    )
    first = there.first_jobs(2)
    kept = {job.job_id for job in first.snapshot.queue} | {"m-runs"}
    assert len(kept) < 30
    assert first.arrays.keys() == kept
    assert first.others_of_arrays == {"array-1": 1001 - len(kept)}
    again = first.first_jobs(1)
    assert len(again.arrays) + again.others_of_arrays["array-1"] == 1001
    snapshot = replace(first.snapshot, queue=(*first.snapshot.queue, there.snapshot.queue[-1]))
    play = Simulation(replace(first, snapshot=snapshot), NOW)
    assert play.run()["after"].at is None, "members that are left out have not ended"


def test_slots_of_a_job_that_has_ended_come_back_soon() -> None:
    there = situation([waits("a", 4)], [runs("r", {"n": 4})])
    there = replace(there, snapshot=replace(there.snapshot, running=()))
    assert in_s(Simulation(there, NOW).run(), "a") == LEAVING_S


def test_a_play_that_is_cut_off_says_until_when_a_job_has_not_started() -> None:
    queue = [waits(f"j{n}", 4, seq=n) for n in range(50)]
    there = situation(queue, [runs("r", {"n": 4})])
    found = Simulation(there, NOW, max_plans=20).run()
    first, last = found["j0"], found["j49"]
    assert first.at is not None
    assert last.at is None
    assert last.why is not None
    assert last.why.code == "beyond_forecast"
    assert last.not_before is not None
    assert last.not_before > first.at


def test_no_play_goes_beyond_the_horizon() -> None:
    found = starts([waits("a", 4)], [runs("r", {"n": 4}, 2 * HORIZON_S)])
    assert found["a"].at is None


def test_without_a_cluster_nobody_has_a_time() -> None:
    there = situation([waits("a")], [])
    there = replace(there, snapshot=replace(there.snapshot, connected=False))
    why = Simulation(there, NOW).run()["a"].why
    assert why is not None
    assert why.code == "cluster_unavailable"


def test_rules_by_which_others_come_first_are_named() -> None:
    queues = (Queue("default"), Queue("night", quota={"GPU": 2.0}), Queue("idle", quota={"GPU": 1}))
    queue = [waits("a", owner="ann"), waits("b", owner="bob"), waits("c", queue="night")]
    there = situation(queue, [], queues=queues)
    assert told(there, "ann") == ["other_quota"]
    used = {("default", "ann"): 9e5, ("night", "default"): 0.0}
    there = replace(there, snapshot=replace(there.snapshot, used_s=used))
    assert told(there, "ann") == ["other_quota", "queue_is_ahead", "user_is_ahead"]
    assert told(there.first_jobs(), "bob") == ["other_quota", "queue_is_ahead"]
    used = {("default", "ann"): 9e5, ("default", "cid"): 4.5e5}
    there = replace(there, snapshot=replace(there.snapshot, used_s=used))
    assert told(there, "cid") == ["other_quota", "queue_is_ahead", "others_are_behind"]


def test_a_user_is_said_to_be_ahead_by_the_weight_in_the_queue() -> None:
    queue = [waits("a", owner="ann"), waits("b", owner="bob")]
    there = situation(queue, [], queues=(Queue("default", user_weights={"ann": 3.0}),))
    for of_ann_s, of_bob_s, ahead in ((9e5, 3e5, []), (2e6, 3e5, ["ann"]), (3e5, 3e5, ["bob"])):
        used = {("default", "ann"): of_ann_s, ("default", "bob"): of_bob_s}
        then = replace(there, snapshot=replace(there.snapshot, used_s=used))
        assert [owner for owner in ("ann", "bob") if told(then, owner)] == ahead
    (reason,) = then.favoured("default", "bob")
    assert (
        reason.message == "bob has used more than their share of the queue: other users come first"
    )


def told(there: Situation, owner: str) -> list[str]:
    return [reason.code for reason in there.favoured("default", owner)]


JOBS = st.lists(
    st.builds(
        lambda gpus, priority, left, yields, owner, impatient, ends_within: (
            gpus,
            {
                "ends_within_s": ends_within,
                "priority": priority,
                "left_s": left,
                "yields": yields,
                "owner": owner,
                "waited_s": 1e6 if impatient else 0.0,
            },
        ),
        st.integers(1, 9),
        st.sampled_from([40, 50, 60]),
        st.sampled_from([None, 60.0, 4000.0, 90000.0]),
        st.booleans(),
        st.sampled_from(["ann", "bob"]),
        st.booleans(),
        st.sampled_from([None, None, 30.0, 900.0, 5000.0]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(JOBS, st.lists(st.tuples(st.integers(1, 2), st.booleans(), st.booleans()), max_size=6))
def test_a_plan_of_the_first_jobs_of_all_classes_decides_as_a_plan_of_the_whole_queue(
    jobs: list[tuple[int, dict[str, Any]]], held: list[tuple[int, bool, bool]]
) -> None:
    running = []
    free = {"n1": 4, "n2": 4, "n3": 2}
    for number, (gpus, yields, is_old) in enumerate(held):
        name = next((name for name, left in free.items() if left >= gpus), None)
        if name is not None:
            free[name] -= gpus
            held_s = MIN_RUN_S if is_old else 0.0
            running.append(runs(f"r{number}", {name: gpus}, yields=yields, held_s=held_s))
    queue = [waits(f"j{n}", gpus, seq=n, **more) for n, (gpus, more) in enumerate(jobs)]
    there = situation(queue, running, {"n1": 4.0, "n2": 4.0, "n3": 2.0}).snapshot
    whole = plan(there, NOW)
    by_id = {job.job_id: job for job in queue}
    in_order = [by_id[d.job_id] for d in whole if d.job_id in by_id]
    classes = JobClasses(in_order, there.queues, there.nodes)
    heads = classes.heads({node.id: node.available_to_us for node in there.nodes})
    found = plan(replace(there, queue=tuple(heads)), NOW)
    changes = [d for d in whole if isinstance(d, Start | Preempt | Shrink)]
    assert [d for d in found if isinstance(d, Start | Preempt | Shrink)] == changes


def test_as_time_passes_fewer_jobs_end_before_the_first_blocked_job_starts() -> None:
    there = [replace(runs("r", {"n": 3}, 7200.0), yields=False, ends_within_s=7200.0)]
    queue = [
        waits("gang", 4, left_s=100.0, yields=False, seq=1),
        waits("short", 1, left_s=600.0, yields=False, ends_within_s=600.0, seq=2),
        waits("long", 1, left_s=6500.0, yields=False, ends_within_s=6500.0, seq=3),
    ]
    found = starts(queue, there)
    assert in_s(found, "short") == 0.0
    assert in_s(found, "gang") == 7200.0
    assert in_s(found, "long") > 7200.0, "it could pass at first, but not after 600 s"
