"""A slow check of a plan. It processes the decisions in order, tracks only the resources of each
node, and fails if a decision violates a guarantee in docs/explanation/scheduling.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from ray_workers.shared.slices import Slice
from service.config.node_types import NODE_LEVEL, labels_in
from service.domain.scheduling.placement import slots
from service.domain.scheduling.placement.gangs import SIZE_POWER
from service.domain.scheduling.placement.slots import amounts, count, fits
from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Growing,
    Impossible,
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
)
from service.domain.scheduling.rules import order
from service.domain.scheduling.rules.eviction import CLEARLY_LESS, MIN_RUN_S
from service.domain.scheduling.rules.limits import why_never
from service.domain.scheduling.rules.queues import Queue

Asks = Preempt | Shrink
Free = dict[str, dict[str, float]]
"""Amounts by node and resource."""

STARTS_NEVER = {
    "held",
    "waiting_for_jobs",
    "begins_at",
    "backing_off",
    "array_limit",
    "preparing_environment",
}
WITHOUT_SLOTS = {"waiting_for_slots", "waiting_for_domain", "behind_in_queue"}


class Oracle:
    """No queue or user has used more than its share, because this rule is tested separately."""

    def __init__(self, snapshot: Snapshot, now: datetime) -> None:
        assert not snapshot.used_s
        self.snapshot = snapshot
        self.now = now
        self.nodes = [node for node in snapshot.nodes if node.accepted]
        self.levels = (*snapshot.topology, NODE_LEVEL)
        self.queues = {queue.name: queue for queue in snapshot.queues}
        self.total = slots.total_of(node.total for node in self.nodes)
        self.free, self.now_free, self.soon_free = self.copy(), self.copy(), self.copy()
        self.aside: dict[bool, list[tuple[Request, int]]] = {False: [], True: []}
        """Reservations for jobs ahead: against jobs that must not use reserved slots, and against
        jobs that may use them until the jobs ahead have waited for a long time."""
        self.holding: dict[str, tuple[str, str, Mapping[str, float], int]] = {
            holder.job_id: (holder.queue, holder.owner, holder.bundle, count(holder.slices))
            for holder in snapshot.holders
        }
        self.waiting_ahead: list[tuple[WaitingJob | Growing, int, str]] = []
        self.in_arrays = Counter(snapshot.running_of_arrays)
        self.backing_off: list[WaitingJob] = []
        self.asked: set[str] = set()
        self.preempted: set[str] = set()
        self.blocked: WaitingJob | None = None
        """The first job that can't start."""
        self.later_free: Free | None = None
        """What is free when it starts, without the slots that it reserves."""
        self.later_s = 0.0
        """When it starts, as expected."""
        self.ended: set[str] = set()
        """Jobs that have ended by then."""
        self.kept = {job.job_id: Counter(job.slices) for job in snapshot.running}
        """The slots that running jobs were not asked to release."""
        self.backfills: set[str] = set()
        self.stand_by = False
        for group in snapshot.growing:
            self.holds(group, group.lacking)
        held = dict(self.holding)
        self.guaranteed = self.within_quota()
        self.holding = dict(held)
        self.overdue = self.find_overdue()
        self.holding = held
        for job in snapshot.running:
            asked = job.slices if job.is_leaving else job.recalled
            self.change(self.soon_free, job.request, asked)
            self.kept[job.job_id] -= Counter(asked)

    # Rules for a job.

    def work(self, job: WaitingJob | RunningJob) -> float:
        if job.job_id in self.overdue:
            return -1.0
        left_s = job.guess_s if job.left_s is None else job.left_s
        if left_s is None:
            return 0.0
        share = slots.share_of(job.request, self.total)
        return (left_s + order.SETTLING_S) * share**SIZE_POWER

    def key(self, job: WaitingJob | RunningJob) -> tuple[float, ...]:
        first = job.job_id not in self.guaranteed
        passed = [
            other
            for other in self.snapshot.queue
            if (other.queue, other.priority) == (job.queue, job.priority)
            and (other.job_id not in self.guaranteed) == first
            and other.place > job.place
            and not (other.held or other.after or other.begins_at)
        ]
        leader = min([job, *passed], key=lambda one: (self.work(one), one.seq))
        return first, -job.priority, self.work(leader), leader.seq, job.place

    def within_quota(self) -> set[str]:
        """Grant quotas by priority, starting with running jobs. Jobs that can't start do not use
        quotas, even if running jobs end."""
        there: list[WaitingJob | RunningJob] = [*self.snapshot.running, *self.snapshot.queue]
        there.sort(key=lambda j: (-j.priority, isinstance(j, WaitingJob), j.place, j.seq))
        left = {name: dict(queue.quota) for name, queue in self.queues.items()}
        arrays, emptied = Counter(self.snapshot.running_of_arrays), self.emptied()
        found = set()
        for job in there:
            if isinstance(job, WaitingJob):
                fits_later = self.capacity(job.request, emptied) >= job.request.least
                if not fits_later or not self.could_start(job, arrays):
                    continue
            quota = left.get(job.queue, {})
            claim = amounts(job.request.bundle, job.request.least)
            main = "GPU" if claim.get("GPU") else "CPU"
            named = {name: amount for name, amount in claim.items() if name in quota}
            if main in named and all(quota[name] >= amount for name, amount in named.items()):
                for name, amount in named.items():
                    quota[name] -= amount
                found.add(job.job_id)
        return found

    def could_start(self, job: WaitingJob, arrays: Counter[str]) -> bool:
        """Whether the job waits for slots only. If so, it is counted against its limits."""
        if job.after or job.held or job.preparing or job.not_before or job.begins_at:
            return False
        if job.array is not None:
            arrays[job.array.array_id] += 1
            if arrays[job.array.array_id] > job.array.max_running:
                return False
        left_under = [self.left_under(job, of_user=of_user) for of_user in (True, False)]
        if min(left_under) < job.request.least:
            return False
        self.holds(job, job.request.least)
        return True

    def find_overdue(self) -> set[str]:
        """Of each tier and priority, the job that has waited longest, if that is long."""
        there: list[WaitingJob | RunningJob] = [*self.snapshot.running, *self.snapshot.queue]
        late = [job for job in there if job.waited_s > order.LONGEST_WAIT_S]
        late.sort(key=lambda job: (-job.waited_s, job.seq))
        arrays = Counter(self.snapshot.running_of_arrays)
        found = {job.job_id for job in late if isinstance(job, RunningJob)}
        first = set()
        for job in late:
            of = job.job_id in self.guaranteed, job.priority
            if of in first or not isinstance(job, WaitingJob):
                continue
            if self.capacity(job.request, self.emptied()) < job.request.least:
                continue
            if self.could_start(job, arrays):
                first.add(of)
                found.add(job.job_id)
        return found

    def may_evict(self, coming: WaitingJob, running: RunningJob) -> bool:
        if running.is_leaving or running.recalled or running.held_s < MIN_RUN_S:
            return False
        if not self.key(coming) < self.key(running):
            return False
        ours = coming.job_id in self.guaranteed
        theirs = running.job_id in self.guaranteed
        if ours and not theirs:
            return True
        if ours == theirs and coming.priority > running.priority:
            return True
        (*_, ours_left, _, _), (*_, work, _, _) = self.key(coming), self.key(running)
        is_worth_a_start = running.held_s >= 20 * running.start_s
        has_less = coming.priority == running.priority and ours_left < CLEARLY_LESS * work
        return running.yields and is_worth_a_start and work > 0 and has_less

    def may_shrink(self, coming: WaitingJob, running: RunningJob) -> bool:
        if running.is_leaving or running.recalled or running.held_s < MIN_RUN_S:
            return False
        ours = coming.job_id in self.guaranteed
        theirs = running.job_id in self.guaranteed
        return (not ours, -coming.priority) <= (not theirs, -running.priority)

    def look_ahead(self, job: WaitingJob, reserved: Sequence[Slice]) -> None:
        """Determine when the first blocked job starts: when enough of the running jobs have ended,
        as expected or, for an overdue job, according to their limits. A job that needs more than
        that reserves nothing."""
        by_limits = self.waits_for(job, {j.job_id: self.limit(j) for j in self.snapshot.running})
        if by_limits is None:
            assert not reserved
            if self.capacity(job.request, self.emptied()) >= job.request.least:
                self.blocked = job  # it waits for jobs that start now
                self.set_aside(job.request, job.request.num_workers, both=self.is_impatient(job))
            return
        found: tuple[Free, set[str]] | None = by_limits
        if not self.is_impatient(job):
            ends = {each.job_id: (0.0, self.ends_in_s(each)) for each in self.snapshot.running}
            found = self.waits_for(job, ends)
        assert found is not None
        free, self.ended = found
        last = [
            self.limit(each)[1] for each in self.snapshot.running if each.job_id in by_limits[1]
        ]
        self.later_s = max(last, default=0.0)
        self.blocked = job
        assert count(reserved) == job.request.least
        self.is_within_its_level(job.request, reserved)
        for part in reserved:
            assert part.num_workers <= fits(job.request.bundle, free[part.node_id])
        self.change(free, job.request, reserved, -1)
        self.later_free = free

    def waits_for(
        self, job: WaitingJob, ends: Mapping[str, tuple[float, float]]
    ) -> tuple[Free, set[str]] | None:
        """Return what is free once enough running jobs have ended in the order of `ends`, and these
        jobs; None if all of them are too few."""
        free = {name: dict(there) for name, there in self.soon_free.items()}
        ended: set[str] = set()
        for at in sorted(set(ends.values())):
            if self.capacity(job.request, free) >= job.request.least:
                break
            for each in self.snapshot.running:
                if ends[each.job_id] == at and self.kept[each.job_id]:
                    self.change(free, each.request, list(self.kept[each.job_id].elements()))
                    ended.add(each.job_id)
        has_enough = self.capacity(job.request, free) >= job.request.least
        return (free, ended) if has_enough else None

    def limit(self, running: RunningJob) -> tuple[bool, float]:
        """Return the seconds until a job has surely ended, preceded by whether that is unsure."""
        limit_s = running.ends_within_s
        return limit_s is None, self.ends_in_s(running) if limit_s is None else limit_s

    def emptied(self) -> Free:
        """Return what is free after all running jobs have ended."""
        free = self.copy()
        for each in self.snapshot.running:
            self.change(free, each.request, each.slices)
        return free

    def ends_in_s(self, running: RunningJob) -> float:
        left_s = running.guess_s if running.left_s is None else running.left_s
        left_s = running.held_s + order.SETTLING_S if left_s is None else left_s
        return left_s if running.ends_within_s is None else min(left_s, running.ends_within_s)

    def is_impatient(self, job: WaitingJob) -> bool:
        """Whether the job is overdue, or was moved to the front of a job that is."""
        *_, work, _, _ = self.key(job)
        return work < 0

    def awaited(self, job: WaitingJob) -> set[str]:
        """Return the running jobs that the first blocked job waits for, if their slots are kept
        from the job."""
        is_lent = job.yields and not (self.blocked and self.is_impatient(self.blocked))
        return set() if is_lent else self.ended

    def may_backfill(self, job: WaitingJob) -> bool:
        """Whether the job certainly ends before the first blocked job starts, with a margin."""
        if job.ends_within_s is None or self.stand_by:
            return False
        return self.blocked is None or job.ends_within_s + order.SETTLING_S <= self.later_s

    # Resources.

    def copy(self) -> Free:
        return {node.id: dict(node.available_to_us) for node in self.nodes}

    def change(self, free: Free, request: Request, slices: Sequence[Slice], sign: int = 1) -> None:
        for part in slices:
            for name, amount in request.bundle.items() if part.node_id in free else ():
                there = free[part.node_id]
                there[name] = there.get(name, 0.0) + sign * part.num_workers * amount

    def less_reserved(self, free: Free, *, passes: bool) -> Free:
        """Return the remaining free resources for a job, depending on whether it may use reserved
        ones."""
        left = {name: dict(there) for name, there in free.items()}
        if self.later_free is not None and self.blocked is not None:
            for name, there in (
                left.items() if not passes or self.is_impatient(self.blocked) else ()
            ):
                later = self.later_free[name]
                left[name] = {each: min(has, later.get(each, 0.0)) for each, has in there.items()}
        for node in self.nodes:
            taken: Counter[object] = Counter()
            for request, number in self.aside[passes]:
                level = request.required_level
                kind = (request.kind, level, request.least if level else None)
                before = taken[kind]
                taken[kind] += number
                most = fits(request.bundle, node.total) if self.is_usable(request, node) else 0
                here = min(most, before + number) - min(most, before)
                for name, amount in request.bundle.items():
                    left[node.id][name] = left[node.id].get(name, 0.0) - here * amount
        return left

    def capacity(self, request: Request, free: Free) -> int:
        """Return the parts of the cluster in which the workers can be placed together."""
        if request.required_level is None:
            return sum(fits(request.bundle, there) for there in free.values())
        return max(self.capacities(request, free, request.required_level).values(), default=0)

    def capacities(self, request: Request, free: Free, level: str) -> Counter[object]:
        """Return the nodes in each domain of a level."""
        found: Counter[object] = Counter()
        for node in self.nodes:
            found[self.place(node.id, level)] += fits(request.bundle, free[node.id])
        return found

    def place(self, node_id: str, level: str) -> object:
        """Return a node's domain at a level according to its labels. If the label is missing, use
        the domain at the next narrower level."""
        labels = labels_in(next(node.total for node in self.nodes if node.id == node_id))
        names = self.snapshot.topology
        for number in range(self.levels.index(level), len(names)):
            if names[number] in labels:
                return tuple(labels.get(name) for name in names[: number + 1])
        return node_id

    def places(self, slices: Sequence[Slice], level: str) -> set[object]:
        return {self.place(part.node_id, level) for part in slices if part.node_id in self.free}

    def is_usable(self, request: Request, node: Node) -> bool:
        """Whether the node is in a domain with room for the gang."""
        level = request.required_level
        if level is None:
            return True
        capacities = self.capacities(request, self.empty(), level)
        return capacities[self.place(node.id, level)] >= request.least

    # Limits.

    def left_under(self, job: WaitingJob | Growing, *, of_user: bool) -> int:
        """Return the number of workers that the limits of the queue, or of the user in this queue,
        allow for the job."""
        queue = self.queues.get(job.queue, Queue(job.queue))
        limit = queue.user_limit if of_user else queue.limit
        most = queue.max_running_per_user if of_user else queue.max_running
        holding = {
            name: held
            for name, held in self.holding.items()
            if held[0] == job.queue and (not of_user or held[1] == job.owner)
        }
        ahead = [
            (other, number)
            for other, number, code in self.waiting_ahead
            if other.queue == job.queue
            and (other.owner == job.owner if of_user else code != "user_limit")
        ]
        new = [other for other, _ in ahead if other.job_id not in holding]
        if most is not None and job.job_id not in holding and len(holding) + len(new) >= most:
            return 0
        left = 10**9
        for name, each in amounts(job.request.bundle, 1).items():
            if name in limit and each:
                held = sum(amounts(b, n).get(name, 0.0) for _, _, b, n in holding.values())
                kept = sum(amounts(o.request.bundle, n).get(name, 0.0) for o, n in ahead)
                left = min(left, max(0, int((limit[name] - held - kept + 1e-6) // each)))
        return left

    def holds(self, job: WaitingJob | Growing, number: int) -> None:
        """Count additional workers of a job."""
        _, _, _, before = self.holding.get(job.job_id, ("", "", {}, 0))
        held = (job.queue, job.owner, job.request.bundle, before + number)
        self.holding[job.job_id] = held

    # Decisions.

    def check(self, decisions: Sequence[Decision]) -> None:
        jobs = {job.job_id: job for job in self.snapshot.queue}
        groups = {group.job_id: group for group in self.snapshot.growing}
        of_jobs = [d for d in decisions if isinstance(d, Start | Wait | Impossible)]
        of_groups = [d for d in decisions if isinstance(d, Grow | Stay)]
        asked = [d for d in decisions if isinstance(d, Preempt | Shrink)]
        assert sorted(d.job_id for d in of_jobs) == sorted(jobs)
        assert sorted(d.job_id for d in of_groups) == sorted(groups)
        assert len({d.job_id for d in asked}) == len(asked)
        free = [job for job in self.snapshot.queue if job.held is None]
        queue = [job.job_id for job in sorted(free, key=self.key)]
        assert [d.job_id for d in of_jobs][: len(queue)] == queue, "the order of the queue"
        waits = [d for d in of_jobs if isinstance(d, Wait)]
        places = [d.position for d in waits if d.reason.code != "held"]
        assert places == list(range(1, len(places) + 1))
        assert {d.because_of for d in asked} <= {d.job_id for d in waits}
        for decision in of_groups:
            if groups[decision.job_id].lacking:
                self.stands_by(groups[decision.job_id], decision)
        for each in of_jobs:
            self.decided(jobs[each.job_id], each, [d for d in asked if d.because_of == each.job_id])
        for job in self.backing_off:
            self.backs_off(job)
        for decision in sorted(
            (d for d in of_groups if not groups[d.job_id].lacking),
            key=lambda d: (-groups[d.job_id].priority, groups[d.job_id].seq),
        ):
            self.grown(groups[decision.job_id], decision)

    def backs_off(self, job: WaitingJob) -> None:
        """Set aside slots for a job that could start on them after its backoff."""
        request = job.request
        limits = [self.left_under(job, of_user=of_user) for of_user in (True, False)]
        can_start = self.capacity(request, self.emptied()) >= request.least
        if min(limits) < request.least:
            code = "user_limit" if limits[0] < request.least else "queue_limit"
            queue = self.queues.get(job.queue, Queue(job.queue))
            if can_start and why_never(queue, request) is None:
                self.waiting_ahead.append((job, request.least, code))
        elif can_start and not self.is_full(job):
            most = min(request.num_workers, *limits)
            self.set_aside(request, most, both=True)
            self.waiting_ahead.append((job, most, ""))

    def is_full(self, job: WaitingJob) -> bool:
        return job.array is not None and self.in_arrays[job.array.array_id] >= job.array.max_running

    def empty(self) -> Free:
        return {node.id: dict(node.total) for node in self.nodes}

    def decided(self, job: WaitingJob, decision: Decision, asked: Sequence[Asks]) -> None:
        request = job.request
        code = decision.reason.code if isinstance(decision, Wait) else ""
        never = (
            job.held
            or job.after
            or job.begins_at
            or job.not_before
            or self.is_full(job)
            or job.preparing
        )
        fits_ever = self.capacity(request, self.empty()) >= request.least
        if isinstance(decision, Impossible):
            assert not fits_ever
            return
        if never:
            assert code in STARTS_NEVER, (job, decision)
            assert not asked, "no job leaves for a job that can't start"
            if code in ("backing_off", "preparing_environment"):
                self.backing_off.append(job)
            return
        assert fits_ever
        limits = [self.left_under(job, of_user=of_user) for of_user in (True, False)]
        if min(limits) < request.least:
            assert code == ("user_limit" if limits[0] < request.least else "queue_limit")
            assert not asked
            if why_never(self.queues.get(job.queue, Queue(job.queue)), request) is None:
                self.waiting_ahead.append((job, request.least, code))
            return
        most = min(request.num_workers, *limits)
        capacity = self.capacity(request, self.less_reserved(self.now_free, passes=job.yields))
        if capacity < request.least and self.may_backfill(job):
            capacity = self.capacity(request, self.now_free)
            self.backfills.add(job.job_id)
        if isinstance(decision, Start):
            assert capacity >= request.least
            assert count(decision.slices) == min(most, capacity), "a gang starts whole, or elastic"
            self.takes(job, decision)
            if job.array is not None:
                self.in_arrays[job.array.array_id] += 1
            return
        assert isinstance(decision, Wait)
        assert capacity < request.least, "a job that fits starts"
        self.waiting_ahead.append((job, most, ""))
        if decision.reason.code == "room_is_made":
            self.made_room(job, decision, asked)
            self.asked |= {ask.job_id for ask in asked}
            self.preempted |= {ask.job_id for ask in asked if isinstance(ask, Preempt)}
            return
        assert code in WITHOUT_SLOTS
        assert not asked
        soon = self.less_reserved(self.soon_free, passes=job.yields)
        assert self.capacity(request, soon) < request.least, (
            "slots that are being left are waited for"
        )
        for each in self.snapshot.running:
            if each.job_id in self.asked | self.awaited(job):
                continue
            if self.may_evict(job, each):
                self.change(soon, each.request, each.slices)
            elif self.may_shrink(job, each):
                self.change(soon, each.request, each.spare)
        assert self.capacity(request, soon) < request.least, "jobs that may be asked are asked"
        if self.blocked is None:
            self.look_ahead(job, decision.reserved)
        else:
            assert not decision.reserved

    def takes(self, job: WaitingJob | Growing, decision: Start | Grow) -> None:
        passes = isinstance(job, WaitingJob) and job.yields
        free = self.less_reserved(self.now_free, passes=passes)
        if job.job_id in self.backfills:
            free = self.now_free
        lacks = isinstance(job, Growing) and job.lacking
        if isinstance(job, WaitingJob):
            self.is_near_together(job.request, decision.slices, free)
        before = job.slices if isinstance(job, Growing) else ()
        self.is_within_its_level(job.request, (*before, *decision.slices))
        for part in decision.slices:
            there = self.free[part.node_id] if lacks else free[part.node_id]
            assert part.num_workers <= fits(job.request.bundle, there), "what is free, not reserved"
        for each in (self.now_free, self.soon_free, self.free):
            self.change(each, job.request, decision.slices, -1)
        if self.later_free is not None and job.job_id not in self.backfills:
            self.change(self.later_free, job.request, decision.slices, -1)
        if not lacks:
            self.holds(job, count(decision.slices))

    def is_within_its_level(self, request: Request, slices: Sequence[Slice]) -> None:
        if request.required_level is not None:
            assert len(self.places(slices, request.required_level)) == 1

    def is_near_together(self, request: Request, slices: Sequence[Slice], free: Free) -> None:
        """Check that the gang is on one node or in the narrowest domain with room, and if there are
        several, in the fullest one."""
        number = count(slices)
        for level in reversed(self.levels):
            capacities = self.capacities(request, free, level)
            could = {
                place: capacity for place, capacity in capacities.items() if capacity >= number
            }
            if could:
                (place,) = self.places(slices, level)
                assert could[place] == min(could.values())
                return
        widest = [self.place(part.node_id, self.levels[0]) for part in slices]
        assert widest == sorted(widest, key=widest.index), "ranks of a domain come together"
        largest = sorted(self.capacities(request, free, self.levels[0]).values(), reverse=True)
        needed = next(n for n in range(len(largest) + 1) if sum(largest[:n]) >= number)
        assert len(set(widest)) == needed, "over as few domains as possible"

    def made_room(self, job: WaitingJob, wait: Wait, asked: Sequence[Asks]) -> None:
        running = {each.job_id: each for each in self.snapshot.running}
        for ask in asked:
            there = running[ask.job_id]
            if isinstance(ask, Preempt):
                assert self.may_evict(job, there)
            else:
                assert self.may_shrink(job, there)
                assert not Counter(ask.slices) - Counter(there.spare)
        soon = self.less_reserved(self.soon_free, passes=job.yields)
        assert bool(asked) == (self.capacity(job.request, soon) < job.request.least)
        parts = [
            (running[ask.job_id].request, slices)
            for ask in asked
            for slices in (
                [running[ask.job_id].slices]
                if isinstance(ask, Preempt)
                else [(part,) for part in ask.slices]
            )
        ]
        for request, slices in parts:
            self.change(soon, request, slices)
            self.change(self.soon_free, request, slices)
        if self.later_free is not None:
            for ask in asked:
                if ask.job_id not in self.ended:  # else its slots are free later anyway
                    there = running[ask.job_id]
                    slices = there.slices if isinstance(ask, Preempt) else ask.slices
                    self.change(self.later_free, there.request, slices)
        assert self.capacity(job.request, soon) >= job.request.least, "what is asked for is enough"
        for request, slices in parts:
            self.change(soon, request, slices, -1)
            assert self.capacity(job.request, soon) < job.request.least, (
                "and no more than is needed"
            )
            self.change(soon, request, slices)
        if any(isinstance(ask, Preempt) for ask in asked):
            self.nobody_leaves_where_others_can_shrink(job, soon, parts)
        for part in wait.slices:
            assert part.num_workers <= fits(job.request.bundle, soon[part.node_id])
        assert job.request.least <= count(wait.slices) <= job.request.num_workers
        self.is_within_its_level(job.request, wait.slices)
        self.is_near_together(job.request, wait.slices, soon)
        for ask in asked:
            self.kept[ask.job_id] -= Counter(
                running[ask.job_id].slices if isinstance(ask, Preempt) else ask.slices
            )
        self.change(self.soon_free, job.request, wait.slices, -1)
        if self.later_free is not None:
            self.change(self.later_free, job.request, wait.slices, -1)
        for part in wait.slices:
            there, later = self.now_free[part.node_id], self.soon_free[part.node_id]
            there.update({name: min(there[name], later[name]) for name in there})
        if job.array is not None:
            self.in_arrays[job.array.array_id] += 1

    def nobody_leaves_where_others_can_shrink(
        self, job: WaitingJob, soon: Free, parts: Sequence[tuple[Request, Sequence[Slice]]]
    ) -> None:
        """soon: the free resources after all parts have been returned."""
        soon = {name: dict(there) for name, there in soon.items()}
        for request, slices in parts:
            self.change(soon, request, slices, -1)
        for each in self.snapshot.running:
            if each.job_id in self.asked | self.awaited(job):
                continue
            if self.may_shrink(job, each):
                self.change(soon, each.request, each.spare)
        assert self.capacity(job.request, soon) < job.request.least

    def set_aside(self, request: Request, number: int, *, both: bool) -> None:
        self.aside[False].append((request, number))
        if both:
            self.aside[True].append((request, number))

    def stands_by(self, group: Growing, decision: Grow | Stay) -> None:
        capacity = self.capacity_near(group, self.free)
        if isinstance(decision, Grow):
            assert count(decision.slices) == group.lacking
            self.takes(group, decision)
            self.asked.add(group.job_id)  # because it gets slots
            return
        assert capacity < group.lacking
        self.stand_by = True
        self.set_aside(group.request, group.lacking, both=True)

    def grown(self, group: Growing, decision: Grow | Stay) -> None:
        if group.job_id in self.asked:
            assert isinstance(decision, Stay)
            assert decision.reason.code == "asked_for_slots"
            return
        most = min(group.most, *(self.left_under(group, of_user=of) for of in (True, False)))
        capacity = self.capacity_near(group, self.less_reserved(self.now_free, passes=False))
        if isinstance(decision, Grow):
            assert 0 < count(decision.slices) == min(most, capacity)
            self.takes(group, decision)
        else:
            assert not min(most, capacity), "idle slots are given to groups that can use them"

    def capacity_near(self, group: Growing, free: Free) -> int:
        """Return the parts of the cluster in which workers can join the group."""
        level = group.request.required_level
        if level is None:
            return self.capacity(group.request, free)
        there = self.places(group.slices, level)
        return max(
            (self.capacities(group.request, free, level)[place] for place in there), default=0
        )
