"""The sizes of elastic jobs, based on their gains according to their reports."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic import sizing
from service.domain.scheduling.elastic.resizing import spare
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep, Sized
from service.domain.scheduling.placement.slots import held_on, offered
from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Growing,
    Holder,
    Node,
    Preempt,
    Request,
    RunningJob,
    Shrink,
    Snapshot,
    Start,
    Stay,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.policy.batch_changes import LASTS_S, batch_changes
from service.domain.scheduling.rules.dependencies import ArrayLimit
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from service.domain.scheduling.rules.order import LONGEST_WAIT_S
from service.domain.scheduling.rules.queues import Queue

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BUNDLE = {"GPU": 1.0}
PER_NODE = 4


def seconds(num_workers: int, batch_size: int, exchange_s: float) -> float:
    """Return the duration of a step in seconds, with 10 ms for each sample of a worker."""
    return 0.01 * batch_size / num_workers + exchange_s * (num_workers > 1)


def elastic(
    *, exchange_s: float = 0.0, known: tuple[int, ...] = (1, 2, 4), steps_left: float = 1e4
) -> ElasticJob:
    times = tuple(
        ReportedStep(number, -(-number // PER_NODE), 64, seconds(number, 64, exchange_s))
        for number in known
    )
    return ElasticJob(1, 16, 64, 64, times, steps_left=steps_left)


def test_the_fit_tells_the_times_that_were_reported_and_those_of_other_sizes() -> None:
    job = elastic(exchange_s=0.1)
    for number in (1, 2, 3, 4):
        found = sizing.step_s(job, number, PER_NODE)
        assert found == pytest.approx(seconds(number, 64, 0.1), rel=0.02), number
    larger = replace(job, batch_size=256)
    assert sizing.step_s(larger, 4, PER_NODE) == pytest.approx(seconds(4, 256, 0.1), rel=0.05)


def test_a_job_that_was_slower_with_more_workers_is_tried_with_one() -> None:
    times = (ReportedStep(2, 1, 64, 0.3), ReportedStep(4, 1, 64, 0.9), ReportedStep(8, 2, 64, 1.8))
    job = replace(elastic(), step_times=times, micro_batch_size=16, in_place=True)
    assert sizing.fitted(times, 16)[:2] == (0.0, 0.0), "nothing of it is put down to its samples"
    there = running("there", job, Slice("a", 1), Slice("a", 1))
    made = planned({"there": job, "new": elastic()}, (there,), (waiting("new"),))
    assert isinstance(made["new"], Start)


def test_no_coefficient_is_negative() -> None:
    times = (ReportedStep(1, 1, 64, 1.0), ReportedStep(2, 1, 64, 0.3), ReportedStep(4, 1, 64, 0.4))
    assert min(sizing.fitted(times, 64)) >= 0


def test_a_job_with_one_report_is_taken_to_grow_well_and_tried_no_further_than_known() -> None:
    job = elastic(known=(2,))
    assert sizing.step_s(job, 4, PER_NODE) == pytest.approx(0.16, rel=0.05)
    assert max(sizing.sizes_of(job, PER_NODE)) == 2 * sizing.EXPLORED
    assert sizing.sizes_of(replace(job, step_times=()), PER_NODE) == [1]
    assert max(sizing.sizes_of(replace(job, in_place=True), PER_NODE)) == 16


def test_workers_go_to_the_job_that_grows_well() -> None:
    well, badly = elastic(), elastic(exchange_s=0.5)
    chosen = sizing.sizes([Sized("well", well, 0), Sized("badly", badly, 0)], 8, PER_NODE)
    assert chosen["badly"] <= 1
    assert chosen["well"] >= 4
    assert sum(chosen.values()) <= 8


def test_the_shorter_job_gets_more() -> None:
    long, short = elastic(exchange_s=0.05, steps_left=1e5), elastic(exchange_s=0.05, steps_left=1e3)
    chosen = sizing.sizes([Sized("long", long, 0), Sized("short", short, 0)], 8, PER_NODE)
    assert chosen["short"] > chosen["long"]


def test_a_job_keeps_its_size_where_another_would_not_make_up_for_the_restart() -> None:
    times = tuple(ReportedStep(size, 1, 64, each) for size, each in ((1, 1.0), (2, 0.6), (4, 0.57)))
    job = replace(elastic(), step_times=times)
    assert sizing.sizes([Sized("a", job, 2)], 4, PER_NODE) == {"a": 2}
    assert sizing.sizes([Sized("a", elastic(), 2)], 4, PER_NODE) == {"a": 4}
    about_to_end = elastic(steps_left=20)
    assert sizing.sizes([Sized("a", about_to_end, 2)], 4, PER_NODE) == {"a": 2}


def test_one_that_stays_keeps_what_it_has_and_one_that_comes_first_gets_its_least() -> None:
    stays = Sized("stays", elastic(exchange_s=2.0, steps_left=1e6), 4, stays=True)
    first = Sized("first", elastic(steps_left=1e9), 0, comes_first=True)
    others = [Sized(f"other-{at}", elastic(steps_left=10), 0) for at in range(9)]
    chosen = sizing.sizes([*others, stays, first], 8, PER_NODE)
    assert chosen["stays"] == 4
    assert chosen["first"] >= 1
    assert sum(chosen.values()) == 8


def test_a_group_that_grew_keeps_its_slots_from_others_that_run_and_not_from_one_that_starts() -> (
    None
):
    badly = replace(elastic(exchange_s=0.6, steps_left=1e6), in_place=True)
    well = replace(elastic(), in_place=True)
    grown, other = Sized("grown", badly, 4, has_grown=True), Sized("other", well, 4)
    before = replace(grown, has_grown=False)
    assert sizing.sizes([before, other], 8, PER_NODE)["grown"] < 4
    assert sizing.sizes([grown, other], 8, PER_NODE) == {"grown": 4, "other": 4}
    new = Sized("new", replace(well, steps_left=1e2), 0)
    chosen = sizing.sizes([grown, other, new], 8, PER_NODE)
    assert chosen["new"] > 0
    assert chosen["grown"] < 4
    assert sizing.sizes([grown, other, new], 16, PER_NODE)["grown"] >= 4, "there is other room"
    assert sizing.sizes([grown, other], 6, PER_NODE)["grown"] < 4, "others have a claim to two"


def test_a_group_that_shrank_for_others_grows_into_what_these_leave() -> None:
    badly = replace(elastic(exchange_s=0.6, steps_left=1e6), in_place=True)
    well = replace(elastic(), in_place=True)
    shrunk, other = Sized("shrunk", well, 2, has_shrunk=True), Sized("other", badly, 2)
    before = replace(shrunk, has_shrunk=False)
    assert sizing.sizes([before, other], 6, PER_NODE)["shrunk"] > 2
    assert sizing.sizes([shrunk, other], 6, PER_NODE) == {"shrunk": 2, "other": 4}
    assert sizing.sizes([shrunk], 8, PER_NODE) == {"shrunk": 8}, "no slots stay empty"


def ranged(noise_scale: float | None = 1e4, exchange_s: float = 0.3) -> ElasticJob:
    """Return a job with a current batch size of 64. In larger batches, the exchange takes less time
    per sample."""
    job = elastic(exchange_s=exchange_s)
    return replace(job, in_place=True, batch_range=(16, 512), noise_scale=noise_scale)


def test_the_batch_is_the_one_with_most_progress_a_second_by_noise_and_step_times() -> None:
    assert sizing.best_batch(ranged(noise_scale=1e4), 8, PER_NODE) == 128
    wasteful = ranged(noise_scale=10.0, exchange_s=0.0)
    assert sizing.best_batch(wasteful, 8, PER_NODE) == 32, "most of its samples are worth little"
    assert sizing.best_batch(ranged(noise_scale=None), 8, PER_NODE) == 64, "nobody knows"
    assert sizing.best_batch(replace(ranged(), batch_range=None), 8, PER_NODE) == 64


def test_a_larger_batch_is_tried_while_its_samples_lose_little_and_nobody_knows_its_time() -> None:
    alone = ranged(noise_scale=1e4, exchange_s=0.0)
    assert sizing.best_batch(alone, 8, PER_NODE) == 128
    tried = (*alone.step_times, ReportedStep(8, 2, 128, seconds(8, 128, 0.0)))
    assert sizing.best_batch(replace(alone, step_times=tried), 8, PER_NODE) == 64, "no gain"
    assert sizing.best_batch(ranged(noise_scale=300.0, exchange_s=0.02), 4, PER_NODE) == 64


def test_the_batch_stays_in_its_range_and_a_small_gain_does_not_change_it() -> None:
    assert sizing.best_batch(replace(ranged(), batch_range=(16, 96)), 8, PER_NODE) == 96
    assert sizing.best_batch(replace(ranged(noise_scale=1.0), batch_range=(64, 512)), 8, 4) == 64
    for exchange_s, chosen in ((0.005, 64), (0.03, 128)):  # gains of 2% and of 13%
        job = ranged(exchange_s=exchange_s)
        times = (*job.step_times, ReportedStep(8, 2, 256, seconds(8, 256, exchange_s)))
        assert sizing.best_batch(replace(job, step_times=times), 8, PER_NODE) == chosen


def test_the_goodput_of_a_batch_is_its_throughput_times_what_a_sample_is_worth() -> None:
    job, noise = ranged(noise_scale=500.0), 500.0

    def goodput(size: int) -> float:
        throughput = size / sizing.step_s(job, 8, PER_NODE, size)
        return throughput * (noise + 16) / (noise + size)

    assert max((32, 64, 128), key=goodput) == sizing.best_batch(job, 8, PER_NODE) == 128
    fixed = replace(job, batch_range=None)
    by_size = [sizing.worths(Sized("a", each, 0), PER_NODE)[8] for each in (job, fixed)]
    assert by_size[0] > by_size[1], "it grows better with a larger batch"


def running(name: str, job: ElasticJob, *slices: Slice, held_s: float = MIN_RUN_S) -> RunningJob:
    number = sum(part.num_workers for part in slices)
    return RunningJob(
        *(name, 50, 1, Request(number, BUNDLE), slices, held_s),
        yields=True,
        spare=spare(slices, job.least) if job.in_place else (),
    )


def waiting(name: str, workers: int = 16, least: int | None = 1) -> WaitingJob:
    return WaitingJob(name, 0, 50, 9, Request(workers, BUNDLE, least), waited_s=0.0, yields=True)


def planned(
    jobs: dict[str, ElasticJob],
    there: tuple[RunningJob, ...] = (),
    queue: tuple[WaitingJob, ...] = (),
    growing: tuple[Growing, ...] = (),
    num_nodes: int = 2,
    queues: tuple[Queue, ...] = (),
    num_to_come: int = 0,
) -> dict[str, Decision]:
    holders = tuple(Holder(each.job_id, each.slices, BUNDLE) for each in there)
    total = {"GPU": float(PER_NODE)}
    names = "abcd"[:num_nodes]
    nodes = tuple(Node(n, total, offered(total, total, held_on(n, holders))) for n in names)
    facts: dict[str, Any] = {
        "running": there,
        "growing": growing,
        "elastic": jobs,
        "queues": queues,
        "to_come": tuple(Node(f"new{n}", total, dict(total)) for n in range(num_to_come)),
    }
    snapshot = Snapshot(queue, nodes, True, holders, **facts)
    return {decision.job_id: decision for decision in plan(snapshot, NOW)}


def test_a_job_alone_leaves_to_resume_on_all_that_it_gains_by() -> None:
    job = elastic()
    made = planned({"one": job}, (running("one", job, Slice("a", 2)),))
    assert isinstance(made["one"], Preempt)
    assert made["one"].reason.code == "resized"
    assert "resumes on 8 workers instead of 2" in made["one"].reason.message
    assert isinstance(planned({"one": job}, queue=(waiting("one"),))["one"], Start)


def test_a_job_makes_room_for_one_that_gains_more_but_not_before_its_least_run_time() -> None:
    job = elastic(exchange_s=0.05)
    jobs = {"old": job, "new": replace(job, steps_left=1e3)}
    old = running("old", job, Slice("a", 4), Slice("b", 4))
    made = planned(jobs, (old,), (waiting("new"),))
    assert isinstance(made["old"], Preempt)
    assert isinstance(made["new"], Wait)
    assert made["new"].reason.code == "room_is_made"
    made = planned(jobs, (replace(old, held_s=1.0),), (waiting("new"),))
    assert "old" not in made
    assert isinstance(made["new"], Wait)
    assert made["new"].reason.code == "waiting_for_slots"


def test_a_job_that_has_left_before_is_left_alone_for_longer_each_time() -> None:
    job = replace(elastic(exchange_s=0.05), in_place=True, least=8)
    jobs = {"old": job, "new": replace(job, steps_left=1e3)}
    now_s, sent_away = 0.0, []
    # The worst case for estimates: another job gains more in each round, but soon afterwards none
    # does.
    old = running("old", job, Slice("a", 4), Slice("b", 4), held_s=0.0)
    while now_s < 24 * 3600:
        made = planned(jobs, (old,), (waiting("new", least=8),))
        if "old" in made:
            assert isinstance(made["old"], Preempt)
            sent_away.append(now_s)
            old = replace(old, held_s=0.0, num_left=old.num_left + 1)
        now_s += 60.0
        old = replace(old, held_s=old.held_s + 60.0)
    assert sent_away[:3] == [300.0, 900.0, 1800.0]
    assert len(sent_away) <= math.sqrt(2 * now_s / MIN_RUN_S)


def test_a_job_that_was_overdue_when_it_started_is_not_sent_away_for_one_that_gains_more() -> None:
    job = replace(elastic(exchange_s=0.05), in_place=True, least=8)
    jobs = {"old": job, "new": replace(job, steps_left=1e3)}
    old = running("old", job, Slice("a", 4), Slice("b", 4), held_s=10 * MIN_RUN_S)
    assert isinstance(planned(jobs, (old,), (waiting("new", least=8),))["old"], Preempt)
    late = replace(old, waited_s=LONGEST_WAIT_S + 1)
    assert "old" not in planned(jobs, (late,), (waiting("new", least=8),))


def test_no_job_is_sent_away_for_a_gang_that_only_other_nodes_can_run() -> None:
    job = elastic(exchange_s=0.05)
    old = running("old", job, Slice("a", 4), Slice("b", 4), held_s=10 * MIN_RUN_S)
    for workers, leaves in ((8, True), (9, False)):
        made = planned({"old": job}, (old,), (waiting("gang", workers, least=None),), num_to_come=1)
        assert ("old" in made) == leaves


def test_a_job_that_runs_is_not_sent_away_for_one_that_gains_about_as_much() -> None:
    job = replace(elastic(), in_place=True, least=8)
    old = running("old", job, Slice("a", 4), Slice("b", 4))
    for steps_left, is_sent_away in ((0.9e4, False), (0.5e4, True)):
        jobs = {"old": job, "new": replace(job, steps_left=steps_left)}
        made = planned(jobs, (old,), (waiting("new", least=8),))
        assert ("old" in made) is is_sent_away, steps_left


def test_a_job_that_must_be_in_one_domain_has_no_size_chosen() -> None:
    job = replace(elastic(exchange_s=0.05), in_place=True)
    jobs = {"old": job, "new": replace(job, steps_left=1e3)}
    old = running("old", job, Slice("a", 4), Slice("b", 4))
    old = replace(old, request=replace(old.request, required_level="rack"), spare=())
    assert "old" not in planned(jobs, (old,), (waiting("new"),))


def test_two_groups_do_not_pass_slots_to_and_fro() -> None:
    """According to the reports, the gains change every minute."""
    jobs = [replace(elastic(exchange_s=each), in_place=True) for each in (0.0, 0.6)]
    there = {"a": running("a", jobs[0], *[Slice("a", 1)] * 4)}
    there["b"] = running("b", jobs[1], *[Slice("b", 1)] * 4, *[Slice("c", 1)] * 4)
    there = {
        name: replace(each, num_left=1) for name, each in there.items()
    }  # each keeps its minimum
    shrunk_at: dict[str, list[float]] = {"a": [], "b": []}
    for minute in range(60):
        gains = dict(zip("ab", jobs if minute % 2 else jobs[::-1], strict=True))
        growing = [
            Growing(name, 1, 50, 1, Request(16, BUNDLE, 1), each.slices)
            for name, each in there.items()
        ]
        made = planned(gains, tuple(there.values()), growing=tuple(growing), num_nodes=3)
        for name, each in there.items():
            decision, slices = made.get(name), list(each.slices)
            if isinstance(decision, Shrink):
                for part in decision.slices:
                    slices.remove(part)
                shrunk_at[name].append(60.0 * minute)
                each = replace(each, shrunk_s=0.0)
            elif isinstance(decision, Grow):
                slices += [
                    Slice(s.node_id, 1) for s in decision.slices for _ in range(s.num_workers)
                ]
                each = replace(each, grown_s=0.0)
            there[name] = replace(
                each,
                slices=tuple(slices),
                spare=spare(slices, 1),
                grown_s=each.grown_s + 60.0,
                shrunk_s=each.shrunk_s + 60.0,
            )
    assert 0 < sum(map(len, shrunk_at.values())) <= 3600 / MIN_RUN_S + 2


def test_a_group_that_shrinks_in_place_does_not_leave() -> None:
    job = replace(elastic(exchange_s=0.3), in_place=True)
    jobs = {"old": job, "new": replace(job, steps_left=1e3)}
    old = running("old", job, Slice("a", 4), Slice("b", 2), Slice("b", 2))
    made = planned(jobs, (old,), (waiting("new"),))
    assert isinstance(made["old"], Shrink)
    assert made["old"].slices[0] == Slice("b", 2)


def test_a_group_grows_in_place_up_to_its_size_and_no_further() -> None:
    badly = replace(elastic(exchange_s=0.6, steps_left=1e6), in_place=True)
    jobs = {"well": elastic(exchange_s=0.3), "badly": badly}
    there = running("badly", badly, Slice("a", 4))
    group = Growing("badly", 1, 50, 1, Request(16, BUNDLE, 1), there.slices)
    made = planned(jobs, (there,), (waiting("well"),), (group,))
    assert isinstance(made["well"], Start)
    assert isinstance(made["badly"], Stay)
    assert made["badly"].blocked_by == ("well",)
    alone = planned({"badly": badly}, (there,), growing=(group,))["badly"]
    assert isinstance(alone, Grow), "free slots are used, whatever the gain"
    assert sum(part.num_workers for part in alone.slices) == 4


def test_a_group_that_changes_its_size_is_told_the_batch_for_it() -> None:
    job = ranged()
    there = running("one", job, Slice("a", 4))
    group = Growing("one", 1, 50, 1, Request(16, BUNDLE, 1), there.slices)
    grown = planned({"one": job}, (there,), growing=(group,))["one"]
    assert isinstance(grown, Grow)
    assert grown.batch_size == sizing.best_batch(job, 8, PER_NODE) == 128
    fixed = planned({"one": replace(job, batch_range=None)}, (there,), growing=(group,))["one"]
    assert isinstance(fixed, Grow)
    assert fixed.batch_size is None
    old = running("one", job, Slice("a", 4), Slice("b", 2), Slice("b", 2))
    shrunk = planned({"one": job, "new": ranged(1.0)}, (old,), (waiting("new"),))["one"]
    assert isinstance(shrunk, Shrink)
    left = 8 - sum(part.num_workers for part in shrunk.slices)
    assert shrunk.batch_size == sizing.best_batch(job, left, PER_NODE)


def test_a_group_that_keeps_its_size_gets_another_batch_after_a_while() -> None:
    job = ranged()
    there = replace(running("one", job, Slice("a", 4)), same_batch_s=LASTS_S)
    nodes = (Node("a", {"GPU": 4.0}, {}),)
    snapshot = Snapshot((), nodes, True, running=(there,), elastic={"one": job})
    assert batch_changes(snapshot, ()) == {"one": 128}
    assert batch_changes(snapshot, {"one"}) == {}, "it changes its size"
    for changed in (
        replace(there, same_batch_s=LASTS_S - 1),
        replace(there, is_leaving=True),
        replace(there, recalled=(Slice("a", 1),)),
    ):
        assert batch_changes(replace(snapshot, running=(changed,)), ()) == {}
    for other in (
        replace(job, batch_range=None),
        ranged(noise_scale=None),
        ranged(noise_scale=300.0, exchange_s=0.02),
    ):
        assert batch_changes(replace(snapshot, elastic={"one": other}), ()) == {}


def test_jobs_of_higher_priority_choose_first_and_gangs_keep_what_they_ask_for() -> None:
    job = elastic()
    jobs = {"high": job, "low": job}
    queue = (replace(waiting("high"), priority=60), waiting("low"))
    made = planned(jobs, queue=queue)
    assert isinstance(made["high"], Start)
    assert sum(part.num_workers for part in made["high"].slices) == 8
    assert isinstance(made["low"], Wait)
    assert made["low"].reason.code == "waiting_for_slots"
    made = planned({"low": job}, queue=(waiting("gang", 6, None), waiting("low")))
    assert isinstance(made["gang"], Start)
    assert isinstance(made["low"], Start)
    assert sum(part.num_workers for part in made["low"].slices) == 2


def test_jobs_that_a_limit_or_their_array_keeps_back_take_no_slots_from_sizes() -> None:
    gang = replace(waiting("gang", 6, None), priority=60)
    kept_back = (
        replace(gang, queue="closed"),
        replace(gang, queue="small"),
        replace(gang, array=ArrayLimit("array", 0)),
    )
    queues = (Queue("closed", max_running=0), Queue("small", limit={"GPU": 5.0}))
    for job in kept_back:
        made = planned({"low": elastic()}, queue=(job, waiting("low")), queues=queues)
        assert isinstance(made["low"], Start)
        assert sum(part.num_workers for part in made["low"].slices) == 8


def test_a_job_of_higher_priority_has_gangs_leave_as_ever() -> None:
    gang = RunningJob("gang", 40, 1, Request(8, BUNDLE), (Slice("a", 4), Slice("b", 4)), 9e9)
    made = planned({"high": elastic()}, (gang,), (waiting("high"),))
    assert isinstance(made["gang"], Preempt)
    assert made["gang"].because_of == "high"
    made = planned({"high": elastic()}, (replace(gang, priority=50),), (waiting("high"),))
    assert "gang" not in made
    assert isinstance(made["high"], Wait)
    assert made["high"].reason.code == "waiting_for_slots"


@pytest.mark.parametrize("seed", range(40))
def test_plans_drawn_by_chance_give_no_more_than_is_free_and_ask_whom_they_may(seed: int) -> None:
    chance = Random(seed)
    num_nodes, in_place = 4, chance.random() < 0.5
    free = dict.fromkeys("abcd", PER_NODE)
    jobs, there, queue, growing = {}, [], [], []
    for at in range(chance.randint(1, 8)):
        name = f"job-{at}"
        if chance.random() < 0.8:
            known = tuple(chance.sample((1, 2, 4, 8), chance.randint(0, 3)))
            one = elastic(
                exchange_s=chance.random(), known=known, steps_left=chance.choice((10, 1e4, 1e6))
            )
            jobs[name] = replace(one, in_place=in_place)
        node = chance.choice("abcd")
        if free[node] and chance.random() < 0.6:
            number = chance.randint(1, free[node])
            free[node] -= number
            held_s = chance.choice((0.0, MIN_RUN_S))
            of = jobs.get(name, elastic())
            grown_s, shrunk_s = (chance.choice((0.0, math.inf)) for _ in range(2))
            runs = running(name, of, *[Slice(node, 1)] * number, held_s=held_s)
            there.append(replace(runs, grown_s=grown_s, shrunk_s=shrunk_s))
            if in_place and number < 16:
                group = Growing(name, 1, 50, at, Request(16, BUNDLE, 1), there[-1].slices)
                growing.append(group)
        else:
            least = 1 if name in jobs else None
            priority = chance.choice((50, 50, 60))
            waits = waiting(name, chance.randint(1, 8) if least is None else 16, least)
            queue.append(replace(waits, priority=priority, seq=at))
    holders = tuple(Holder(each.job_id, each.slices, BUNDLE) for each in there)
    total = {"GPU": float(PER_NODE)}
    nodes = tuple(Node(n, total, {"GPU": float(free[n])}) for n in "abcd"[:num_nodes])
    snapshot = Snapshot(
        tuple(queue),
        nodes,
        True,
        holders,
        running=tuple(there),
        growing=tuple(growing),
        elastic=jobs,
    )
    decisions = plan(snapshot, NOW)
    names = [d.job_id for d in decisions if isinstance(d, Start | Wait)]
    assert sorted(names) == sorted(job.job_id for job in queue)
    for decision in decisions:
        if isinstance(decision, Start | Grow):
            for part in decision.slices:
                free[part.node_id] -= part.num_workers
    assert min(free.values()) >= 0
    asked = [d.job_id for d in decisions if isinstance(d, Preempt | Shrink)]
    assert len(asked) == len(set(asked))
    resized = {
        d.job_id for d in decisions if isinstance(d, Preempt | Shrink) and d.because_of == d.job_id
    }
    assert resized <= set(jobs)
    shortly = {job.job_id for job in there if job.held_s < MIN_RUN_S}
    for decision in decisions:
        if isinstance(decision, Preempt) and decision.job_id in shortly:
            assert "resumes on" in decision.reason.message, "it leaves for more only"
