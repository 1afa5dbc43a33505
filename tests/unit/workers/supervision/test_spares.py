"""Spares take the ranks of lost workers, and are themselves replaced without the group noticing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.node import placement_groups
from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.commands import Grant, Recall
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.slices import Slice
from ray_workers.supervision.member import Member
from ray_workers.supervision.slots import Slots
from tests.unit.workers.supervision.observed import observation
from tests.unit.workers.supervision.recovering import (
    PATIENCE_S,
    QUICK,
    Recovering,
    SlowGroup,
    ends,
    member_of,
    of,
    stands_by,
    until,
)

DOCUMENT = {
    "recipe": "image_classification",
    "resources": {"num_workers": 2},
    "elastic": {"spares": 1},
}
SPARE = 2
"""The index of the spare of two ranks."""


class GroupWithSpare(SlowGroup):
    """Ranks on node `n` and a spare on node `m`."""

    def __init__(self, num_ranks: int = 2) -> None:
        super().__init__(num_ranks, lost=None)
        spare = member_of(num_ranks, "m")
        spare.is_placed, spare.is_spare, spare.exit = False, True, None
        self.members.append(spare)
        for member in self.members:
            member.slots.group = object()  # type: ignore[assignment]
        self.slots[:] = [member.slots for member in self.members]
        self.started: list[tuple[int, int]] = []
        """(index, round) of each process that was started."""
        self.failures = 0
        self.released: list[str] = []
        """The nodes of released slots."""
        self.replaced.set()

    @property
    def spare(self) -> Member:
        (spare,) = self.spares
        return spare

    async def replace(self, members: Sequence[Member], round_number: int) -> None:
        if self.failures:
            self.failures -= 1
            raise ForkFailed("it did not start")
        for member in members:
            member.incarnation = max(round_number, member.incarnation + 1)
            self.started.append((member.index, member.incarnation))
        await super().replace(members, round_number)

    async def add(self, slices: Sequence[Slice], round_number: int) -> list[Member]:
        added = []
        for part in slices:
            added.append(member_of(len(self.members) + len(added) + 10, part.node_id))
            added[-1].slots.group = object()  # type: ignore[assignment]
            added[-1].is_placed, added[-1].incarnation = False, round_number
        self.members += added
        self.slots[:] = [member.slots for member in self.members]
        return added

    async def release_slots(self, slots: Sequence[Slots]) -> None:
        self.released += [each.part.node_id for each in slots]
        self.members = [member for member in self.members if member.slots not in slots]
        self.slots[:] = [each for each in self.slots if each not in slots]

    async def release_rest(self) -> bool:
        return False


class WithSpare(Recovering):
    """A group with a spare, and the observations of both."""

    def __init__(self, *, is_ready: bool = True, slowness: float = 1.0, **more: Any) -> None:
        spec = replace(of({**DOCUMENT, **more}), slices=(Slice("n", 2), Slice("m", 1)))
        self.standing = GroupWithSpare()
        super().__init__(slowness, spec=spec, group=self.standing)
        self.nodes.seen = [observation(0), observation(1)]
        if is_ready:
            self.make_ready()

    def make_ready(self, **more: Any) -> None:
        """The process of the spare waits for a rank."""
        spare = self.standing.spare
        if not spare.is_running:
            spare.incarnation += 1
            spare.exit = asyncio.get_running_loop().create_future()
        spare.is_ready = True
        self.shows(more)

    def shows(self, spare: dict[str, Any]) -> None:
        """The node of the spare reports it with this page."""
        member = self.standing.spare
        page = {"phase": RankPhase.STANDBY, "step": 0, "first_at": 0.0, **spare}
        seen = observation(member.index, incarnation=member.incarnation, **page)
        self.nodes.seen = [one for one in self.nodes.seen if one.rank != member.index] + [seen]

    def look(self) -> None:
        self.spares.look(self.nodes.seen)

    async def loses(self, rank: int) -> bool:
        lost = self.group.members[rank]
        ends(lost)
        async with asyncio.timeout(PATIENCE_S):
            return await self.recover(lost)

    @property
    def told(self) -> list[str]:
        return [body["message"] for body in self.reports.of(FrameKind.SPARES)]


async def test_a_spare_takes_the_rank_of_a_lost_worker_without_another_process() -> None:
    job = WithSpare()
    assert await job.loses(1)
    group = job.standing
    assert group.started == []
    assert group.indices == [[0, SPARE]], "the spare has the number of the lost rank"
    assert (group.spare.index, group.spare.is_ready) == (1, False)
    (lost,) = job.reports.of(FrameKind.REGROUPING)
    assert "; a spare takes its place, and the other ranks keep their state" in lost["message"]
    assert job.recovery.workers_added.is_set(), "the exit of the spare is awaited from now on"


async def test_a_worker_that_was_replaced_by_a_spare_is_the_next_spare_once_the_group_trains() -> (
    None
):
    job = WithSpare()
    assert await job.loses(1)
    job.look()
    assert job.standing.started == [], "a process that starts would slow down the recovery"
    job.recovery.confirm([])
    job.look()
    await until(lambda: job.standing.started == [(1, 2)])
    job.shows({})
    await until(lambda: job.standing.spare.is_ready)
    assert job.told == ["a spare is ready on node n"]
    job.nodes.seen.append(observation(SPARE, incarnation=1, round_number=1))
    assert await job.loses(0)
    assert job.standing.indices[-1] == [1, SPARE]
    await job.recovery.stop()


@pytest.mark.parametrize(
    "spare",
    [
        {"state": "T"},
        {"age_s": QUICK.spare_limit_s + 1.0},
        {"phase": RankPhase.JOINING},
        {"state": ""},
    ],
    ids=["suspended", "hanging", "starting", "dead"],
)
async def test_a_spare_that_does_not_respond_gets_no_rank(spare: dict[str, Any]) -> None:
    job = WithSpare()
    job.shows(spare)
    assert await job.loses(1)
    assert job.standing.started == [(1, 1)]
    assert job.standing.indices == [[0, 1]]


async def test_a_spare_on_a_node_that_does_not_answer_gets_no_rank() -> None:
    job = WithSpare()
    job.nodes.seen = job.nodes.seen[:2]
    assert await job.loses(1)
    assert job.standing.indices == [[0, 1]]


async def test_a_spare_and_a_rank_that_are_killed_together_are_replaced() -> None:
    job = WithSpare()
    ends(job.standing.spare)
    assert await job.loses(1)
    assert (job.standing.started, job.standing.indices) == ([(1, 1)], [[0, 1]])
    job.recovery.confirm([])
    job.look()
    await until(lambda: (SPARE, 2) in job.standing.started)
    assert job.told == ["the spare on node m was killed by SIGKILL, and is replaced"]
    await job.recovery.stop()


async def test_a_spare_that_is_killed_while_it_takes_over_is_a_lost_rank() -> None:
    job = WithSpare()
    assert await job.loses(1)
    taker = job.group.placed[1]
    assert taker.index == SPARE
    ends(taker)
    assert await job.recover(taker)
    assert job.standing.indices == [[0, SPARE], [0, SPARE]]
    assert job.standing.started == [(SPARE, 2)]


@pytest.mark.parametrize("waits", ["STANDBY", "JOINING"])
async def test_a_suspended_spare_is_killed_within_the_limit_and_replaced(waits: str) -> None:
    job = WithSpare()
    phase = RankPhase[waits]
    job.standing.spare.is_ready = phase is RankPhase.STANDBY
    job.shows({"state": "T", "age_s": QUICK.stopped_hang_s - 0.1, "phase": phase})
    job.look()
    assert job.nodes.killed == []
    job.shows({"state": "T", "age_s": QUICK.stopped_hang_s + 0.1, "phase": phase})
    job.look()
    job.look()
    await until(lambda: bool(job.nodes.killed))
    assert job.nodes.killed == [SPARE]
    assert job.told == ["the spare on node m did not respond, and is replaced"]
    ends(job.standing.spare)
    job.look()
    await until(lambda: job.standing.started == [(SPARE, 2)])
    assert job.group.announced == [], "the group does not notice"
    await job.recovery.stop()


async def test_a_spare_that_reads_data_for_a_long_time_is_not_killed() -> None:
    job = WithSpare()
    job.standing.spare.is_ready = False
    job.shows({"phase": RankPhase.JOINING, "age_s": 60.0})
    job.look()
    await asyncio.sleep(0)
    assert (job.nodes.killed, job.standing.started) == ([], [])


async def test_spares_of_a_slow_machine_have_more_time() -> None:
    job = WithSpare(slowness=4.0)
    job.shows({"state": "T", "age_s": 2 * QUICK.stopped_hang_s})
    job.look()
    await asyncio.sleep(0)
    assert job.nodes.killed == []


async def test_a_spare_starts_once_the_group_trains() -> None:
    job = WithSpare(is_ready=False)
    job.nodes.seen = [observation(0, first_at=0.0), observation(1, first_at=0.0)]
    job.look()
    await asyncio.sleep(0)
    assert job.standing.started == []
    job.nodes.seen = [observation(0), observation(1)]
    job.look()
    await until(lambda: job.standing.started == [(SPARE, 1)])
    await job.recovery.stop()


async def test_a_spare_of_a_script_starts_once_the_script_has_called_prepare() -> None:
    """Before, it is unknown whether a process of the script would wait for a rank."""
    script = {"recipe": None, "script": {"entrypoint": "train.py"}}
    job = WithSpare(is_ready=False, **script)
    job.look()
    await asyncio.sleep(0)
    assert job.standing.started == []
    job.nodes.seen = [observation(0, is_prepared=True), observation(1)]
    job.look()
    await until(lambda: job.standing.started == [(SPARE, 1)])
    await job.recovery.stop()


async def test_a_spare_that_can_not_be_started_is_tried_again_later_and_reported_once() -> None:
    job = WithSpare(is_ready=False)
    group = job.standing
    group.failures = 2
    job.look()
    await until(lambda: len(job.told) == 1)
    assert "could not be started; the group trains without it" in job.told[0]
    job.look()
    await asyncio.sleep(0.01)
    assert group.failures == 1, "it waits before it tries again"
    job.now += 6.0
    job.look()
    await until(lambda: group.failures == 0)
    await asyncio.sleep(0.01)
    job.now += 11.0
    job.look()
    await until(lambda: group.started == [(SPARE, 1)])
    assert len(job.told) == 1
    assert job.group.announced == []
    await job.recovery.stop()


async def test_a_spare_that_runs_but_does_not_get_ready_in_time_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = WithSpare(is_ready=False)

    async def never(members: Sequence[Member]) -> None:
        raise TimeoutError

    monkeypatch.setattr(job.spares._preparation, "until_ready", never)
    job.look()
    await until(lambda: len(job.told) == 1)
    assert "dray tries again" in job.told[0]
    job.shows({"phase": RankPhase.JOINING})
    job.look()
    await asyncio.sleep(0)
    assert job.standing.started == [(SPARE, 1)], "it gets more time first"
    job.now += 6.0
    job.look()
    await until(lambda: job.standing.started == [(SPARE, 1), (SPARE, 2)])
    await job.recovery.stop()


async def test_slots_are_released_from_the_spare_first_and_the_round_goes_on() -> None:
    job = WithSpare()
    job.standing.slots.reverse()  # the spare's slot is not the last one
    for each in job.standing.slots:
        each.part = Slice("n", 1)
    job.resizing.recall(Recall(1, (Slice("n", 1),), None))
    await until(lambda: bool(job.reports.all))
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert size["message"] == "shrinks by 1 spare: 2 workers"
    assert (size["world_size"], len(size["slices"]), size["grants"]) == (2, 2, 1)
    assert (job.standing.spares, job.group.announced) == ([], [])


async def test_a_spare_takes_the_rank_of_a_worker_whose_slot_is_recalled() -> None:
    job = WithSpare()
    job.standing.members[1].slots.part = Slice("o", 1)
    job.resizing.recall(Recall(1, (Slice("o", 1),), None))
    await until(lambda: bool(job.reports.all))
    assert (job.standing.indices, job.standing.released) == ([[0, SPARE]], ["o"])
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert (size["world_size"], size["message"]) == (2, "shrinks by 1 spare: 2 workers")


@pytest.mark.parametrize("how", ["lost", "recalled"])
async def test_a_spare_that_took_a_rank_or_was_released_is_not_reported_as_ready(how: str) -> None:
    job = WithSpare()
    job.standing.spare.is_ready = False
    job.look()
    assert [body["ready"] for body in job.reports.of(FrameKind.SPARES)] == [1]
    if how == "lost":
        assert await job.loses(1)
    else:
        job.resizing.recall(Recall(1, (Slice("m", 1),), None))
        await until(lambda: bool(job.reports.of(FrameKind.RESIZED)))
    job.look()
    job.look()
    assert [body["ready"] for body in job.reports.of(FrameKind.SPARES)] == [1, 0]


async def test_a_slot_that_is_granted_to_a_complete_group_is_a_spares() -> None:
    job = WithSpare()
    group = job.standing
    await group.release_slots([group.spare.slots])
    assert await grants(job, "m")
    assert (len(group.placed), [spare.node_id for spare in group.spares]) == (2, ["m"])
    assert group.announced == [], "the ranks go on"
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert size["message"] == "adds 1 spare: 2 workers and 1 spare"
    spare = group.spare
    job.nodes.seen.append(stands_by(spare.index, incarnation=spare.incarnation))
    job.look()
    assert job.told == ["a spare is ready on node m"]
    await job.recovery.stop()


async def test_granted_slots_are_ranks_first_and_spares_then() -> None:
    job = WithSpare()
    group = job.standing
    await group.release_slots([group.spare.slots, group.members[1].slots])
    assert await grants(job, "m", "o")
    assert len(group.indices[-1]) == 2
    assert len(group.spares) == 1
    await job.recovery.stop()


async def grants(job: WithSpare, *node_ids: str, num_members: int = 3) -> bool:
    """Grant slots on these nodes; return True once the group has them."""
    grant = Grant(1, tuple(Slice(node_id, 1) for node_id in node_ids), None)
    job.resizing.grow(grant)
    job.resizing.add_workers(grant)
    await until(lambda: len(job.standing.members) == num_members)
    for member in job.standing.members:
        if not member.is_placed and not member.is_spare:
            job.nodes.seen.append(stands_by(member.index, incarnation=member.incarnation))
    await until(lambda: bool(job.reports.of(FrameKind.RESIZED)))
    return True


async def test_a_lost_node_is_replaced_by_the_spare_and_its_slots_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = WithSpare()
    lost = job.group.members[1]
    job.group.vanish(lost, monkeypatch=monkeypatch)
    monkeypatch.setattr(placement_groups, "alive_nodes", lambda: {"n", "m"})
    assert await job.recover(lost)
    assert job.standing.indices == [[0, SPARE]]
    assert job.standing.spares == []
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert (size["world_size"], size["lacking"]) == (2, 0)


async def test_a_spare_takes_over_if_the_dead_node_is_found_while_another_spare_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node has a rank, too, and the monitor handles its exit only after the change."""
    job = WithSpare()
    group, lost = job.standing, job.group.members[1]
    another = member_of(3, "dead")
    another.is_placed, another.is_spare = False, True
    group.members.append(another)
    group.vanish(lost, another, monkeypatch=monkeypatch)
    monkeypatch.setattr(placement_groups, "alive_nodes", lambda: {"n", "m"})
    await job.recovery.lose_spares({"dead"})
    assert (group.indices, group.spares) == ([[0, SPARE]], [])
    (loss,) = job.reports.of(FrameKind.REGROUPING)
    assert "a spare takes its place" in loss["message"]
    assert await job.recover(lost)
    assert len(job.reports.of(FrameKind.REGROUPING)) == 1, "the loss was handled before"
    assert group.indices == [[0, SPARE]]


