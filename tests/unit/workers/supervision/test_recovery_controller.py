"""A group that recovers gets the time that it needs, until it is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.contracts import AttemptSpec, FrameKind, Grant, Recall, Slice
from ray_workers.shared.frames import LossKind
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.processes.machine_pace import MachinePace
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.node_clients import CodeUnavailable
from ray_workers.supervision.recovery import RecoveryController, least_ranks
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.recovery_rules import RecoveryState
from ray_workers.supervision.rules.serving_ranks import irreplaceable_ranks, serving_ranks
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import SlotsUnavailable
from tests.unit.workers.supervision.observed import Reports, observation
from tests.wire import attempt_spec

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
SPEC = attempt_spec(
    spec={"recipe": "image_classification", "resources": {"num_workers": 2}},
    slices=(Slice("n", 2),),
    recovers_in_place=True,
)


QUICK = Timings(
    look_period_s=0.001,
    quick_look_period_s=0.001,
    ask_again_pause_s=0.001,
    give_back_pause_s=0.001,
)


class Nodes:
    """Observations that a test sets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.killed: list[int] = []
        self.num_observed = 0

    async def know(self, node_ids: Any) -> None:
        pass

    async def observations(self) -> list[Any]:
        self.num_observed += 1
        return self.seen

    async def errors(self) -> dict[int, Any]:
        return {}

    async def stacks(self, seats: Any) -> dict[int, str]:
        return {}

    async def signal(self, node_id: str, seat: int, number: int) -> bool:
        self.killed.append(seat)
        return True

    def forget(self, node_ids: Any) -> None:
        assert not node_ids


ON_M = (Slice("m", 1),)


class SlowGroup:
    """A group whose rank 1 of two is lost; its replacement takes as long as the test wants."""

    def __init__(self) -> None:
        self.lost = SimpleNamespace(seat=1, incarnation=0, rank=1, end=RankExit.of(1, -9))
        survivor = SimpleNamespace(
            seat=0, incarnation=0, rank=0, end=RankExit.of(0, -9), node_id="n"
        )
        self.running = [survivor]
        self.placed = [survivor, self.lost]
        self.slots: list[Any] = []
        self.lost_with_nodes: list[Any] = []
        self.asked = asyncio.Event()
        self.replaced = asyncio.Event()
        self.announced: list[int] = []
        self.batch_sizes: list[int | None] = []
        self.adds: asyncio.Event | None = None
        """What new slots wait for; None if Ray has none to give."""

    def ended(self) -> list[RankExit]:
        return [member.end for member in self.placed if member not in self.running]

    async def lose_nodes(self, node_ids: Any) -> list[Any]:
        return self.lost_with_nodes

    async def replace(self, members: Any, round_number: int) -> None:
        self.asked.set()
        await self.replaced.wait()
        self.running = self.placed

    async def announce(self, round_number: int, batch_size: int | None) -> None:
        self.announced.append(round_number)
        self.batch_sizes.append(batch_size)

    async def add(self, slices: Any, round_number: int) -> None:
        if self.adds is None:
            raise SlotsUnavailable
        await self.adds.wait()

    async def store_is_lost(self) -> None:
        await asyncio.Event().wait()


