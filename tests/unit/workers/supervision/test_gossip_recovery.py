"""Recovery in gossip, whose ranks do not have to wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ray_workers.node import placement_groups
from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.slices import Slice
from ray_workers.supervision.member import Member
from tests.unit.workers.supervision.observed import observation
from tests.unit.workers.supervision.recovering import (
    PATIENCE_S,
    QUICK,
    Recovering,
    SlowGroup,
    ends,
    member_of,
    stands_by,
    until,
)
from tests.wire import attempt_spec

GOSSIP = attempt_spec(
    spec={
        "recipe": "image_classification",
        "resources": {"num_workers": 2},
        "sync": {"kind": "gossip"},
    },
    slices=(Slice("n", 2),),
)


class GossipGroup(SlowGroup):
    """A group that has lost rank 0, without which the others can continue."""

    def __init__(self, num_ranks: int = 2) -> None:
        super().__init__(num_ranks, lost=0)
        self.failures: list[Exception] = []
        """The failures of the next starts."""
        self.num_started = 0
        self.asked_to_leave: list[int] = []
        """The indices of members that were rank 0 then."""

    async def ask_to_leave(self) -> None:
        self.asked_to_leave += [member.index for member in self.running if member.rank == 0]

    async def replace(self, members: Sequence[Member], round_number: int) -> None:
        self.asked.set()
        if self.failures:
            raise self.failures.pop()
        await super().replace(members, round_number)
        self.num_started += 1
        for member in members:
            member.incarnation = round_number


async def test_of_gossip_the_others_go_on_at_once_and_take_the_replacement_in_as_the_last() -> None:
    group = GossipGroup()
    group.failures = [ForkFailed("not now")]
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(1)]
    assert await job.recover(), "its replacement is not ready yet"
    assert group.indices == [[1]]
    (report,) = job.reports.of(FrameKind.REGROUPING)
    assert report["message"] == "rank 0 was killed by SIGKILL; the other ranks continue"
    watching = job.watch()
    job.nodes.seen = [observation(1, round_number=1, first_at=6.5)]
    await job.until(lambda: job.recovery.state.regrouping is None)
    (report,) = job.reports.of(FrameKind.REGROUPED)
    assert (report["ranks"], report["world_size"], report["recovery_s"]) == ([0], 1, 1.5)
    await asyncio.wait_for(group.asked.wait(), PATIENCE_S)
    group.replaced.set()
    job.nodes.seen.append(stands_by(0, incarnation=1))
    await job.until(lambda: len(group.indices) == 2)
    assert group.indices == [[1], [1, 0]]
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert (size["world_size"], size["lacking"]) == (2, 0)
    # The end of a process that has just got its place is not missed.
    ends(group.lost, 1)
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
    assert "continues without a lost worker, whose process can't be restarted" in size["message"]
    assert group.indices == [[1]]


async def test_of_gossip_slots_for_the_workers_of_a_lost_node_are_asked_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No longer: the slots are withheld from the whole queue, and the others train."""
    group = GossipGroup()
    group.vanish(group.lost, monkeypatch=monkeypatch)
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(1)]
    assert await job.recover()
    assert group.indices == [[1]]
    (size,) = job.reports.of(FrameKind.RESIZED)
    assert (size["world_size"], size["lacking"]) == (1, 1)
    await job.until(lambda: len(job.reports.of(FrameKind.RESIZED)) == 2)
    assert job.now > QUICK.standby_limit_s
    assert job.reports.of(FrameKind.RESIZED)[-1]["lacking"] == 0
    assert not group.asked.is_set(), "its slot is gone"
    await job.recovery.stop()


async def test_of_gossip_a_replacement_that_is_never_ready_gives_way_to_another() -> None:
    """For example, a replacement that is stopped while it reads its data."""
    group = GossipGroup()
    group.replaced.set()
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(1)]
    assert await job.recover()
    await job.until(lambda: group.num_started == 1 and job.nodes.num_observed > 5)
    job.now += QUICK.ready_limit_s
    await job.until(lambda: group.num_started == 2)
    job.nodes.seen.append(stands_by(0, incarnation=1))
    await job.until(lambda: len(group.indices) == 2)
    assert group.indices == [[1], [1, 0]]
    await job.recovery.stop()