# Groups that divide a model.

DIVIDED: dict[str, Any] = {
    "recipe": "image_classification",
    "resources": {"num_workers": 4},
    "parallel": {"shard": 2},
    "elastic": {"spares": 1, "min_workers": 2},
}


class DividedWithSpare(WithSpare):
    """Two replicas of two workers on nodes `n`, and a spare on node `m`."""

    def __init__(self, *, min_workers: int | None = 2) -> None:
        self.standing = GroupWithSpare(4)
        spec = replace(of(DIVIDED), slices=(*[Slice("n", 1)] * 4, Slice("m", 1)))
        spec = replace(spec, min_workers=min_workers)
        Recovering.__init__(self, spec=spec, group=self.standing)
        self.nodes.seen = [observation(rank) for rank in range(4)]
        self.make_ready()

    def recall(self, *indices: int) -> None:
        """Ask for the slots of these workers."""
        for member in self.standing.members:
            member.slots.part = Slice(f"n{member.index}", 1)
        self.resizing.recall(Recall(1, tuple(Slice(f"n{index}", 1) for index in indices), None))


@pytest.mark.parametrize("rank", range(4))
async def test_a_spare_gets_the_part_and_the_replica_of_a_lost_worker(rank: int) -> None:
    job = DividedWithSpare()
    assert await job.loses(rank)
    expected = [0, 1, 2, 3]
    expected[rank] = 4
    assert (job.standing.indices, job.standing.started) == ([expected], [])
    assert job.standing.spare.index == rank


