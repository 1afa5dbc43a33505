"""Generated clusters and queues: compares the plan with a slow placement by search.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1 pytest tests/generated/plans` plans one case again.
"""

from __future__ import annotations

import contextlib
import pprint
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement import shared_gpus
from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Holder,
    Impossible,
    Node,
    Preempt,
    Request,
    Shrink,
    Start,
    Stay,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.queues import Queue
from tests.generated.plans import search
from tests.generated.plans.clusters import LEVELS, MIN_RUN_S, NOW, Case, Draw, Held, smaller
from tests.generated.plans.conftest import seeds
from tests.seeds import noted

BLOCKS = 20
"""Number of tests that share the seeds."""
ENOUGH = 40
"""Number of characters of an error that identify it."""
RESERVE_NOTHING = {
    *("held", "waiting_for_jobs", "array_limit", "preparing_environment"),
    *("queue_limit", "user_limit", "budget_used_up"),
}


def count(slices: Sequence[Slice]) -> int:
    return sum(part.num_workers for part in slices)


class Look:
    """A slow check of the plan of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.decisions = planned(case)
        self.nodes = [node for node in case.nodes if node.accepted]
        self.jobs = {job.job_id: job for job in case.queue}
        self.held = {held.job.job_id: held for held in case.held}
        self.starts = [each for each in self.decisions if isinstance(each, Start)]
        self.grown = {each.job_id: each for each in self.decisions if isinstance(each, Grow)}
        self.asked = [each for each in self.decisions if isinstance(each, Preempt | Shrink)]

    def check(self) -> None:
        self.each_has_one_decision()
        self.all_slots_exist()
        for start in self.starts:
            self.is_whole(self.jobs[start.job_id].request, start.slices)
            self.may_start(self.jobs[start.job_id])
        for grow in self.grown.values():
            self.is_grown_near(self.held[grow.job_id], grow)
        self.limits_hold()
        self.impossible_is_impossible()
        self.free_slots_are_used()
        self.asks_are_allowed()
        self.kept_slots_will_exist()

    def each_has_one_decision(self) -> None:
        of_queue = [d.job_id for d in self.decisions if isinstance(d, Start | Wait | Impossible)]
        assert sorted(of_queue) == sorted(self.jobs), "one decision on each job"
        of_groups = [d.job_id for d in self.decisions if isinstance(d, Grow | Stay)]
        growing = [group.job_id for group in self.case.snapshot().growing]
        assert sorted(of_groups) == sorted(growing), "one decision on each group"

    def holder(self, job: WaitingJob, slices: tuple[Slice, ...], as_job: str = "") -> Holder:
        request = job.request
        name = as_job or job.job_id
        return Holder(name, slices, request.bundle, job.queue, job.owner, request.roles)

    def holders_after(self) -> list[Holder]:
        """Include everything that starts and grows."""
        grown = [
            self.holder(self.held[grow.job_id].job, grow.slices) for grow in self.grown.values()
        ]
        started = [self.holder(self.jobs[one.job_id], one.slices) for one in self.starts]
        return [*(held.holder for held in self.case.held), *grown, *started]

    def all_slots_exist(self) -> None:
        there = {node.id for node in self.nodes}
        given: list[Start | Grow] = [*self.starts, *self.grown.values()]
        for decision in given:
            assert {part.node_id for part in decision.slices} <= there, "on accepted nodes"
            assert all(part.num_workers > 0 for part in decision.slices)
        assert search.fits_on_all(self.case.nodes, self.holders_after()), "all fit on single GPUs"

    def is_whole(self, request: Request, slices: Sequence[Slice]) -> None:
        assert search.least_of(request) <= count(slices) <= request.num_workers, "a gang is whole"
        rank_nodes = [part.node_id for part in slices for _ in range(part.num_workers)]
        of_id = {node.id: node for node in self.nodes}
        bundles = [bundle for number, bundle in request.runs for _ in range(number)]
        for rank, (name, bundle) in enumerate(zip(rank_nodes, bundles, strict=False)):
            node = of_id[name]
            labels = [each for each in bundle if each.startswith("label:")]
            if request.homes and rank:
                labels += request.homes[rank - 1]
            else:
                assert not search.is_closed(node), "an open node"
            assert all(node.total.get(label) for label in labels), "nodes with the labels"
        self.are_together(request, slices)

    def are_together(self, request: Request, slices: Sequence[Slice]) -> None:
        level = request.required_level
        if level is not None:
            there = [node for node in self.case.nodes if node.id in {s.node_id for s in slices}]
            assert len({search.domain(node, LEVELS, level) for node in there}) == 1, "one domain"

    def is_grown_near(self, held: Held, grow: Grow) -> None:
        of_id = {node.id: node for node in self.nodes}
        nodes = [of_id[part.node_id] for part in grow.slices]
        assert not any(map(search.is_closed, nodes)), "an open node"
        self.are_together(held.job.request, (*held.slices, *grow.slices))
        if held.lacking:
            assert count(grow.slices) == held.lacking
        assert count((*held.slices, *grow.slices)) <= held.job.request.num_workers

    def may_start(self, job: WaitingJob) -> None:
        kept_back = job.held, job.after, job.preparing, job.not_before
        assert not any(kept_back)
        if job.array is not None:
            started = sum(self.jobs[one.job_id].array is not None for one in self.starts)
            running = sum(held.job.array is not None for held in self.case.held)
            assert running + started <= job.array.max_running, "the limit of the array"

    # Limits.

    def limits_hold(self) -> None:
        for queue in self.case.queues:
            self.limit_holds(queue, None)
            for owner in ("ann", "ben"):
                self.limit_holds(queue, owner)

    def limit_holds(self, queue: Queue, owner: str | None) -> None:
        limit = queue.limit if owner is None else queue.user_limit
        most = queue.max_running if owner is None else queue.max_running_per_user

        def counts(job: WaitingJob) -> bool:
            return job.queue == queue.name and owner in (None, job.owner)

        held = [h for h in self.case.held if counts(h.job)]
        new = [self.jobs[s.job_id] for s in self.starts if counts(self.jobs[s.job_id])]
        if new and most is not None:
            assert len(held) + len(new) <= most, "the number of jobs"
        before: Counter[str] = Counter()
        more: Counter[str] = Counter()
        for one in held:
            before += amounts(one.job.request, one.slices)
            grow = self.grown.get(one.job.job_id)
            if grow is not None:
                (before if one.lacking else more).update(amounts(one.job.request, grow.slices))
            elif one.lacking:
                bundle = one.job.request.bundle
                before.update({n: one.lacking * search.units(each) for n, each in bundle.items()})
        for start in self.starts:
            if counts(self.jobs[start.job_id]):
                more += amounts(self.jobs[start.job_id].request, start.slices)
        for name, amount in limit.items():
            assert not more[name] or before[name] + more[name] <= search.units(amount), "the limit"

    # What is free.

    def impossible_is_impossible(self) -> None:
        spaces = [search.Here.of(node) for node in self.nodes]
        empty = [here for here in spaces if here is not None]
        if not self.nodes:
            return
        all_closed = all(search.is_closed(node) for node in self.nodes)
        for decision in self.decisions:
            job = self.jobs.get(decision.job_id)
            if job is None or isinstance(decision, Start):
                continue
            could = search.most_of(job.request, empty, LEVELS) >= search.least_of(job.request)
            if isinstance(decision, Impossible):
                assert not could, ("impossible, and fits", job)
            elif not (job.after or job.held or (all_closed and not job.request.homes)):
                assert could, ("waits for what never comes", job)

    def free_slots_are_used(self) -> None:
        """Check the jobs with no jobs ahead of them. Before the plan, parts of GPUs can be assigned
        in any way; the jobs that start are where Ray puts them."""
        growth = [g for g in self.grown.values() if self.held[g.job_id].lacking]
        if any(held.lacking and held.job.job_id not in self.grown for held in self.case.held):
            return
        if self.case.most_tried != shared_gpus.MOST_TRIED:
            return  # GPUs without a known packing count as full
        holders = [held.holder for held in self.case.held]
        holders += [self.holder(self.held[g.job_id].job, g.slices) for g in growth]
        taken, then = search.taken_by(holders), search.taken_by([])
        kept_back: set[str] = set()
        for decision in self.decisions:
            job = self.jobs.get(decision.job_id)
            if job is None:
                continue
            if isinstance(decision, Wait) and decision.reason.code in RESERVE_NOTHING:
                kept_back.add(job.queue)
                continue
            if isinstance(decision, Impossible):
                continue
            spaces = [search.Here.of(node, taken, then) for node in self.nodes]
            there = [here for here in spaces if here is not None]
            fit = search.most_of(job.request, there, LEVELS)
            is_limited = job.queue in {queue.name for queue in self.case.queues}
            if not isinstance(decision, Start):
                if job.not_before is None and not is_limited:
                    assert fit < search.least_of(job.request), ("it fits, and nobody is ahead", job)
                return
            if not is_limited:
                assert count(decision.slices) >= fit, ("as many as fit", job)
            then += search.taken_by([self.holder(job, decision.slices)])

    # Requests to running jobs.

    def asks_are_allowed(self) -> None:
        waits = {each.job_id: each for each in self.decisions if isinstance(each, Wait)}
        assert len({ask.job_id for ask in self.asked}) == len(self.asked), "each is asked once"
        for ask in self.asked:
            held = self.held[ask.job_id]
            assert held.may_be_asked
            assert not held.is_leaving, "it leaves already"
            assert not held.recalled, "it was asked before"
            assert held.held_s >= MIN_RUN_S
            assert ask.job_id not in self.grown, "it is given slots, and asked for some"
            assert waits[ask.because_of].reason.code == "room_is_made"
            if isinstance(ask, Shrink):
                assert not Counter(ask.slices) - Counter(held.spare)

    def kept_slots_will_exist(self) -> None:
        """The state after all jobs that were asked to leave have left."""
        waits = [each for each in self.decisions if isinstance(each, Wait) and each.slices]
        for wait in waits:
            self.is_whole(self.jobs[wait.job_id].request, wait.slices)
        gone = {ask.job_id for ask in self.asked if isinstance(ask, Preempt)}
        gone |= {held.job.job_id for held in self.case.held if held.is_leaving}
        given = {ask.job_id: ask.slices for ask in self.asked if isinstance(ask, Shrink)}
        after = []
        for holder in self.holders_after():
            if holder.job_id in gone:
                continue
            held = self.held.get(holder.job_id)
            left = list(holder.slices)
            for part in given.get(holder.job_id, held.recalled if held else ()):
                if part in left:
                    left.remove(part)
            after.append(replace(holder, slices=tuple(left)))
        after += [self.holder(self.jobs[wait.job_id], wait.slices) for wait in waits]
        assert search.fits_on_all(self.case.nodes, after), (
            "what is kept is there once all have left"
        )


def amounts(request: Request, slices: Sequence[Slice]) -> Counter[str]:
    holder = Holder("", tuple(slices), request.bundle, roles=request.roles)
    found: Counter[str] = Counter()
    for _, part, bundle in search.taken_by([holder]):
        for name, amount in bundle.items():
            found[name] += part.num_workers * search.units(amount)
    return found


@contextlib.contextmanager
def searching(most_tried: int) -> Iterator[None]:
    """The planner's search for GPUs takes at most this many steps."""
    if most_tried == shared_gpus.MOST_TRIED:
        yield
        return
    shared_gpus._searched.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_gpus, "MOST_TRIED", most_tried)
        yield
    shared_gpus._searched.cache_clear()