class Recovering:
    """A group that has just lost rank 1, and the monitor that watches it."""

    def __init__(
        self, slowness: float = 1.0, spec: AttemptSpec = SPEC, group: SlowGroup | None = None
    ) -> None:
        self.now = 0.0
        self.pace = MachinePace(lambda: self.now)
        self.pace.learn(slowness)
        self.group = SlowGroup() if group is None else group
        self.nodes, self.reports = Nodes(), Reports()
        self.prepared: list[list[str]] = []
        self.unprepared: Exception | None = None
        for member in self.group.placed:
            member.exit = asyncio.get_running_loop().create_future()
        parts: Any = (spec, self.group, self.nodes, self.reports)
        self.recovery = RecoveryController(*parts, lambda: None, self.prepare, self.pace, QUICK)
        drills: Any = FaultInjector(parts[-1])
        self._monitor = GroupMonitor(*parts, drills, self.recovery, self.pace, QUICK)

    async def prepare(self, node_ids: Any) -> None:
        self.prepared.append(list(node_ids))
        if self.unprepared is not None:
            raise self.unprepared

    async def recover(self) -> bool:
        lost: Any = self.group.lost
        return await self.recovery.recover([lost], kind=LossKind.KILLED, began_at=5.0)

    def watch(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._monitor.watch())

    async def until(self, probe: Callable[[], bool]) -> None:
        """Time passes until it is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not probe():
                self.now += 0.1
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("slowness", [1.0, 20.0])
async def test_the_time_of_a_recovery_begins_when_the_replacement_is_there(slowness: float) -> None:
    job = Recovering(slowness)
    recovering = asyncio.ensure_future(job.recover())
    await asyncio.wait_for(job.group.asked.wait(), PATIENCE_S)
    assert (job.recovery.state.round, job.recovery.state.announced_at) == (1, None)
    job.now += slowness
    job.group.replaced.set()
    assert await asyncio.wait_for(recovering, PATIENCE_S)
    assert job.group.announced == [1]
    assert job.recovery.state.announced_at == pytest.approx(1.0)
    assert job.pace.overrun == 1.0
    job.now += slowness * (QUICK.whole_limit_s + 1.0)
    outcome = await asyncio.wait_for(job.watch(), PATIENCE_S)
    assert "not whole again" in outcome.message
    assert job.pace.overrun == slowness


async def test_a_round_that_could_not_be_formed_is_followed_by_another() -> None:
    job = Recovering()
    job.group.replaced.set()
    job.nodes.seen = [stands_by(0)]
    assert await job.recover()
    watching = job.watch()
    job.nodes.seen = [stands_by(0), stands_by(1)]
    await job.until(lambda: job.group.announced == [1, 2])
    job.nodes.seen = [observation(r, round_number=2, resumed_step=9, first_at=8.0) for r in (0, 1)]
    await job.until(lambda: job.recovery.state.regrouping is None)
    assert job.group.announced == [1, 2]
    assert job.recovery.state.without_a_step == 0
    (report,) = job.reports.of(FrameKind.REGROUPED)
    assert (report["ranks"], report["steps_lost"], report["recovery_s"]) == ([1], 1, 3.0)

    job.nodes.seen = [stands_by(0, round_number=2), stands_by(1, round_number=2)]
    await job.until(watching.done)
    assert "could not be brought together again" in watching.result().message
    assert job.group.announced == [1, 2, 3, 4, 5]


async def test_a_rank_that_did_not_notice_that_its_connection_broke_is_ended() -> None:
    job = Recovering()
    job.group.replaced.set()
    job.nodes.seen = [observation(0, RankPhase.EXCHANGE)]
    assert await job.recover()
    watching = job.watch()
    newcomer = observation(1, RankPhase.JOINING, 10.0, round_number=1, step=0)
    job.nodes.seen = [observation(0, RankPhase.EXCHANGE, 100.0), newcomer]
    await job.until(lambda: job.nodes.killed == [0])
    job.nodes.seen = [newcomer]
    job.group.running = job.group.placed[1:]
    job.group.placed[0].exit.set_result(job.group.placed[0].end)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None, "the only one that held the state"
    assert job.recovery.state.round == 1


async def test_without_the_workers_of_a_lost_node_parameter_servers_do_not_go_on() -> None:
    """The others would be renumbered, and a worker be taken for a server."""
    sync = {"kind": "parameter_server", "servers": 1}
    for document, recovers in ((SPEC.spec, True), ({**SPEC.spec, "sync": sync}, False)):
        resources = {"num_workers": 3}
        job = Recovering(spec=replace(SPEC, spec={**document, "resources": resources}))
        job.group.lost_with_nodes = [job.group.lost]
        job.group.replaced.set()
        assert await job.recover() is recovers


async def test_the_rounds_of_silos_go_on_without_one_whose_node_is_lost() -> None:
    """As many as make the quorum, and the aggregator."""
    silos = {"silos": [{"name": "north"}, {"name": "south"}, {"name": "west"}], "quorum": 1}
    document = {**SPEC.spec, "federated": silos}
    assert least_ranks(replace(SPEC, spec=document)) == 2
    assert least_ranks(replace(SPEC, spec={**document, "federated": {**silos, "quorum": 3}})) == 4
    assert least_ranks(SPEC) == SPEC.world_size
    job = Recovering(spec=replace(SPEC, spec=document))
    job.group.lost_with_nodes = [job.group.lost]
    job.group.replaced.set()
    assert await job.recover()
    assert job.group.announced == [1]
    without = {**document, "federated": {**silos, "quorum": 2}}
    job = Recovering(spec=replace(SPEC, spec=without))
    job.group.lost_with_nodes = [job.group.lost]
    job.group.replaced.set()
    assert not await job.recover(), "no quorum is left, and no other node has the data"


async def test_a_silo_that_is_replaced_costs_no_step() -> None:
    """What it has sent of the open round counts, though the next one begins with that round."""
    document = {**SPEC.spec, "federated": {"silos": [{"name": "north"}], "quorum": None}}
    job = Recovering(spec=replace(SPEC, spec=document))
    job.group.replaced.set()
    job.nodes.seen = [observation(r, round_number=0, step=10) for r in (0, 1)]
    assert await job.recover()
    report = job.recovery.confirm([observation(1, round_number=1, resumed_step=9, first_at=8.0)])
    assert report is not None
    assert (report.step, report.steps_lost) == (9, 0)


async def test_a_lost_rank_that_comes_back_when_all_is_done_shows_the_end() -> None:
    """The others, whose first step was long before the loss, say nothing of the recovery."""
    document = {**SPEC.spec, "federated": {"silos": [{"name": "north"}], "quorum": None}}
    job = Recovering(spec=replace(SPEC, spec=document))
    job.group.replaced.set()
    job.nodes.seen = [observation(r, round_number=0, step=10) for r in (0, 1)]
    assert await job.recover()
    late = observation(1, RankPhase.FINISH, round_number=1, resumed_step=60, step=60, first_at=0.0)
    report = job.recovery.confirm([observation(0, step=60, first_at=4.0), late])
    assert report is not None
    assert (report.step, report.steps_lost) == (60, 0)
    assert report.recovery_s is not None
    assert report.recovery_s > 0.0


async def test_an_aggregator_of_silos_is_not_replaced() -> None:
    """It alone has the weights: the next attempt goes on from its checkpoint."""
    document = {**SPEC.spec, "federated": {"silos": [{"name": "north"}], "quorum": None}}
    assert irreplaceable_ranks(document) == {0}
    assert serving_ranks(document) == set(), "the job is over when all have ended"
    job = Recovering(spec=replace(SPEC, spec=document))
    job.group.lost.rank, job.group.lost.end = 0, RankExit.of(0, -9)
    job.group.replaced.set()
    assert not await job.recover()


async def test_slots_that_do_not_come_are_not_taken_in() -> None:
    """And the grant is answered, once, so that the service gives its slots to other jobs."""
    job = Recovering()
    for number in (1, 1, 2):
        job.recovery.grow(Grant(number, ON_M, None))
    assert job.recovery.state.grants == (Grant(1, ON_M, None), Grant(2, ON_M, None))
    watching = job.watch()
    await job.until(lambda: len(job.reports.of(FrameKind.RESIZED)) == 2)
    answers = [(body["grants"], body["lacking"]) for body in job.reports.of(FrameKind.RESIZED)]
    assert answers == [(1, 1), (2, 1)]
    await job.until(lambda: job.recovery.state == RecoveryState())
    watching.cancel()


async def test_a_worker_that_never_starts_is_not_waited_for_without_end() -> None:
    """Such as one whose rank actor is stopped: others wait for the answer to the grant."""
    job = Recovering()
    job.group.adds = asyncio.Event()
    job.recovery.grow(Grant(1, ON_M, None))
    watching = job.watch()
    await job.until(lambda: bool(job.reports.of(FrameKind.RESIZED)))
    (answer,) = job.reports.of(FrameKind.RESIZED)
    assert answer["grants"] == 1
    assert "could not take more slots in (it took more than 40 s)" in answer["message"]
    assert not job.recovery.state.is_taking_in
    watching.cancel()


async def test_a_node_has_the_code_before_workers_start_there() -> None:
    job = Recovering()
    job.unprepared = CodeUnavailable("the code can't be put on the node m: no space left")
    job.recovery.grow(Grant(1, ON_M, None))
    watching = job.watch()
    await job.until(lambda: bool(job.reports.of(FrameKind.RESIZED)))
    (answer,) = job.reports.of(FrameKind.RESIZED)
    assert "could not take more slots in (the code can't be put on the node m" in answer["message"]
    assert job.prepared == [["m"]]
    job.unprepared, job.group.adds = None, asyncio.Event()
    job.recovery.grow(Grant(2, ON_M, None))
    await job.until(lambda: len(job.reports.of(FrameKind.RESIZED)) == 2)
    assert job.prepared == [["m"], ["m"]]
    watching.cancel()


async def test_a_late_answer_of_the_node_that_holds_the_state_is_waited_for() -> None:
    job = Recovering()
    job.group.replaced.set()
    ended = observation(1, step=7)
    job.nodes.seen = [ended]
    recovering = asyncio.ensure_future(job.recover())
    await job.until(lambda: job.nodes.num_observed > 2)
    assert not recovering.done()
    job.nodes.seen = [ended, observation(0, step=7)]
    assert await asyncio.wait_for(recovering, PATIENCE_S)


@pytest.mark.parametrize("slowness", [1.0, 20.0])
async def test_a_node_that_does_not_say_who_holds_the_state_is_excused_by_its_pace(
    slowness: float,
) -> None:
    job = Recovering(slowness)
    job.nodes.seen = [observation(1, step=7)]
    recovering = asyncio.ensure_future(job.recover())
    await job.until(recovering.done)
    assert not recovering.result()
    assert job.pace.overrun == slowness


def stands_by(rank: int, *, round_number: int = 0, incarnation: int = 0) -> Any:
    return observation(
        *(rank, RankPhase.STAND_BY),
        round_number=round_number,
        incarnation=incarnation,
        first_at=0.0,
    )


GOSSIP = attempt_spec(
    spec={
        "recipe": "image_classification",
        "resources": {"num_workers": 2},
        "sync": {"kind": "gossip"},
    },
    slices=(Slice("n", 2),),
    recovers_in_place=True,
)


class GossipGroup(SlowGroup):
    """A group that has lost rank 0, which need not be there for the other."""

    def __init__(self) -> None:
        super().__init__()
        survivor, lost = self.members = list(self.placed)
        survivor.__dict__.update(is_placed=True, is_running=True, seat=1, rank=1)
        lost.__dict__.update(is_placed=True, is_running=False, seat=0, rank=0)
        lost.end = RankExit.of(0, -9)
        self.failures: list[Exception] = []
        """Of the next starts."""
        self.sizes: list[list[int]] = []
        """The seats of each round, by rank."""

    @property
    def placed(self) -> list[Any]:
        there = [m for m in self.members if m.is_placed] if hasattr(self, "members") else self._two
        return sorted(there, key=lambda member: member.rank)

    @placed.setter
    def placed(self, two: list[Any]) -> None:
        self._two = two

    @property
    def running(self) -> list[Any]:
        return [member for member in self.placed if member.is_running]

    @running.setter
    def running(self, _: Any) -> None:
        pass

    async def lose_nodes(self, node_ids: Any) -> list[Any]:
        gone, self.lost_with_nodes = self.lost_with_nodes, []
        self.members = [member for member in self.members if member not in gone]
        return gone

    async def replace(self, members: Any, round_number: int) -> None:
        self.asked.set()
        if self.failures:
            raise self.failures.pop()
        await self.replaced.wait()
        for member in members:
            member.is_running, member.incarnation = True, round_number
            member.exit = asyncio.get_running_loop().create_future()

    async def announce(self, round_number: int, batch_size: int | None) -> None:
        await super().announce(round_number, batch_size)
        self.sizes.append([member.seat for member in self.running])
        for rank, member in enumerate(self.running):
            member.rank = rank


async def test_of_gossip_the_others_go_on_at_once_and_take_the_replacement_in_as_the_last() -> None:
    group = GossipGroup()
    group.failures = [ForkFailed("not now")]
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(1)]
    assert await job.recover(), "its replacement is not there yet"
    assert group.sizes == [[1]]
    (told,) = job.reports.of(FrameKind.REGROUPING)
    assert told["message"] == "rank 0 was killed by SIGKILL; the others go on"
    watching = job.watch()
    job.nodes.seen = [observation(1, round_number=1, first_at=6.5)]
    await job.until(lambda: job.recovery.state.regrouping is None)
    (report,) = job.reports.of(FrameKind.REGROUPED)
    assert (report["ranks"], report["world_size"], report["recovery_s"]) == ([0], 1, 1.5)
    await asyncio.wait_for(group.asked.wait(), PATIENCE_S)
    group.replaced.set()
    job.nodes.seen.append(stands_by(0, incarnation=1))
    await job.until(lambda: len(group.sizes) == 2)
    assert group.sizes == [[1], [1, 0]]
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert (size["world_size"], size["lacking"]) == (2, 0)
    # The end of a process that has just got its place is not missed.
    lost = group.members[1]
    lost.is_running, lost.end = False, RankExit.of(1, 1)
    lost.exit.set_result(lost.end)
    await job.until(watching.done)
    assert watching.result() is None


async def test_of_gossip_the_others_go_on_where_no_replacement_can_be_started() -> None:
    group = GossipGroup()
    group.failures = [ForkFailed("no memory")] * 3
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(1)]
    assert await job.recover()
    await until(lambda: bool(job.reports.of(FrameKind.RESIZED)))
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert "goes on without a lost worker, for which no process can be started" in size["message"]
    assert group.sizes == [[1]]


async def test_of_gossip_slots_for_the_workers_of_a_lost_node_are_asked_for_a_while() -> None:
    """No longer: they are held back from the whole queue, and the others train."""
    group = GossipGroup()
    group.lost_with_nodes = [group.lost]
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(1)]
    assert await job.recover()
    assert group.sizes == [[1]]
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert (size["world_size"], size["lacking"]) == (1, 1)
    await job.until(lambda: len(job.reports.of(FrameKind.RESIZED)) == 2)
    assert job.now > QUICK.stand_by_limit_s
    assert job.reports.of(FrameKind.RESIZED)[-1]["lacking"] == 0
    assert not group.asked.is_set(), "its slot is gone"
    await job.recovery.stop()


class SpreadGroup(SlowGroup):
    """A whole group of three workers in two slices."""

    def __init__(self) -> None:
        super().__init__()
        parts = (Slice("n", 2), Slice("m", 1))
        self.slots = [SimpleNamespace(part=p, is_held=True, is_going=False) for p in parts]
        self.members = [
            SimpleNamespace(seat=seat, incarnation=0, slots=self.slots[seat // 2], is_placed=True)
            for seat in range(3)
        ]
        self.events: list[Any] = []
        self.stuck = asyncio.Event()
        """Whether processes that were ended are gone."""
        self.stuck.set()

    @property
    def placed(self) -> list[Any]:
        return [member for member in self.members if member.is_placed]

    @placed.setter
    def placed(self, _: Any) -> None:
        pass

    @property
    def running(self) -> list[Any]:
        return self.placed

    @running.setter
    def running(self, _: Any) -> None:
        pass

    async def announce(self, round_number: int, batch_size: int | None) -> None:
        self.batch_sizes.append(batch_size)
        self.events.append(("announced to", [member.seat for member in self.running]))

    async def give_back(self, slots: Any) -> None:
        self.events.append(("ended in", [each.part for each in slots]))
        for each in slots:
            each.is_going = True
        if self.stuck.is_set():
            await self.give_back_rest()

    async def give_back_rest(self) -> bool:
        await self.stuck.wait()
        self.slots = [each for each in self.slots if not each.is_going]
        return True


def spread(
    seen: Sequence[Any] = (), **spec: Any
) -> tuple[RecoveryController, SpreadGroup, Reports]:
    """seen: observations of the ranks."""
    group, reports, nodes = SpreadGroup(), Reports(), Nodes()
    nodes.seen = list(seen)
    slices = tuple(each.part for each in group.slots)
    elastic = replace(SPEC, **{"slices": slices, "min_workers": 1, **spec})

    async def prepare(node_ids: Any) -> None:
        raise AssertionError("nothing starts")

    parts: Any = (elastic, group, nodes, reports, lambda: None, prepare)
    return RecoveryController(*parts, MachinePace(lambda: 0.0), QUICK), group, reports


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)


async def settled(reports: Reports) -> Any:
    await until(lambda: bool(reports.all))
    return reports.all[-1]


async def test_slots_that_are_asked_back_go_once_the_others_know_of_a_round_without_them() -> None:
    recovery, group, reports = spread()
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    recovery.recall(Recall(1, ON_M, None))
    kind, body = await settled(reports)
    assert kind is FrameKind.RESIZED
    assert group.events == [("announced to", [2]), ("ended in", [Slice("n", 2)])]
    assert (body["world_size"], body["grants"], body["lacking"]) == (1, 1, 0)
    assert body["slices"] == [{"node_id": "m", "num_workers": 1}]
    assert recovery.state.regrouping is not None


async def test_the_batch_of_a_recall_is_announced_with_its_round_and_all_later_ones() -> None:
    recovery, group, reports = spread([observation(seat) for seat in range(3)])
    recovery.recall(Recall(1, ON_M, 128))
    await settled(reports)
    assert group.batch_sizes == [128]
    recovery.recall(Recall(2, (Slice("n", 2),), 64))
    await until(lambda: len(reports.all) == 2)
    assert group.batch_sizes == [128], "it keeps its slots, and its batch with them"
    group.replaced.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await recovery.recover([], kind=LossKind.LOST, began_at=0.0)
    assert group.batch_sizes == [128, 128]


async def test_a_grant_without_slots_brings_the_group_together_with_another_batch() -> None:
    recovery, group, reports = spread([observation(seat) for seat in range(3)])
    grant = Grant(1, (), 256)
    recovery.grow(grant)
    recovery.take_in(grant)
    _, body = await settled(reports)
    assert (body["world_size"], body["grants"]) == (3, 1)
    assert body["message"] == "goes on with another batch: 3 workers"
    await until(lambda: bool(group.events))
    assert group.events == [("announced to", [0, 1, 2])]
    assert group.batch_sizes == [256]
    await recovery.stop()


async def test_slots_whose_processes_are_not_gone_stay_the_groups_until_they_are() -> None:
    recovery, group, reports = spread()
    group.stuck.clear()
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    body = (await settled(reports))[1]
    both = [{"node_id": "n", "num_workers": 2}, {"node_id": "m", "num_workers": 1}]
    assert (body["world_size"], body["slices"]) == (1, both)
    recovery.recall(Recall(2, (Slice("n", 2),), None))
    await until(lambda: len(reports.all) == 2)
    assert reports.all[-1][1]["slices"] == both, "nothing is asked of those that go already"
    group.stuck.set()
    await until(lambda: len(reports.all) == 3)
    assert reports.all[-1][1]["slices"] == both[1:]
    await recovery.stop()


async def test_a_group_that_stops_looks_no_longer_after_slots_that_are_going() -> None:
    recovery, group, reports = spread()
    group.stuck.clear()
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    await settled(reports)
    await recovery.stop()
    assert recovery._giving_rest is not None
    assert recovery._giving_rest.done()


SCRIPT = {"spec": {"script": {"entrypoint": "train.py"}, "resources": {"num_workers": 3}}}


async def test_a_script_gives_slots_back_once_it_is_prepared() -> None:
    seen = [observation(seat, is_prepared=True) for seat in range(3)]
    recovery, group, reports = spread(seen, **SCRIPT)
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    await settled(reports)
    assert group.events[-1] == ("ended in", [Slice("n", 2)])


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"recovers_in_place": False}, Slice("m", 1)),
        ({}, Slice("n", 1)),
        ({"min_workers": 3}, Slice("m", 1)),
        (SCRIPT, Slice("m", 1)),
        ({**SCRIPT, "seen": [observation(seat) for seat in range(3)]}, Slice("m", 1)),
        ({"seen": [observation(9)] + [observation(s, step=0) for s in range(3)]}, Slice("m", 1)),
    ],
)
async def test_a_group_that_can_not_give_slots_back_says_what_it_holds(
    changes: dict[str, Any], asked: Slice
) -> None:
    recovery, group, reports = spread(**changes)
    recovery.recall(Recall(4, (asked,), None))
    _, body = await settled(reports)
    assert (body["world_size"], body["grants"]) == (3, 4)
    assert not group.events
