"""A simulation of the policy that predicts when each waiting job will start.

The simulation steps from the end of one job to the end of the next. At each of these times, it
calls `policy.plan` as the scheduler does, and applies the plan: jobs start, or they leave or shrink
to release slots for other jobs. Waiting jobs that miss their deadlines are cancelled, with the jobs
that depend on their success. The simulation assumes that nothing else happens: no job is submitted,
no job that has started fails, groups don't grow, and nodes and their use don't change.

The distant future is simulated in coarse steps, because the assumptions about it are even coarser:
jobs are treated as ending at the same time if the difference between their end times is small
relative to how far in the future they end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ray_workers.shared.slices import Slice, by_bundle
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.active_jobs import ActiveJob, started, waiting_again
from service.domain.scheduling.outlook.endings import Endings
from service.domain.scheduling.outlook.situation import Situation, snapshot_classes
from service.domain.scheduling.placement import slots
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.placement.slots import (
    NUM_GPUS,
    WHOLE_GPUS,
    Holder,
    Node,
    add,
    count,
    free_again,
)
from service.domain.scheduling.policy import WaitingJob
from service.domain.scheduling.rules import reservations, times
from service.domain.scheduling.rules.dependencies import waits_for
from service.domain.scheduling.rules.eviction import RunningJob, leftover
from service.domain.scheduling.rules.limits import HELD, held_message
from service.domain.scheduling.rules.obstacles import PREPARING, Reason
from service.domain.states import DEADLINE_PASSED

FINEST_S = 5.0
RESOLUTION = 0.05
"""Minimum time between two steps of the simulation, as a fraction of the simulated time so far. The
time is at least `FINEST_S` seconds."""
MAX_PLANS = 600
"""Maximum number of calls to the policy in one simulation."""
HORIZON_S = 30 * 86400.0


@dataclass(frozen=True)
class Expected:
    """When a job is expected to start."""

    at: datetime | None
    why: Reason | None = None
    """The reason why the start is unknown."""
    not_before: datetime | None = None
    """If the start is unknown, the job won't start before this time."""
    num_assumed: int = 0
    """Number of jobs of unknown length on which `at` depends."""
    earliest: datetime | None = None
    latest: datetime | None = None
    """`earliest` and `latest` are the bounds of `at`. `latest` is None if the job's start can't be
    predicted on the assumption that the other jobs take their longest expected time."""