async def test_a_spare_that_does_not_complete_a_replica_waits_for_the_next_newcomer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both workers of a replica are lost, and the spare replaces only one of them."""
    job = DividedWithSpare()
    lost = [job.group.members[0], job.group.members[1]]
    job.group.vanish(*lost, monkeypatch=monkeypatch)
    monkeypatch.setattr(placement_groups, "alive_nodes", lambda: {"n", "m"})
    assert await job.recover(lost[0])
    assert job.standing.indices == [[2, 3]]
    assert job.standing.spares == []
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert (size["world_size"], size["lacking"]) == (2, 0)
    assert "leaves 1 idle until there are enough for another replica" in size["message"]
    job.recovery.confirm([])
    assert await grants(job, "o", num_members=4)
    await until(lambda: len(job.standing.indices) == 2)
    assert sorted(job.standing.indices[-1][2:]) == [4, 13]
    assert job.standing.spares == []
    await job.recovery.stop()


@pytest.mark.parametrize("state", ["S", "T"])
async def test_a_spare_completes_a_replica_that_newcomers_do_not_complete_unless_it_is_suspended(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spare was not ready when a replica was lost. The scheduler counts its slot as a worker's,
    and grants only one more."""
    job = DividedWithSpare()
    job.standing.spare.is_ready = False
    lost = [job.group.members[2], job.group.members[3]]
    job.group.vanish(*lost, monkeypatch=monkeypatch)
    monkeypatch.setattr(placement_groups, "alive_nodes", lambda: {"n", "m"})
    assert await job.recover(lost[0])
    assert (job.standing.indices, job.standing.spare.index) == ([[0, 1]], 4)
    job.recovery.confirm([])
    job.standing.spare.is_ready = True
    spare = job.standing.spare
    job.shows({"state": state})
    assert await grants(job, "o", num_members=4)
    await until(lambda: len(job.standing.indices) == 2)
    assert job.standing.indices[-1][:2] == [0, 1]
    assert len(job.standing.indices[-1]) == (4 if state == "S" else 2)
    assert job.standing.spares == ([] if state == "S" else [spare])
    await job.recovery.stop()


