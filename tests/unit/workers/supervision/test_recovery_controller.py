"""A recovering group gets the time that it needs, until it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.commands import Grant
from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.slices import Slice
from ray_workers.supervision.member import Member
from ray_workers.supervision.node_clients import CodeUnavailable
from ray_workers.supervision.rules.recovery_rules import MOST_STARTS, RecoveryState, least_ranks
from tests.unit.workers.supervision.observed import observation
from tests.unit.workers.supervision.recovering import (
    ON_M,
    PATIENCE_S,
    QUICK,
    SPEC,
    Recovering,
    SlowGroup,
    ends,
    of,
    stands_by,
)


def silos(quorum: int | None = None) -> dict[str, Any]:
    """A document with three servers."""
    each = [{"name": name, "node_labels": {"silo": name}} for name in ("north", "south", "west")]
    federated = {"silos": each, "quorum": quorum, "rounds": 3}
    return {"recipe": "image_classification", "federated": federated}


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
    assert job.speed.overrun == 1.0
    job.now += slowness * (QUICK.whole_limit_s + 1.0)
    outcome = await asyncio.wait_for(job.watch(), PATIENCE_S)
    assert "still incomplete" in outcome.message
    assert job.speed.overrun == slowness


async def test_only_an_error_of_its_own_process_speaks_against_the_replacement_of_a_rank() -> None:
    """Errors of other processes can have its number: a newcomer without a rank is named after its
    seat, and an older process may have had the same rank."""
    job = Recovering()
    job.group.replaced.set()
    job.group.lost.index, job.group.lost.incarnation = 5, 2
    error = {"cause": "user_error", "type": "E", "message": "m"}
    others = {"seat": 1, "incarnation": 3}, {"seat": 1, "incarnation": 0}, {}
    job.nodes.left = [Frame(1, 3, FrameKind.ERROR, 1.0, {**error, **each}) for each in others]
    assert await job.recover()
    job = Recovering()
    own = {**error, "seat": 1, "incarnation": 0}
    job.nodes.left = [Frame(0, 7, FrameKind.ERROR, 1.0, own)]
    assert not await job.recover()


class KilledWhileItStarts(SlowGroup):
    """The first processes that are started exit at once."""

    failures = 0

    async def replace(self, members: Sequence[Member], round_number: int) -> None:
        if self.failures:
            self.failures -= 1
            raise ForkFailed("the process ended before it began")
        await super().replace(members, round_number)


@pytest.mark.parametrize(("failures", "recovers"), [(MOST_STARTS - 1, True), (MOST_STARTS, False)])
async def test_a_replacement_that_is_killed_while_it_starts_is_replaced_too(
    failures: int, recovers: bool
) -> None:
    group = KilledWhileItStarts()
    group.failures = failures
    job = Recovering(group=group)
    group.replaced.set()
    assert await job.recover() is recovers
    assert group.announced == [1] * recovers


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
    assert "could not be regrouped" in watching.result().message
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
    ends(job.group.placed[0])
    assert await asyncio.wait_for(watching, PATIENCE_S) is None, "the only one that held the state"
    assert job.recovery.state.round == 1


async def test_without_the_workers_of_a_lost_node_parameter_servers_do_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would be renumbered, and a worker would be taken for a server."""
    sync = {"kind": "parameter_server", "servers": 1}
    for document, recovers in ((SPEC.spec, True), ({**SPEC.spec, "sync": sync}, False)):
        resources = {"num_workers": 3}
        job = Recovering(spec=of({**document, "resources": resources}))
        job.group.vanish(job.group.lost, monkeypatch=monkeypatch)
        job.group.replaced.set()
        assert await job.recover() is recovers
        ends_by_loss = [end.exit_code for end in job.group.ended()] == [None]
        assert ends_by_loss is not recovers, "without an end to blame the attempt would succeed"


async def test_a_parameter_server_is_replaced_if_another_has_its_replica() -> None:
    """Rank 3 of six, of which three are servers."""
    sync = {"kind": "parameter_server", "servers": 3}
    for kept_by, recovers in (("snapshot", False), ("replica", True)):
        document = {**SPEC.spec, "sync": {**sync, "shards_kept_by": kept_by}}
        job = Recovering(spec=of({**document, "resources": {"num_workers": 6}}))
        job.group.lost.rank = 3
        job.group.replaced.set()
        assert await job.recover() is recovers
        assert job.group.announced == ([1] if recovers else [])