async def test_of_gossip_a_replacement_is_last_also_where_another_loss_is_not_handled_yet() -> None:
    group = GossipGroup(3)
    group.replaced.set()
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(1), observation(2)]
    first, second = group.running
    ends(first)
    assert await job.recover()
    job.nodes.seen.append(stands_by(0, incarnation=1))
    await job.until(lambda: group.lost.is_placed)
    assert group.indices == [], "the round is announced once the other loss is handled"
    assert [second, group.lost] == group.running
    assert await job.recover(first)
    assert group.indices == [[2, 0]]
    (report,) = job.reports.of(FrameKind.RESIZED)
    assert report["message"] == "adds a replacement for a lost worker: 2 workers"
    await job.recovery.stop()


async def test_the_placed_ranks_of_a_node_that_proves_dead_are_lost_in_gossip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They already had a position in a round that the others wait for."""
    group = GossipGroup(3)
    group.members = [member_of(0, "m"), member_of(1), member_of(2, "m")]
    group.lost = group.members[0]
    ends(group.lost, None)
    alive = {"n", "m"}
    monkeypatch.setattr(placement_groups, "alive_nodes", lambda: set(alive))
    group.slots[:] = [member.slots for member in group.members]
    spec = replace(GOSSIP, slices=(Slice("n", 1), Slice("m", 2)))
    job = Recovering(spec=spec, group=group)
    job.nodes.seen = [observation(1), observation(2)]
    assert await job.recover()
    assert group.indices == [[1, 2]]
    alive.remove("m")
    await job.until(lambda: len(group.indices) == 2)
    assert group.indices == [[1, 2], [1]]
    assert [report["ranks"] for report in job.reports.of(FrameKind.REGROUPING)] == [[0], [1]]
    assert job.recovery.state.regrouping is not None
    await job.recovery.stop()


async def test_of_gossip_slots_for_a_second_lost_node_are_asked_for_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = GossipGroup(3)
    first, second, _ = group.members
    job = Recovering(spec=replace(GOSSIP, slices=(Slice("n", 3),)), group=group)
    job.nodes.seen = [observation(2)]
    group.vanish(first, monkeypatch=monkeypatch)
    assert await job.recover(first)
    await job.until(lambda: job.now > 20.0)
    group.vanish(second, monkeypatch=monkeypatch)
    assert await job.recover(second)
    await job.until(lambda: len(job.reports.of(FrameKind.RESIZED)) == 3)
    assert job.now > 20.0 + QUICK.standby_limit_s
    reports = job.reports.of(FrameKind.RESIZED)
    assert [report["lacking"] for report in reports] == [1, 2, 0]
    lost = "continues without the workers of a lost node"
    assert [report["message"] for report in reports] == [
        f"{lost}: 2 workers, and asks for 1 more",
        f"{lost}: 1 worker, and asks for 2 more",
        "continues with fewer workers, because no slots became available: 1 worker",
    ]
    await job.recovery.stop()


async def test_a_group_whose_rank_0_dies_while_it_leaves_is_asked_again() -> None:
    """The request goes only to rank 0, which is another process from then on."""
    group = GossipGroup()
    group.members = [member_of(0), member_of(1)]
    job = Recovering(spec=GOSSIP, group=group)
    job.nodes.seen = [observation(0), observation(1)]
    watching = job.watch()
    job.monitor.asked.leave(3600.0)
    await job.until(lambda: group.asked_to_leave == [0])
    ends(group.members[0])
    await job.until(lambda: len(group.asked_to_leave) == 2)
    assert group.asked_to_leave == [0, 1]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_of_gossip_two_that_die_at_once_are_replaced_each() -> None:
    group = GossipGroup(3)
    job = Recovering(spec=replace(GOSSIP, slices=(Slice("n", 3),)), group=group)
    watching = job.watch()
    job.nodes.seen = [observation(0), observation(1), observation(2)]
    group.members[0].exit = asyncio.get_running_loop().create_future()
    await job.until(lambda: job.nodes.num_observed > 1)
    for member in group.members[:2]:
        ends(member)
    await job.until(lambda: bool(group.indices))
    assert group.indices == [[2]]
    group.replaced.set()
    job.nodes.seen += [stands_by(0, incarnation=1), stands_by(1, incarnation=1)]
    await job.until(lambda: group.indices[-1:] != [[2]] and len(group.indices[-1]) == 3)
    first, second = group.indices[1:]
    assert first == [2, second[1]]
    assert sorted(second) == [0, 1, 2]
    messages = [report["message"] for report in job.reports.of(FrameKind.RESIZED)]
    adds = "adds a replacement for a lost worker"
    assert messages == [f"{adds}: 2 workers, and starts 1 more", f"{adds}: 3 workers"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
