"""dray's policy in the simulation: the function that the service's loop calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.scheduler.default_policy import PRIORITY, START
from benchmarks.scheduler.generated.simulator import SimulatedJob
from ray_workers.shared.slices import Slice
from service.domain.scheduling import policy
from service.domain.scheduling.outlook import forecast
from service.domain.scheduling.placement import slots
from service.domain.scheduling.rules import shares
from service.domain.scheduling.rules.queues import DEFAULT, Queue

GPUS_PER_NODE = 8


class DrayPolicy:
    """Calls `plan`. Jobs that save report the share of their steps that they have completed."""

    def __init__(self, num_gpus: int, user_weights: Mapping[str, float] | None = None) -> None:
        self._num_gpus = num_gpus
        self._queues = (Queue(DEFAULT, user_weights=user_weights or {}),)
        number = max(1, num_gpus // GPUS_PER_NODE)
        self._nodes = {
            str(node): {"GPU": float(min(num_gpus, GPUS_PER_NODE))} for node in range(number)
        }
        self._slices: dict[int, tuple[Slice, ...]] = {}
        self._earlier: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self._of_user: defaultdict[str, list[float]] = defaultdict(list)
        self._used = shares.Used()
        self._counted: dict[int, float] = {}

    def ended(self, one: SimulatedJob, now: float) -> None:
        self._count(one, now)
        del self._slices[one.seq]
        if one.finished_s is not None:
            ran_s = one.job.runs_s + one.job.restart_s
            self._earlier[one.job.kind, one.job.num_gpus].append(ran_s)
            self._of_user[one.job.user].append(ran_s)

    def decide(
        self, waiting: Sequence[SimulatedJob], running: Sequence[SimulatedJob], now: float
    ) -> tuple[list[SimulatedJob], list[SimulatedJob]]:
        for one in running:
            self._count(one, now)
        by_name = {one.job.name: one for one in (*waiting, *running)}
        starts, leaves = [], []
        for decision in policy.plan(self._snapshot(waiting, running, now), START):
            if isinstance(decision, policy.Start):
                one = by_name[decision.job_id]
                self._slices[one.seq] = decision.slices
                starts.append(one)
            elif isinstance(decision, policy.Preempt):
                leaves.append(by_name[decision.job_id])
        return starts, leaves

    def _count(self, one: SimulatedJob, now: float) -> None:
        since = max(self._counted.get(one.seq, 0.0), one.began_s or 0.0)
        share = one.job.num_gpus / self._num_gpus
        if now > since:
            self._used.add((DEFAULT, one.job.user), share * (now - since), now)
        self._counted[one.seq] = now

    def _snapshot(
        self, waiting: Sequence[SimulatedJob], running: Sequence[SimulatedJob], now: float
    ) -> policy.Snapshot:
        holders = tuple(
            slots.Holder(one.job.name, self._slices[one.seq], {"GPU": 1.0}) for one in running
        )
        return policy.Snapshot(
            tuple(
                policy.WaitingJob(
                    one.job.name,
                    attempt=0,
                    priority=PRIORITY,
                    seq=one.seq,
                    request=slots.Request(one.job.num_gpus, {"GPU": 1.0}),
                    left_s=self._left_s(one, now),
                    guess_s=self._guess_s(one, now),
                    waited_s=self._waited_s(one, now),
                    yields=one.job.saves,
                    ends_within_s=one.job.limit_s,
                    owner=one.job.user,
                )
                for one in waiting
            ),
            tuple(
                slots.Node(name, total, slots.offered(total, total, slots.held_on(name, holders)))
                for name, total in self._nodes.items()
            ),
            connected=True,
            holders=holders,
            running=tuple(
                policy.RunningJob(
                    one.job.name,
                    priority=PRIORITY,
                    seq=one.seq,
                    request=slots.Request(one.job.num_gpus, {"GPU": 1.0}),
                    slices=self._slices[one.seq],
                    held_s=max(0.0, one.held_s(now) - one.job.restart_s),
                    start_s=one.job.restart_s,
                    waited_s=self._waited_s(one, now),
                    left_s=self._left_s(one, now),
                    guess_s=self._guess_s(one, now),
                    ends_within_s=None
                    if one.job.limit_s is None
                    else max(0.0, one.job.limit_s - one.held_s(now)),
                    yields=one.job.saves,
                    is_leaving=one.is_leaving,
                    owner=one.job.user,
                    num_left=one.num_left,
                )
                for one in running
            ),
            queues=self._queues,
            used_s=self._used.seconds(now),
        )

    def _waited_s(self, one: SimulatedJob, now: float) -> float:
        return now - one.job.submitted_s - one.trained_s(now)

    def _left_s(self, one: SimulatedJob, now: float) -> float | None:
        ran_s, earlier = one.trained_s(now), self._earlier[one.job.kind, one.job.num_gpus]
        done = ran_s / one.job.runs_s if one.job.saves else None
        return forecast.seconds_left(done, ran_s, earlier)

    def _guess_s(self, one: SimulatedJob, now: float) -> float | None:
        others = self._of_user[one.job.user]
        if one.job.saves:
            return None
        return forecast.guessed_s(one.trained_s(now), others[-100:], one.job.limit_s)