@pytest.mark.parametrize(
    ("asked", "released", "ranks"),
    [
        ((4,), ["n4"], None),  # the spare: the round goes on
        ((3,), ["n3"], [0, 1, 2, 4]),
        ((0, 4), ["n4"], None),  # no replica would be complete without rank 0
        ((2, 3, 4), ["n2", "n3", "n4"], [0, 1]),
        ((0, 2), ["n2"], [0, 1, 4, 3]),  # both have the first part
        ((2, 3), ["n2", "n3"], [0, 1]),  # the spare waits for another replica
    ],
)
async def test_slots_are_released_if_spares_and_workers_form_whole_replicas(
    asked: tuple[int, ...], released: list[str], ranks: list[int] | None
) -> None:
    job = DividedWithSpare()
    job.recall(*asked)
    await until(lambda: bool(job.reports.all))
    await asyncio.sleep(0)
    assert sorted(job.standing.released) == released
    assert job.standing.indices == ([] if ranks is None else [ranks])


async def test_a_divided_group_of_fixed_size_keeps_the_slots_of_its_ranks() -> None:
    """Its ranks do not agree after which step they leave, so a part could be lost."""
    job = DividedWithSpare(min_workers=None)
    job.recall(3)
    await until(lambda: bool(job.reports.all))
    assert (job.standing.released, job.standing.indices) == ([], [])
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert size["message"].startswith("keeps its slots and continues")


async def test_a_spare_that_just_took_a_rank_does_not_displace_a_worker_with_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 0 was replaced in round 3, long after the process of the spare had started. When the
    group shrinks to one replica before the spare got its state, worker 0 is in this replica."""
    job = DividedWithSpare()
    job.standing.spare.is_ready = False
    for _ in range(3):
        assert await job.loses(0)
        job.recovery.confirm([])
    job.nodes.seen.append(observation(0, incarnation=job.standing.members[0].incarnation))
    job.standing.spare.is_ready = True
    assert await job.loses(2)
    assert job.standing.indices[-1] == [0, 1, 4, 3]
    lost = job.group.members[3]
    job.group.vanish(lost, monkeypatch=monkeypatch)
    monkeypatch.setattr(placement_groups, "alive_nodes", lambda: {"n", "m"})
    assert await job.recover(lost)
    assert job.standing.indices[-1] == [0, 1]