def planned(case: Case) -> list[Decision]:
    errors: list[tuple[str, Exception]] = []
    with searching(case.most_tried):
        found = plan(case.snapshot(), NOW, on_error=lambda *error: errors.append(error))
    if errors:
        raise errors[0][1]
    return found


def without_words(decisions: Sequence[Decision]) -> list[str]:
    plain = []
    for each in decisions:
        facts: dict[str, Any] = {field.name: getattr(each, field.name) for field in fields(each)}
        facts.pop("blocked_by", None)
        if "reason" in facts:
            facts["reason"] = facts["reason"].code
        plain.append(f"{type(each).__name__} {facts}")
    return sorted(plain)


def order_of_rows_decides_nothing(case: Case) -> None:
    dice = random.Random(len(case.queue))

    def mixed(some: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(dice.sample(some, len(some)))

    other = replace(case, nodes=mixed(case.nodes), held=mixed(case.held), queue=mixed(case.queue))
    assert without_words(planned(other)) == without_words(planned(case)), "the order of rows"


def silos_change_nothing_for_others(case: Case) -> None:
    """For all other jobs, nodes reserved for silos might as well not exist."""
    nodes = [node for node in case.nodes if node.accepted and not search.is_closed(node)]
    if not nodes or any(job.request.homes for job in case.queue):
        return
    totals = [{"CPU": 64.0}, *(node.total for node in nodes)]
    silos = [
        Node.labelled(f"silo-{at}", total, total, {"dray.io/silo": "true"})
        for at, total in enumerate(totals)
    ]
    with_silos = replace(case, nodes=(*case.nodes, *silos))
    assert without_words(planned(with_silos)) == without_words(planned(case)), "nodes of silos"


class Broken(Request):
    """A request that can't be planned."""

    @property
    def least(self) -> int:
        raise ArithmeticError("broken")


def one_error_stops_no_other(case: Case) -> None:
    first, *others = case.queue
    request = first.request
    broken = Broken(request.num_workers + 100, request.bundle)  # unequal to all others
    queue = (replace(first, request=broken), *others)
    found = plan(replace(case, queue=queue).snapshot(), NOW)
    decided = {one.job_id: one for one in found if isinstance(one, Start | Wait | Impossible)}
    assert decided.keys() == {job.job_id for job in case.queue}
    codes = {name: one.reason.code for name, one in decided.items() if isinstance(one, Wait)}
    assert [name for name, code in codes.items() if code == "not_planned"] == [first.job_id]


CHECKS: tuple[Callable[[Case], None], ...] = (
    lambda case: Look(case).check(),
    order_of_rows_decides_nothing,
    silos_change_nothing_for_others,
    one_error_stops_no_other,
)


def error_of(case: Case, checks: Sequence[Callable[[Case], None]] = CHECKS) -> str | None:
    """Return the error that a check finds, or None if all checks pass."""
    for check in checks:
        try:
            check(case)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def smallest(case: Case, most: int = 500) -> Case:
    """Return a case from which nothing can be removed without losing the error."""
    tried, error = 0, (error_of(case) or "")[:ENOUGH]
    while True:
        for less in smaller(case):
            tried += 1
            if tried > most:
                return case
            if less.queue and less.nodes and (error_of(less) or "").startswith(error):
                case = less
                break
        else:
            return case


def check(seed: int) -> None:
    case = Draw(seed).case()
    if error_of(case) is not None:
        small = smallest(case)
        shown = pprint.pformat(small, width=100)
        pytest.fail(f"seed {seed}: {error_of(small)}\n{shown}", pytrace=False)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_each_plan_is_one_that_a_slow_search_allows(block: int) -> None:
    for seed in noted(seeds()[block::BLOCKS]):
        check(seed)
