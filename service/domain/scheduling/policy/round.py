"""One round of the policy, in which jobs get slots one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import Gang, Gangs, WorkerKind
from service.domain.scheduling.placement.phrases import workers
from service.domain.scheduling.placement.pools import Offer, Pool, pack_later
from service.domain.scheduling.placement.slots import Node, count, is_open
from service.domain.scheduling.placement.stock import Stock, When
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.policy.allowances import Allowances
from service.domain.scheduling.policy.departures import OTHERS_GAIN, Departures
from service.domain.scheduling.policy.emptied import Emptied
from service.domain.scheduling.policy.feasibility import (
    ALL_CLOSED,
    OPEN_ARE_REFUSED,
    Feasibility,
)
from service.domain.scheduling.policy.ranking import may_borrow, too_early
from service.domain.scheduling.policy.records import (
    Decision,
    Grow,
    Growing,
    Impossible,
    Snapshot,
    Start,
    Stay,
    Wait,
    WaitingJob,
)
from service.domain.scheduling.policy.windows import Windows
from service.domain.scheduling.rules import order
from service.domain.scheduling.rules.dependencies import ArrayCounts
from service.domain.scheduling.rules.obstacles import (
    PREPARING,
    Ahead,
    Explanation,
    Obstacles,
    Reason,
    jobs,
)
from service.domain.scheduling.rules.shares import FarAhead, UserStanding

PENDING = Reason("", "")
"""Placeholder for reasons that `Round.explain` adds at the end of the round."""
MAX_TOO_LATE = 20
"""Maximum number of different jobs for which one plan finds that slots become free too late before
a reservation. Further jobs reserve nothing, because finding these slots is slow."""
SOON_S = 15.0
"""A job keeps its position if its backoff, in seconds, is at most this value. A backoff this short
usually means that the job did not cause its failures."""


class Round:
    """The intermediate state of one plan, such as the remaining slots."""

    def __init__(
        self,
        nodes: Sequence[Node],
        snapshot: Snapshot,
        windows: Windows,
        gangs: Gangs,
        emptied: Emptied,
        ranks: Mapping[str, order.Rank],
        ahead: Mapping[str, FarAhead],
        now: datetime,
    ) -> None:
        """`ranks` and `ahead` describe the running jobs, as in `Departures`."""
        self._gangs = gangs
        self._emptied = emptied
        self._windows = windows
        self._skips_reservations = False
        """Whether a blocked job reserved nothing because it waits for more than running jobs."""
        self._too_late: set[tuple[Gang, float | None, bool]] = set()
        """Jobs for which slots become free too late, as (gang, limit, yields)."""
        topology = Topology(snapshot.topology, [*nodes, *snapshot.to_come])
        self._stock = Stock(nodes, gangs, topology, snapshot.holders)
        self._allowances = Allowances(snapshot, gangs, windows, emptied)
        self.departures = Departures(
            snapshot,
            windows.leaving(),
            self._stock,
            gangs,
            ranks,
            ahead,
            self._allowances.lending,
        )
        self._targets = self.departures.targets
        self._backfill = self.departures.backfill
        self._free = Pool(self._stock, When.FREE)
        self._open = Offer(self._stock)
        """Slots that are not reserved by blocked jobs that come earlier in the queue."""
        self._passable = Offer(self._stock)
        """Like `_open`, but only jobs that have waited for a long time reserve slots."""
        self._unreserved = Offer(self._stock)
        """Slots that are not promised or set aside, even if a blocked job reserves them."""
        self._obstacles = Obstacles(
            self._stock.kinds, snapshot.holders, self._free, nodes, windows.spoken
        )
        self._unexplained: list[tuple[Wait, Gang, Ahead | None]] = []
        self._unexplained_groups: list[tuple[Stay, Callable[[], Explanation]]] = []
        self._to_come = snapshot.to_come
        there = [*nodes, *snapshot.to_come]
        self._is_closed = bool(there) and not any(is_open(node.total) for node in there)
        """Whether every accepted node accepts only ranks of silos."""
        are_refused = any(is_open(node.total) for node in snapshot.nodes)
        self._closed_because = OPEN_ARE_REFUSED if are_refused else ALL_CLOSED
        self._feasibility = Feasibility(nodes, snapshot.to_come, self._stock.kinds)
        self._backing_off: list[tuple[WaitingJob, Gang]] = []
        self._now = now
        self._arrays = ArrayCounts(snapshot.running_of_arrays)

    def serve(self, group: Growing) -> Decision:
        """Give a group all the workers that it lacks, on any free slots, even on reserved slots."""
        gang, lacking = self._gangs.of(group.request), group.lacking
        if (stay := self._asked_for_slots(group)) is not None:
            return stay
        slices = self._free.pack_near(group.job_id, gang.kind, lacking, lacking, group.slices)
        if slices is not None:
            self._allowances.unreserve(group, gang.kind)
            return self._grow(group, gang, slices)
        how = "continues without" if group.trains else "waits for"
        sentence = f"{how} {workers(lacking)} of {gang.bundle_spoken}"
        stay = self._stay(sentence, group, gang, lacking)
        self._set_aside(group.job_id, gang, lacking)
        self._backfill.close()
        return stay

    def decide(self, job: WaitingJob, gang: Gang, rank: order.Rank, position: int) -> Decision:
        """Decide what to do with a waiting job. `position` is the job's place in the queue,
        starting at 1."""
        kept_back = self._kept_back(job, gang, position)
        return kept_back or self._find_slots(job, gang, rank, position)

    def _kept_back(self, job: WaitingJob, gang: Gang, position: int) -> Decision | None:
        """Return a decision if the job can't start even if slots are free; None if it can."""
        if (early := too_early(job, position)) is not None:
            return early
        if self._is_closed and not gang.request.homes:
            return Wait(job.job_id, Reason("no_nodes", self._closed_because), position)
        if (impossible := self._feasibility.why_never(gang)) is not None:
            return Impossible(job.job_id, impossible)
        if job.not_before is not None and job.not_before > self._now:
            self._back_off(job, gang, job.not_before)
            message = f"waits for its retry at {job.not_before:%H:%M:%S} UTC"
            return Wait(job.job_id, Reason("backing_off", message), position)
        if (why_full := self._arrays.why_full(job.array)) is not None:
            return Wait(job.job_id, Reason("array_limit", why_full), position)
        if job.preparing is not None:
            self._backing_off.append((job, gang))
            reason = Reason(PREPARING, job.preparing)
            return Wait(job.job_id, reason, position)
        return None

    def _find_slots(self, job: WaitingJob, gang: Gang, rank: order.Rank, position: int) -> Decision:
        """Start the job on free slots, have other jobs make room for it, or let it wait."""
        kind, least, most = gang.kind, gang.least, gang.request.num_workers
        lending = self._allowances.lending
        may_ever = may_borrow(lending, job, gang, rank)
        headroom = self._allowances.claim(job, gang, may_ever=may_ever)
        if headroom.workers < least:
            return Wait(job.job_id, headroom.reason(gang.needs), position, headroom.holders)
        most = min(most, headroom.workers)
        target = self._targets.get(job.job_id)
        offer = self._passable if job.yields else self._open
        lent, lent_soon = self._allowances.lent(job, gang, rank)
        # `soon` includes slots that are free now.
        has_slots = offer.soon.has(kind, least)
        fits_soon = has_slots and lent_soon.workers >= least
        if lent_soon.workers < least and not may_ever:
            return Wait(job.job_id, lent_soon.reason(gang.needs), position)
        if target == 0 and fits_soon:
            message = f"{gang.needs}; {OTHERS_GAIN} the available slots"
            return Wait(job.job_id, Reason("others_gain_more", message), position)
        if target:
            most = max(least, min(most, target))
            if not offer.now.has(kind, most) and offer.soon.has(kind, most):
                promised = self._promise(job, gang, offer, min(most, lent_soon.workers), position)
                if promised is not None:
                    return promised
        most_now = min(most, lent.workers)
        slices, passes = self._free_slots(job, gang, most_now, offer, has_slots)
        if slices is not None:
            self._take(job, kind, slices, ends_before=passes)
            self._arrays.start(job.array)
            return Start(job.job_id, slices)
        self._allowances.reserve(job, gang, most)
        if fits_soon or self.departures.ask_to_leave(job, gang, rank, offer):
            _, lent_soon = self._allowances.lent(job, gang, rank)
            promised = self._promise(job, gang, offer, min(most, lent_soon.workers), position)
            if promised is not None:
                self._arrays.promise(job.array)
                return promised
        if has_slots and lent_soon.workers < least:
            if rank.is_overdue and lending is not None:
                lending.claim(job.queue, kind, least)
            return Wait(job.job_id, lent_soon.reason(gang.needs), position)
        wait = Wait(job.job_id, PENDING, position)
        if self._to_come and (lacks := self._feasibility.why_not_now(gang)) is not None:
            wait.reason = lacks
        else:
            self._unexplained.append((wait, gang, self._obstacles.ahead_of(gang)))
        if gang.request.is_bound:
            # Other jobs must be able to reserve slots outside of the reservation.
            if self._emptied.can_hold(gang):
                self._set_aside(job.job_id, gang, gang.request.num_workers, is_overdue=False)
        elif not self._backfill.is_blocked:
            wait.reserved = self._reserve(job, gang, rank)
        return wait

    def _free_slots(
        self,
        job: WaitingJob,
        gang: Gang,
        most: int,
        offer: Offer,
        has_slots: bool,
    ) -> tuple[tuple[Slice, ...] | None, bool]:
        """Return free slots for a job, and whether it overtakes the first blocked job on them.
        has_slots: whether `offer.soon` has enough slots."""
        if most < gang.least:
            return None, False
        asked = gang.kind, gang.least, most, gang.request
        slices = offer.now.pack_most(*asked) if has_slots else None
        passes = slices is None and self._backfill.may_pass(job.ends_within_s)
        if passes:
            slices = self._unreserved.now.pack_most(*asked)
        return slices, passes

    def _reserve(self, job: WaitingJob, gang: Gang, rank: order.Rank) -> tuple[Slice, ...]:
        """For the first job that can't start, reserve the slots that are expected to be free first.
        Returns the slots. A job reserves nothing if it waits for something besides the end of
        running jobs, such as new nodes (`Emptied`) or the end of a reservation. The next blocked
        job then reserves slots."""
        kind = gang.kind
        # `block` is slow if a job waits for more than the ends of running jobs, so ask `Emptied`
        # first after that has happened once.
        if self._skips_reservations and not self._emptied.can_hold(gang):
            return ()
        key = gang, job.ends_within_s, job.yields
        if key in self._too_late or len(self._too_late) >= MAX_TOO_LATE:
            return ()
        closed_in = partial(self._windows.closed_in, job)
        by_limits = rank.is_overdue or rank.user is UserStanding.BEHIND
        blocked = self._backfill.block(kind, gang.least, by_limits=by_limits, but=closed_in)
        slices = None
        if blocked is not None:
            if blocked.is_too_late:
                self._too_late.add(key)
                return ()
            self._stock.look_ahead(blocked.ending)
            slices = pack_later(self._stock, kind, gang.least, blocked.closed)
        elif not self._emptied.can_hold(gang):
            self._skips_reservations = True
            return ()
        if slices is None:
            # The job waits for jobs that this plan starts, or for slots that nodes still show as
            # taken.
            self._backfill.is_blocked = True
            self._backfill.close()
            self._set_aside(job.job_id, gang, gang.request.num_workers, rank.is_overdue)
            return ()
        self._obstacles.block(job.job_id, kind)
        self._stock.reserve(job.job_id, kind, slices)
        self._open.keep_for_later()
        if rank.is_overdue:
            self._passable.keep_for_later()
        return slices

    def _back_off(self, job: WaitingJob, gang: Gang, until: datetime) -> None:
        """If a job that is backing off will be retried soon, reserve slots for it as if it were
        waiting for slots."""
        kind, most = gang.kind, gang.request.num_workers
        most = min(most, self._allowances.headroom(job, kind, gang.least).workers)
        is_full = self._arrays.why_full(job.array) is not None
        is_soon = (until - self._now).total_seconds() <= SOON_S
        if not is_soon or is_full or most < gang.least:
            self._backing_off.append((job, gang))
            return
        self._allowances.reserve(job, gang, most)
        if not self._emptied.can_hold(gang):
            return
        offer = self._passable if job.yields else self._open
        slices = offer.now.pack_most(kind, gang.least, most, gang.request)
        if slices is None:
            self._set_aside(job.job_id, gang, most, is_overdue=False)
        else:
            self._stock.promise(job.job_id, kind, slices)
            self._obstacles.block(job.job_id, kind)

    def _promise(
        self, job: WaitingJob, gang: Gang, offer: Offer, most: int, position: int
    ) -> Wait | None:
        """Keep slots for a job, including slots that other jobs are about to release. Returns None
        if there are too few such slots."""
        if most < gang.least:
            return None
        slices = offer.soon.pack_most(gang.kind, gang.least, most, gang.request)
        if slices is None:
            return None
        if self._allowances.lending is not None:
            self._allowances.lending.leave(job.queue, gang.kind, slices, -1)
        self._stock.promise(job.job_id, gang.kind, slices)
        self._obstacles.block(job.job_id, gang.kind)
        leaving = self.departures.from_nodes(slices)
        verb = "makes" if len(leaving) == 1 else "make"
        message = f"{gang.needs}; {jobs(leaving)} {verb} room for this job"
        return Wait(job.job_id, Reason("room_is_made", message), position, leaving, slices)

    def end_queue(self) -> None:
        """Set aside slots for jobs that back off and could then start. Called after the queue has
        been served and before groups grow."""
        for job, gang in self._backing_off:
            headroom = self._allowances.claim(job, gang)
            if headroom.workers < gang.least or self._arrays.why_full(job.array) is not None:
                continue
            most = min(gang.request.num_workers, headroom.workers)
            self._allowances.reserve(job, gang, most)
            if self._emptied.can_hold(gang):
                self._set_aside(job.job_id, gang, most)

    def grow(self, group: Growing) -> Decision:
        """Give a training group additional slots that no job has reserved."""
        if (stay := self._asked_for_slots(group)) is not None:
            return stay
        gang = self._gangs.of(group.request)
        kind = gang.kind
        most, held = group.most, count(group.slices)
        num_parts, lacks_ranks = gang.request.num_parts, held < gang.request.num_ranks
        least = num_parts - held % num_parts if lacks_ranks else 1
        if group.job_id in self._targets:
            most = min(most, self._targets[group.job_id] - held)
        sentence = f"could grow by {workers(group.most)} of {gang.bundle_spoken}"
        if most <= 0:
            if self._capacity_near(group, gang) < least:
                return self._stay(sentence, group, gang, least)
            why = f"{OTHERS_GAIN} the available slots"
            if self.departures.chooses_at_most(group, held):
                why = "this is currently the job's best size, according to its known step times"
            message = f"trains on {workers(held)}; {why}"
            return Stay(group.job_id, Reason("others_gain_more", message))
        headroom = self._allowances.headroom(group, kind, least)
        if headroom.workers < least:
            return Stay(group.job_id, headroom.reason(sentence), headroom.holders)
        lent, _ = self._allowances.lent(group, gang)
        if lent.workers < least:
            return Stay(group.job_id, lent.reason(sentence))
        most = min(most, headroom.workers, lent.workers)
        near = group.slices, gang.request
        slices = self._open.now.pack_near(group.job_id, kind, least, most, *near)
        if slices is not None:
            return self._grow(group, gang, slices)
        return self._stay(sentence, group, gang, least)

    def _asked_for_slots(self, group: Growing) -> Stay | None:
        """Return the decision to ask a group for slots; None if this plan doesn't ask the group."""
        asked = self.departures.asked_of(group.job_id)
        if asked is None:
            return None
        ahead = () if asked.because_of == group.job_id else (asked.because_of,)
        return Stay(group.job_id, Reason("asked_for_slots", asked.reason.message), ahead)

    def _stay(self, sentence: str, group: Growing, gang: Gang, least: int) -> Stay:
        """Return the decision for a group that needs at least `least` more workers, for which too
        few slots are free and unreserved."""
        stay = Stay(group.job_id, PENDING)
        ahead = self._obstacles.ahead(gang.kind)

        def why() -> Explanation:
            kind, free = gang.kind, self._capacity_near(group, gang)
            return self._obstacles.why(sentence, group.job_id, kind, least, ahead, free, runs=True)

        self._unexplained_groups.append((stay, why))
        return stay

    def _capacity_near(self, group: Growing, gang: Gang) -> int:
        return self._free.capacity_near(group.job_id, gang.kind, group.slices)

    def explain(self, on_error: Callable[[str, Exception], Reason]) -> None:
        """Add the reasons that can only be determined once all jobs to start are known."""
        why_waiting = self._obstacles.why_waiting
        for wait, gang, ahead in self._unexplained:
            try:
                wait.reason, wait.blocked_by = why_waiting(wait.job_id, gang, ahead)
            except Exception as error:
                wait.reason = on_error(wait.job_id, error)
        for stay, why in self._unexplained_groups:
            try:
                stay.reason, stay.blocked_by = why()
            except Exception as error:
                stay.reason = on_error(stay.job_id, error)

    def _grow(self, group: Growing, gang: Gang, slices: tuple[Slice, ...]) -> Grow:
        self._take(group, gang.kind, slices)
        self.departures.keeps(group.job_id)
        num_workers = count(group.slices) + count(slices)
        batch_size = self.departures.batch_size(group.job_id, gang.kind, num_workers)
        return Grow(group.job_id, slices, batch_size)

    def _take(
        self,
        job: WaitingJob | Growing,
        kind: WorkerKind,
        slices: tuple[Slice, ...],
        *,
        ends_before: bool = False,
    ) -> None:
        self._stock.take(job.job_id, kind, slices, ends_before=ends_before)
        self._obstacles.hold(job.job_id, slices)
        self._allowances.take(job, kind, slices)

    def _set_aside(self, job_id: str, gang: Gang, most: int, is_overdue: bool = True) -> None:
        self._obstacles.block(job_id, gang.kind)
        for offer in (self._open, self._unreserved, *[self._passable] * is_overdue):
            offer.reserved.set_aside(gang.kind, most)