class Simulation:
    """One simulation. Call `step` until it returns False; then `starts` contains every waiting
    job."""

    def __init__(
        self,
        situation: Situation,
        now: datetime,
        *,
        only: str | None = None,
        max_plans: int = MAX_PLANS,
    ) -> None:
        """only: the job whose start is simulated; None for all waiting jobs. The simulation for a
        single job stops once `has_run_out` is true."""
        self.starts: dict[str, Expected] = {}
        self._situation = situation
        self._snapshot = snapshot = situation.snapshot
        self._began = self._now = now
        self._plans_left = max_plans
        self._is_of_one = only is not None
        asked = (job for job in snapshot.queue if only in (None, job.job_id))
        self._asked = {job.job_id: None for job in asked}
        self._held = {job.job_id: job.held for job in snapshot.queue if job.held is not None}
        self._num_held = len(self._held.keys() & self._asked.keys())
        self._nodes = [node for node in snapshot.nodes if node.accepted]
        self._free = {node.id: _without_shares(node) for node in self._nodes}
        self._shares_gpus = any(WHOLE_GPUS in node.available_to_us for node in self._nodes)
        self._node_of = {node.id: node for node in self._nodes}
        self._total = slots.total_of(node.total for node in self._nodes)
        self._used_s = dict(snapshot.used_s)
        self._classes = snapshot_classes(snapshot, self._nodes)
        limited = {j.job_id: j.array.array_id for j in snapshot.queue if j.array is not None}
        self._array_of = {**limited, **situation.arrays}
        self._running_of_arrays = Counter(snapshot.running_of_arrays)
        self._endings = Endings(self._array_of, situation.others_of_arrays)
        self._last_reasons: dict[str, Reason] = {}
        self.has_run_out = False
        """Whether the simulation has started a job that precedes jobs omitted from the situation.
        If true, the actual starts of later jobs can be later than predicted."""
        self._num_assumed = 0
        """Number of jobs of unknown length that have ended in the simulation."""
        self._active = {job.job_id: self._begun(job) for job in snapshot.running}
        for holder in snapshot.holders:
            over = replace(self._begun(leftover(holder)), goes_on=False)
            self._active.setdefault(holder.job_id, over)

    def run(self) -> dict[str, Expected]:
        """Run the simulation to its end, and return when each job is expected to start."""
        while self.step():
            pass
        return self.starts

    def step(self) -> bool:
        """Apply a plan for the current time, and advance to the next time at which something can
        happen. Returns False if nothing more can happen."""
        while self._plans_left > 0:
            heads = self._classes.heads(self._free)
            has_more = bool(self._classes.left_out)
            has_started = self._apply(self._plan(heads))
            if not (has_started and has_more) or self._knows_no_more:
                break
        moment = self._next_moment()
        is_over = len(self.starts) + self._num_held >= len(self._asked)
        is_over = is_over or self._knows_no_more
        if is_over or moment is None or not self._plans_left or self._is_far(moment):
            self._close(is_cut_off=moment is not None)
            return False
        self._go_to(moment)
        return True

    @property
    def _knows_no_more(self) -> bool:
        return self.has_run_out and self._is_of_one

    def _plan(self, queue: Sequence[WaitingJob]) -> list[policy.Decision]:
        self._plans_left -= 1
        running = [active.at(self._now) for active in self._active.values()]
        holders = tuple(
            Holder(j.job_id, j.slices, j.request.bundle, j.queue, j.owner, j.request.roles)
            for j in running
        )
        nodes = (
            replace(node, available_to_us=self._offered(node, holders)) for node in self._nodes
        )
        snapshot = replace(
            self._snapshot,
            queue=tuple(self._as_of_now(job) for job in queue),
            nodes=tuple(nodes),
            holders=holders,
            growing=(),
            running=tuple(running),
            used_s=self._used_s,
            running_of_arrays=self._running_of_arrays,
            elastic={},  # groups keep their sizes
        )
        return policy.plan(snapshot, self._now)

    def _offered(self, node: Node, holders: Sequence[Holder]) -> Mapping[str, float]:
        free = self._free[node.id]
        if not self._shares_gpus or not node.total.get("GPU"):
            return free
        return with_shared_gpus(free, parts_on(node.id, holders))

    def _as_of_now(self, job: WaitingJob) -> WaitingJob:
        passed_s = (self._now - self._began).total_seconds()
        is_due = job.not_before is not None and job.not_before <= self._now
        limits_s = [] if job.ends_within_s is None else [job.ends_within_s]
        if job.ends_by is not None:
            limits_s.append(max(0.0, (job.ends_by - self._now).total_seconds()))
        return replace(
            job,
            waited_s=job.waited_s + passed_s,
            ends_within_s=min(limits_s, default=None),
            not_before=None if is_due else job.not_before,
            preparing=None,
        )

    def _apply(self, decisions: Iterable[policy.Decision]) -> bool:
        """Apply the decisions. Returns whether a job started."""
        has_started = False
        for decision in decisions:
            if isinstance(decision, policy.Start):
                self._start(self._classes.remove(decision.job_id), decision.slices)
                has_started = True
            elif isinstance(decision, policy.Impossible):
                self._classes.remove(decision.job_id)
                self._record(decision.job_id, Expected(None, decision.reason))
            elif isinstance(decision, policy.Preempt):
                active = self._active[decision.job_id]
                self._active[decision.job_id] = active.leaving(self._now, goes_on=not decision.ends)
            elif isinstance(decision, policy.Shrink):
                job = self._active[decision.job_id].at(self._now)
                self._active[job.job_id] = self._begun(replace(job, recalled=decision.slices))
            elif isinstance(decision, policy.Wait):
                self._last_reasons[decision.job_id] = decision.reason
        return has_started

    def _start(self, job: WaitingJob, slices: tuple[Slice, ...]) -> None:
        self.has_run_out |= job.job_id in self._situation.left_out
        assumed = sum(active.is_assumed for active in self._active.values())
        expected = Expected(self._now, num_assumed=self._num_assumed + assumed)
        if job.preparing is not None and self._now == self._began:
            # Slots are free, but it is unknown how long the preparation of the environment will
            # take.
            expected = Expected(None, Reason(PREPARING, job.preparing))
        self._record(job.job_id, expected)
        for part, bundle in by_bundle(slices, job.request.bundle, job.request.roles):
            add(self._free[part.node_id], bundle, -part.num_workers)
        if job.array is not None:
            self._running_of_arrays[job.array.array_id] += 1
        self._active[job.job_id] = self._begun(started(self._as_of_now(job), slices))

    def _begun(self, job: RunningJob) -> ActiveJob:
        return ActiveJob.begun(job, self._now, self._situation)

    def _next_moment(self) -> datetime | None:
        min_run_s = self._snapshot.min_run_s
        moments = [at for each in self._active.values() for at in each.moments(min_run_s)]
        moments += self._classes.not_before()
        moments += reservations.moments(self._snapshot.reservations, self._snapshot.leave_s)
        coming = min((moment for moment in moments if moment > self._now), default=None)
        if coming is None:
            return None
        passed_s = (self._now - self._began).total_seconds()
        step_s = max(FINEST_S, RESOLUTION * passed_s) if passed_s else 0.0
        return max(coming, self._now + timedelta(seconds=step_s))

    def _is_far(self, moment: datetime) -> bool:
        return (moment - self._began).total_seconds() > HORIZON_S

    def _go_to(self, moment: datetime) -> None:
        passed_s = (moment - self._now).total_seconds()
        for active in self._active.values():
            account = active.job.queue, active.job.owner
            used_s = slots.share_of(active.job.request, self._total) * passed_s
            self._used_s[account] = self._used_s.get(account, 0.0) + used_s
        self._now = moment
        for active in list(self._active.values()):
            if active.shrinks_at is not None and active.shrinks_at <= moment < active.ends_at:
                self._shrink(active)
        ended = [name for name, each in self._active.items() if each.ends_at <= moment]
        over = {job_id for job_id in ended if self._leaves(self._active.pop(job_id))}
        self._endings.settle(self._classes, over, {})
        self._classes.begin(self._began, moment)
        self._expire()

    def _expire(self) -> None:
        """Cancel the jobs that can no longer end before their deadlines, and the jobs that depend
        on their success."""
        expired = {}
        for job in self._classes.expired(self._now):
            self._classes.remove(job.job_id)
            if job.start_by is not None:
                why = expired[job.job_id] = times.missed(job.start_by)
                self._record(job.job_id, Expected(None, Reason(DEADLINE_PASSED, why)))
        for job_id, why in self._endings.settle(self._classes, set(expired), expired).items():
            self._record(job_id, Expected(None, Reason("waiting_for_jobs", why)))

    def _leaves(self, active: ActiveJob) -> bool:
        """Release the job's slots. Returns whether the job has ended."""
        job = active.at(self._now)
        for part, bundle in by_bundle(job.slices, job.request.bundle, job.request.roles):
            if part.node_id in self._free:
                self._release(part, bundle)
        if job.job_id in self._array_of:
            self._running_of_arrays[self._array_of[job.job_id]] -= 1
        self._num_assumed += active.is_assumed
        if active.goes_on:
            self._classes.add(waiting_again(job))
        return not active.goes_on

    def _shrink(self, active: ActiveJob) -> None:
        """Release the recalled slots. The job continues with its remaining slots and takes
        longer."""
        job = active.at(self._now)
        slices = list(job.slices)
        for part in job.recalled:
            if part in slices and part.node_id in self._free:
                slices.remove(part)
                self._release(part, job.request.bundle)
        request = job.request.of_size(count(slices))
        slower = job.request.num_ranks / max(1, request.num_ranks)
        smaller = replace(
            job,
            request=request,
            slices=tuple(slices),
            left_s=None if job.left_s is None else job.left_s * slower,
            recalled=(),
            spare=tuple(part for part in job.spare if part in slices),
        )
        self._active[job.job_id] = replace(self._begun(smaller), is_assumed=active.is_assumed)

    def _release(self, part: Slice, bundle: Mapping[str, float]) -> None:
        node = self._node_of[part.node_id]
        free_again(self._free[node.id], node, bundle, part.num_workers)

    def _record(self, job_id: str, expected: Expected) -> None:
        if job_id in self._asked:
            self.starts.setdefault(job_id, expected)

    def _close(self, *, is_cut_off: bool) -> None:
        """Record why the starts of the remaining jobs are unknown."""
        for job_id in self._asked:
            if job_id not in self.starts:
                self.starts[job_id] = self._unstarted(job_id, is_cut_off=is_cut_off)

    def _unstarted(self, job_id: str, *, is_cut_off: bool) -> Expected:
        held = self._held.get(job_id)
        if held is not None:
            return Expected(None, Reason(HELD, held_message(held, job_id)))
        begins_at = self._classes.begins_at(job_id)
        if begins_at is not None:
            reason = Reason(times.BEGINS_AT, times.begins(begins_at))
            return Expected(None, reason, not_before=begins_at)
        if is_cut_off:
            passed_s = (self._now - self._began).total_seconds()
            message = f"the forecast covers only the next {passed_s / 3600:.3g} hours"
            return Expected(None, Reason("beyond_forecast", message), not_before=self._now)
        after = self._classes.after(job_id)
        if after:
            return Expected(None, Reason("waiting_for_jobs", waits_for(after)))
        return Expected(None, self._last_reasons.get(job_id, NOTHING_ENDS))


NOTHING_ENDS = Reason(
    "behind_in_queue", "the jobs ahead of this job can't start, no matter which running jobs end"
)


def _without_shares(node: Node) -> dict[str, float]:
    """Return a node's free resources without the pseudo-resources that count shared GPUs."""
    return {
        name: amount
        for name, amount in node.available_to_us.items()
        if name not in (NUM_GPUS, WHOLE_GPUS)
    }
