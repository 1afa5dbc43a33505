"""Recovery of gossip, whose ranks need not wait for each other."""

from __future__ import annotations

import asyncio
from typing import Any

from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.contracts import FrameKind, Slice
from ray_workers.supervision.rules.failure_attribution import RankExit
from tests.unit.workers.supervision.observed import observation
from tests.unit.workers.supervision.recovering import (
    PATIENCE_S,
    QUICK,
    Recovering,
    SlowGroup,
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
