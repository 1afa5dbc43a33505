"""Requests to running jobs to release slots for other jobs, made by this plan or by earlier
plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic import sizing
from service.domain.scheduling.elastic.targets import ElasticClaim, Standing, in_vain, targets
from service.domain.scheduling.placement.gangs import Gang, Gangs, WorkerKind
from service.domain.scheduling.placement.phrases import workers
from service.domain.scheduling.placement.pools import Offer, Pool
from service.domain.scheduling.placement.slots import count, rounded_down
from service.domain.scheduling.placement.stock import Stock, When
from service.domain.scheduling.policy.emptied import Emptied
from service.domain.scheduling.policy.ranking import Able, may_borrow
from service.domain.scheduling.policy.records import (
    Growing,
    Preempt,
    Shrink,
    Snapshot,
    WaitingJob,
)
from service.domain.scheduling.policy.windows import Leaving
from service.domain.scheduling.rules import eviction, order
from service.domain.scheduling.rules.backfill import Backfill
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.lending import Lending
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.shares import FarAhead

OTHERS_GAIN = "other jobs come first or gain more from"
MAX_PREEMPTED = 100
"""Maximum number of jobs that one plan asks to release slots. The next plan can ask other jobs."""
MAX_RESERVED = 500
"""Like `MAX_PREEMPTED`, for jobs that leave reserved nodes."""


class Departures:
    """The requests to running jobs, in one plan, to release some or all of their slots."""

    def __init__(
        self,
        snapshot: Snapshot,
        leaving: Sequence[Leaving],
        stock: Stock,
        gangs: Gangs,
        ranks: Mapping[str, order.Rank],
        ahead: Mapping[str, FarAhead],
        lending: Lending | None,
    ) -> None:
        """`leaving` contains the jobs that leave reserved nodes. `ranks` contains the ranks of the
        running jobs in the scheduling order, and `ahead` states which of their accounts are far
        ahead of their shares; both are keyed by job id."""
        self._snapshot = snapshot
        self._stock = stock
        self._gangs = gangs
        self._ranks = ranks
        self._lending = lending
        running = eviction.cheapest_first(snapshot.running, ranks)
        asked = () if snapshot.slots_lag else running
        self._candidates = eviction.Candidates(asked, ranks, ahead, snapshot.min_run_s)
        self._leaving: dict[str, int] = {}
        """Jobs that were asked to leave or shrink, numbered in the order of the requests."""
        self._leaving_from: defaultdict[str, list[str]] = defaultdict(list)
        """The jobs that release slots, keyed by node."""
        self._soon = Pool(stock, When.SOON)
        self.backfill = Backfill(snapshot.holding(), self._soon, gangs)
        for job in running:
            if job.is_leaving:
                self._expect(job, job.slices)
            elif job.recalled:
                self._expect(job, job.recalled)
        self._unevictable: dict[tuple[object, ...], tuple[order.Rank, int]] = {}
        """For each kind of request for which not enough slots could be freed: the rank of the
        requesting job, and the number of its workers that would fit if every job that can be asked
        for slots released them."""
        self.targets: dict[str, int] = {}
        """Chosen sizes of elastic jobs, keyed by job id."""
        self.asked: list[Preempt | Shrink] = []
        self._grown: set[str] = set()
        """Groups to which this plan gives slots, and which it therefore does not ask for slots."""
        for each in leaving[:MAX_RESERVED]:
            self._leave(each)

    def _leave(self, leaving: Leaving) -> None:
        """Ask a job to release slots on reserved nodes."""
        job, (name, reason) = leaving.job, (leaving.job.job_id, leaving.reason)
        if count(leaving.slices) < count(job.slices):
            self._shrink(job, leaving.slices, reason, name)
            return
        self.asked.append(Preempt(name, reason, name, leaving.ends))
        rest = list(job.slices)
        for part in job.recalled:
            if part in rest:
                rest.remove(part)
        self._expect(job, rest)

    def asked_of(self, job_id: str) -> Preempt | Shrink | None:
        """Return this plan's request to the job, if any."""
        return next((ask for ask in self.asked if ask.job_id == job_id), None)

    def from_nodes(self, slices: Sequence[Slice]) -> tuple[str, ...]:
        """Return the jobs that release slots on the nodes of these slices, in the order of the
        requests."""
        there = {name for part in slices for name in self._leaving_from[part.node_id]}
        return tuple(sorted(there, key=lambda name: self._leaving[name]))

    def choose_sizes(
        self,
        waiting: Sequence[tuple[WaitingJob, Gang, order.Rank]],
        emptied: Emptied,
        now: datetime,
    ) -> None:
        """Choose the sizes of elastic jobs, and ask larger running jobs for slots."""
        elastic, min_run_s = self._snapshot.elastic, self._snapshot.min_run_s
        claims: list[ElasticClaim] = []
        others: defaultdict[tuple[Standing, WorkerKind], int] = defaultdict(int)
        lending = None if self._lending is None else self._lending.trial()
        able = Able(self._snapshot, self._gangs, now, lending)
        starting: list[tuple[WaitingJob, Gang, order.Rank, sizing.ElasticJob]] = []
        for job, gang, rank in waiting:
            could = emptied.can_hold(gang) and may_borrow(self._lending, job, gang, rank)
            if not could or not able.claims_capacity(job, gang):
                continue
            # The sizing rules ignore topology domains, so don't use them for jobs that require one.
            choice = elastic.get(job.job_id) if gang.kind.required is None else None
            if choice is None:
                others[rank.standing, gang.kind] += gang.least
                continue
            starting.append((job, gang, rank, choice))
        for job, gang, rank, choice in starting:  # each of them has been counted with its minimum
            most = gang.least + able.most_more(job, gang.kind)
            choice = replace(choice, most=min(choice.most, most))
            claims.append(
                ElasticClaim(
                    *(job.job_id, rank.standing, gang.kind, choice),
                    comes_first=rank.is_overdue,
                )
            )
        sized = [
            job
            for job in self._snapshot.running
            if job.job_id in elastic
            and job.yields
            and not self._snapshot.slots_lag
            and not (job.is_leaving or job.recalled or job.request.required_level)
            and job.job_id not in self._leaving
        ]
        for running in sized:
            choice, rank = elastic[running.job_id], self._ranks[running.job_id]
            kind, held = self._gangs.of(running.request).kind, count(running.slices)
            choice = replace(choice, most=min(choice.most, held + able.most_more(running, kind)))
            claims.append(
                ElasticClaim(
                    running.job_id,
                    rank.standing,
                    kind,
                    choice,
                    held=held,
                    stays=running.held_s < min_run_s
                    or not (choice.in_place or running.has_earned_start),
                    comes_first=rank.is_overdue
                    or running.held_s < sizing.least_run_s(min_run_s, running.num_left),
                    has_grown=choice.in_place and running.grown_s < min_run_s,
                    has_shrunk=choice.in_place and running.shrunk_s < min_run_s,
                )
            )
        free, largest = self._soon.capacity, self._stock.kinds.largest
        self.targets |= targets(claims, others, free, largest)
        held_back = in_vain(claims, self.targets, others, free, largest)
        self.targets |= {each.job_id: each.held for each in claims if each.job_id in held_back}
        for running in sized:
            kind, held = self._gangs.of(running.request).kind, count(running.slices)
            more = self.targets[running.job_id] - held
            if more > 0:  # the sizes of several jobs can exceed a limit that the jobs share
                more = min(more, able.most_more(running, kind))
                more = rounded_down(held + more, running.request.num_parts) - held
                able.count(running, kind, more)
                self.targets[running.job_id] = held + more
            self._resize(running, self.targets[running.job_id])

    def _resize(self, running: RunningJob, target: int) -> None:
        """Ask a running job to release the slots in excess of its chosen size. If the job can't
        change its size in place, ask it to release all its slots and to resume with the chosen
        size."""
        held = count(running.slices)
        in_place = self._snapshot.elastic[running.job_id].in_place
        if held == target or len(self.asked) >= MAX_PREEMPTED or (in_place and target > held):
            return
        name = running.job_id
        if in_place and target:
            given: list[Slice] = []
            for slices in running.spare_together:
                if held - count(given) - count(slices) >= target:
                    given += slices
            if given:
                message = f"continues with fewer workers, because {OTHERS_GAIN} its slots"
                self._shrink(running, given, Reason("shrinks", message), name)
            return
        if not target:
            message = f"releases its slots temporarily, because {OTHERS_GAIN} these slots"
        else:
            is_own = target > held or self.chooses_at_most(running, target)
            why = "based on its speed" if is_own else f"because {OTHERS_GAIN} its slots"
            message = (
                f"releases its slots and resumes on {workers(target)} instead of {held}, {why}"
            )
        self.asked.append(Preempt(name, Reason("resized", message), name))
        self._expect(running, running.slices)

    def keeps(self, job_id: str) -> None:
        """Record that the plan gives slots to this group."""
        self._grown.add(job_id)

    def chooses_at_most(self, job: RunningJob | Growing, num_workers: int) -> bool:
        """Whether the size chosen for this job would be at most `num_workers` if there were no
        other jobs."""
        name, choice = job.job_id, self._snapshot.elastic[job.job_id]
        alone = sizing.Sized(name, choice, count(job.slices))
        per_node = max(1, self._stock.kinds.largest(self._gangs.of(job.request).kind))
        return sizing.sizes([alone], choice.most, per_node)[name] <= num_workers

    def ask_to_leave(self, job: WaitingJob, gang: Gang, rank: order.Rank, offer: Offer) -> bool:
        """Ask running jobs to release slots for this job. If that would not free enough slots,
        return False without asking any job. A job whose size was chosen is not asked to make room
        for another such job, because the sizes were chosen with both jobs in mind."""
        if len(self.asked) >= MAX_PREEMPTED or gang.kind.is_whole:
            return False  # the rules only count interchangeable slots
        is_sized = job.job_id in self.targets
        # If too few slots can be freed on all nodes, then also on the nodes outside of a fence.
        kinds: tuple[WorkerKind, ...] = (gang.kind,)
        if gang.kind.fence is not None and not offer.soon.has(gang.kind.anywhere, gang.least):
            kinds = gang.kind.anywhere, gang.kind
        of_job = job.yields, is_sized, rank.path
        for kind in kinds:
            tried = self._unevictable.get((kind, *of_job))
            if tried is not None and gang.least > tried[1] and rank.may_less(tried[0]):
                return False
        kept = self._grown | self._leaving.keys()
        kept |= self._stock.ended if offer.keeps_for_later else set()
        kept |= self.targets.keys() if is_sized else set()
        for kind in kinds:
            lent = None
            if self._lending is not None:
                lent = eviction.Lent(self._lending.trial(), job.queue, gang.kind)
            candidates = self._candidates.of(rank, kept)
            found = eviction.victims(kind, gang.least, offer.soon, candidates, self._gangs, lent)
            if not found.asks:
                self._unevictable[kind, *of_job] = rank, found.capacity
                return False
        self._unevictable.clear()
        of_jobs: dict[str, list[eviction.Ask]] = {}
        for ask in found.asks:
            of_jobs.setdefault(ask.running.job_id, []).append(ask)
        for asks in of_jobs.values():
            self._ask(asks, job.job_id, rank)
        return True

    def _ask(self, asks: Sequence[eviction.Ask], name: str, coming: order.Rank) -> None:
        """Ask one running job for all of these slots on behalf of job `name`."""
        running = asks[0].running
        slices = tuple(part for ask in asks for part in ask.slices)
        if any(ask.is_all for ask in asks):
            why = eviction.because(coming, self._ranks[running.job_id])
            reason = Reason("preempted", f"releases its slots for job {name}, {why}")
            self.asked.append(Preempt(running.job_id, reason, name))
            slices = running.slices
        else:
            message = f"continues with fewer workers, so that job {name} can start"
            self._shrink(running, slices, Reason("shrinks", message), name)
            return
        self._expect(running, slices)

    def _shrink(
        self, running: RunningJob, slices: Sequence[Slice], reason: Reason, because_of: str
    ) -> None:
        """Ask a group to release these slots."""
        name, kind = running.job_id, self._gangs.of(running.request).kind
        batch_size = self.batch_size(name, kind, count(running.slices) - count(slices))
        self.asked.append(Shrink(name, tuple(slices), reason, because_of, batch_size))
        self._expect(running, slices)

    def batch_size(self, job_id: str, kind: WorkerKind, num_workers: int) -> int | None:
        """Return the global batch size of a job with `num_workers`; None if the batch size is
        fixed."""
        job = self._snapshot.elastic.get(job_id)
        if job is None or job.batch_range is None:
            return None
        return sizing.best_batch(job, num_workers, max(1, self._stock.kinds.largest(kind)))

    def _expect(self, running: RunningJob, slices: Sequence[Slice]) -> None:
        """Record that the job will release these slots."""
        self._leaving[running.job_id] = len(self._leaving)
        for part in slices:
            self._leaving_from[part.node_id].append(running.job_id)
        self.backfill.leaves(running.job_id, slices)
        kind = self._gangs.of(running.request).kind
        if self._lending is not None:
            self._lending.leave(running.queue, kind, slices)
        self._stock.expect(running.job_id, kind, slices)