async def test_the_rounds_of_silos_go_on_without_one_whose_node_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The quorum of silos, and the aggregator."""
    assert least_ranks(of(silos(quorum=1))) == 2
    assert least_ranks(of(silos(quorum=3))) == 4
    assert least_ranks(SPEC) == SPEC.world_size
    job = Recovering(spec=of(silos(quorum=1)), group=SlowGroup(3))
    job.group.vanish(job.group.lost, monkeypatch=monkeypatch)
    job.group.replaced.set()
    assert await job.recover()
    assert job.group.announced == [1]
    job = Recovering(spec=of(silos(quorum=2)), group=SlowGroup(3))
    job.group.vanish(job.group.lost, monkeypatch=monkeypatch)
    job.group.replaced.set()
    assert not await job.recover(), "no quorum is left, and no other node holds the data"


async def test_a_silo_that_is_replaced_costs_no_step() -> None:
    """The silo's part of the open round counts, though its next process begins with that round."""
    job = Recovering(spec=of(silos()))
    job.group.replaced.set()
    job.nodes.seen = [observation(r, round_number=0, step=10) for r in (0, 1)]
    assert await job.recover()
    report = job.recovery.confirm(
        [observation(1, round_number=1, resumed_step=9, first_at=8.0).status]
    )
    assert report is not None
    assert (report.step, report.steps_lost) == (9, 0)


async def test_a_lost_rank_that_comes_back_when_all_is_done_shows_the_end() -> None:
    """The others, whose first step was long before the loss, show nothing about the recovery."""
    job = Recovering(spec=of(silos()))
    job.group.replaced.set()
    job.nodes.seen = [observation(r, round_number=0, step=10) for r in (0, 1)]
    assert await job.recover()
    late = observation(1, RankPhase.FINISH, round_number=1, resumed_step=60, step=60, first_at=0.0)
    report = job.recovery.confirm([observation(0, step=60, first_at=4.0).status, late.status])
    assert report is not None
    assert (report.step, report.steps_lost) == (60, 0)
    assert report.recovery_s is not None
    assert report.recovery_s > 0.0


async def test_an_aggregator_of_silos_is_not_replaced() -> None:
    """Only this rank has the weights: the next attempt resumes from its checkpoint."""
    spec = of(silos())
    assert spec.traits.state_holders == {0}
    assert not spec.traits.unawaited, "the job is over when all have ended"
    job = Recovering(spec=spec)
    job.group.lost.rank = 0
    job.group.replaced.set()
    assert not await job.recover()


async def test_no_workers_are_added_in_slots_that_were_not_granted() -> None:
    """The grant is answered once, so that the service gives its slots to other jobs."""
    job = Recovering(spec=replace(SPEC, slices=(Slice("n", 3),)), group=SlowGroup(lost=None))
    for number in (1, 1, 2):
        job.resizing.grow(Grant(number, ON_M, None))
    assert job.recovery.state.grants == (Grant(1, ON_M, None), Grant(2, ON_M, None))
    watching = job.watch()
    await job.until(lambda: len(job.reports.of(FrameKind.RESIZED)) == 2)
    answers = [(body["grants"], body["lacking"]) for body in job.reports.of(FrameKind.RESIZED)]
    assert answers == [(1, 1), (2, 1)]
    await job.until(lambda: job.recovery.state == RecoveryState())
    watching.cancel()


async def test_a_worker_that_never_starts_is_not_waited_for_without_end() -> None:
    """For example, its rank actor is stopped: others wait for the answer to the grant."""
    job = Recovering(group=SlowGroup(lost=None))
    job.group.adds = asyncio.Event()
    job.resizing.grow(Grant(1, ON_M, None))
    watching = job.watch()
    await job.until(lambda: bool(job.reports.of(FrameKind.RESIZED)))
    (answer,) = job.reports.of(FrameKind.RESIZED)
    assert answer["grants"] == 1
    assert "could not add more slots (the operation took more than 40 s)" in answer["message"]
    assert not job.recovery.state.is_adding_workers
    watching.cancel()


async def test_a_node_has_the_code_before_workers_start_there() -> None:
    job = Recovering(group=SlowGroup(lost=None))
    job.unprepared = CodeUnavailable("the code can't be copied to the node m: no space left")
    job.resizing.grow(Grant(1, ON_M, None))
    watching = job.watch()
    await job.until(lambda: bool(job.reports.of(FrameKind.RESIZED)))
    (answer,) = job.reports.of(FrameKind.RESIZED)
    assert "could not add more slots (the code can't be copied to the node m" in answer["message"]
    assert job.prepared == [["m"]]
    job.unprepared, job.group.adds = None, asyncio.Event()
    job.resizing.grow(Grant(2, ON_M, None))
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
async def test_a_slow_node_that_does_not_report_which_ranks_hold_the_state_is_excused(
    slowness: float,
) -> None:
    job = Recovering(slowness)
    job.nodes.seen = [observation(1, step=7)]
    recovering = asyncio.ensure_future(job.recover())
    await job.until(recovering.done)
    assert not recovering.result()
    assert job.speed.overrun == slowness
