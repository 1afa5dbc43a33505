"""The promises of every cluster behind the port: the real one, the fake and the simulated one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from ray_workers.shared.commands import Limit, Stop
from ray_workers.shared.contracts import Cause, FrameKind, Phase, PollReply, ProcessKind
from service.cluster.port import ClusterUnavailable
from service.cluster.ray.gateway import GatewayCluster
from tests.contract.grounds import (
    SLOTS,
    STEPS,
    Ground,
    eventually,
    frames_of,
    lines_of,
    steps_of,
)
from tests.marks import SOAK

PHASES = list(Phase)


def runs(reply: PollReply) -> bool:
    return reply.phase is Phase.RUNNING


async def test_a_snapshot_shows_accepted_nodes_and_what_they_have(ground: Ground) -> None:
    first, second = await ground.cluster.snapshot(), await ground.cluster.snapshot()
    assert first.session == second.session != ""
    (node,) = first.nodes
    assert (node.alive, node.accepted, node.problem) == (True, True, None)
    assert node.resources["CPU"] == SLOTS
    assert set(node.available) <= set(node.resources)
    assert all(name in ("CPU", "GPU", "memory") for name in node.resources)


async def test_an_attempt_leads_through_its_phases_and_delivers_every_frame_once(
    ground: Ground,
) -> None:
    ref = await ground.launch("steps", 2)
    replies = await ground.follow(ref)
    phases = [PHASES.index(reply.phase) for reply in replies]
    assert phases == sorted(phases)
    last = replies[-1]
    assert last.phase is Phase.ENDED
    assert last.outcome is not None
    assert last.outcome.cause is Cause.SUCCEEDED
    times = [last.phase_times[phase] for phase in PHASES]
    assert times == sorted(times)
    frames = frames_of(replies)
    for rank in range(2):
        assert steps_of(frames, rank) == ground.steps(rank)
        assert lines_of(frames, rank) == ground.lines(rank)
    assert {frame.incarnation for frame in frames} == {0}
    assert all(abs(frame.time - time.time()) < 60 for frame in frames)
    assert await eventually(ground.all_free, "the slots of an attempt that ended are held")


async def test_the_same_cursor_is_answered_by_the_same_frames(ground: Ground) -> None:
    ref = await ground.launch("steps")

    async def has_ended() -> bool:
        return (await ground.poll(ref)).phase is Phase.ENDED

    await eventually(has_ended, "the attempt never ended")
    reply = await ground.poll(ref)  # the last reply may be from before the end
    assert steps_of([*reply.frames], 0) == ground.steps(0)
    assert reply.outcome is not None  # it comes with the last frames
    assert await ground.poll(ref) == reply
    ended = await ground.poll(ref, reply.cursor)
    assert ended.frames == ()
    assert ended.outcome == reply.outcome
    assert await ground.poll(ref, reply.cursor) == ended


@pytest.mark.parametrize("_cluster", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
async def test_what_a_node_has_when_its_agent_dies_at_the_end_is_delivered(ground: Ground) -> None:
    ref = await ground.launch("steps", 2)

    async def has_ended() -> bool:
        return (await ground.poll(ref)).phase is Phase.ENDED

    await eventually(has_ended, "the attempt never ended")
    await ground.kill_agent()
    frames = frames_of(await ground.follow(ref))
    for rank in range(2):
        assert steps_of(frames, rank) == ground.steps(rank)
        assert lines_of(frames, rank) == ground.lines(rank)


@SOAK
@pytest.mark.parametrize("_cluster", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
async def test_ray_keeps_no_code_of_attempts_that_have_ended(ground: Ground) -> None:
    await ground.settle(await ground.launch("steps", 2))
    before = ground.exported_classes()
    await ground.settle(await ground.launch("steps", 2))
    assert ground.exported_classes() == before > 0


@SOAK
@pytest.mark.parametrize("_cluster", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
async def test_what_a_node_has_when_its_agent_is_stopped_at_the_end_is_delivered(
    ground: Ground,
) -> None:
    """The silent agent is ended, and the next agent takes over all its work."""
    ref = await ground.launch("steps", 2)

    async def has_ended() -> bool:
        return (await ground.poll(ref)).phase is Phase.ENDED

    await eventually(has_ended, "the attempt never ended")
    ground.signal_actor("NodeAgent", signal.SIGSTOP)
    replies: list[PollReply] = []
    while not replies or replies[-1].outcome is None:
        await ground.cluster.snapshot()  # as the service does every second
        replies.append(await ground.poll(ref, replies[-1].cursor if replies else {}))
    assert any(one.kind is ProcessKind.NODE_AGENT for r in replies for one in r.silent)
    assert replies[-1].outcome is not None
    assert replies[-1].outcome.cause is Cause.SUCCEEDED
    for rank in range(2):
        assert steps_of(frames_of(replies), rank) == ground.steps(rank)
        assert lines_of(frames_of(replies), rank) == ground.lines(rank)


@SOAK
@pytest.mark.parametrize("_cluster", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
@pytest.mark.parametrize(
    ("kind", "cause"),
    [("Supervisor", Cause.SUPERVISOR_LOST), ("RankActor", Cause.WORKER_LOST)],
)
async def test_an_attempt_whose_supervisor_or_rank_actor_is_stopped_comes_to_an_end(
    ground: Ground, kind: str, cause: Cause
) -> None:
    ref = await ground.launch("waits", min_workers=1)  # an elastic group has rank actors
    await ground.follow(ref, until=runs)
    ground.signal_actor(kind, signal.SIGSTOP)
    reply = await ground.settle(ref)
    assert reply.outcome is not None
    assert reply.outcome.cause is cause
    assert await eventually(ground.all_free, "the slots of an ended attempt are held")


@SOAK
@pytest.mark.parametrize("_cluster", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
async def test_a_gateway_that_is_stopped_is_replaced_and_the_attempt_goes_on(
    ground: Ground,
) -> None:
    ref = await ground.launch("waits")
    await ground.follow(ref, until=runs)
    assert isinstance(ground.cluster, GatewayCluster)
    stopped = ground.cluster.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)

    async def answers() -> bool:
        try:
            return (await ground.poll(ref)).phase is Phase.RUNNING
        except ClusterUnavailable:
            return False

    await eventually(answers, "the gateway was not replaced")
    assert ground.cluster.pid != stopped


async def test_a_small_byte_cap_delivers_whole_frames_and_loses_none(ground: Ground) -> None:
    ref = await ground.launch("steps", 2)
    replies = await ground.follow(ref, max_bytes=1)
    frames = frames_of(replies)
    assert all(steps_of(frames, rank) == ground.steps(rank) for rank in range(2))
    assert all(lines_of(frames, rank) == ground.lines(rank) for rank in range(2))
    assert any(reply.more for reply in replies if reply.frames)
    assert len([reply for reply in replies if reply.frames]) >= STEPS


async def test_a_poll_waits_for_something_to_happen_but_no_longer_than_told(
    ground: Ground,
) -> None:
    ref = await ground.launch("waits")
    (*_, reply) = await ground.follow(ref, until=lambda r: any(lines_of([*r.frames], 0)))
    while reply.frames:  # the supervisor reports something from time to time
        asked_at = time.monotonic()
        reply = await ground.poll(ref, reply.cursor, wait_s=0.4)
        took_s = time.monotonic() - asked_at
    assert 0.3 <= took_s < 25.0
    waiting = asyncio.create_task(ground.poll(ref, reply.cursor, wait_s=30.0))
    await ground.cluster.send(ref, Stop())
    assert (await waiting).phase in (Phase.STOPPING, Phase.ENDED)


async def test_an_attempt_that_is_stopped_ends_as_stopped_and_frees_its_slots(
    ground: Ground,
) -> None:
    ref = await ground.launch("waits", 2)
    await ground.follow(ref, until=runs)
    await ground.cluster.send(ref, Stop())
    await ground.cluster.send(ref, Stop())
    last = await ground.settle(ref)
    assert last.outcome is not None
    assert last.outcome.cause is Cause.STOPPED
    assert await eventually(ground.all_free, "the slots of a stopped attempt are held")


async def test_a_failing_rank_is_named_with_its_own_words(ground: Ground) -> None:
    ref = await ground.launch("fails", 2)
    replies = await ground.follow(ref)
    outcome = replies[-1].outcome
    assert outcome is not None
    failure = ground.failure
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (Cause.USER_ERROR, failure.rank, 1)
    assert failure.words in outcome.message
    (error,) = [frame for frame in frames_of(replies) if frame.kind is FrameKind.ERROR]
    assert (error.rank, error.body["cause"]) == (failure.rank, "user_error")
    assert error.body["type"] == failure.type
    assert failure.words in error.body["traceback"]


async def test_a_rank_killed_from_outside_is_a_lost_worker(ground: Ground) -> None:
    outcome = (await ground.settle(await ground.launch("killed"))).outcome
    assert outcome is not None
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (Cause.WORKER_LOST, 0, -9)


async def test_a_rank_that_leaves_is_to_blame_not_the_peers_that_are_then_stopped(
    ground: Ground,
) -> None:
    outcome = (await ground.settle(await ground.launch("leaves", 2))).outcome
    assert outcome is not None
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (Cause.USER_ERROR, 1, 3)
    assert "rank 1 exited with code 3" in outcome.message


async def test_an_attempt_that_ran_too_long_is_ended(ground: Ground) -> None:
    outcome = (await ground.settle(await ground.launch("waits", max_runtime_s=0.5))).outcome
    assert outcome is not None
    assert outcome.cause is Cause.RUNTIME_EXCEEDED


async def test_the_running_time_of_an_attempt_is_changed(ground: Ground) -> None:
    ref = await ground.launch("waits", max_runtime_s=600.0)
    await ground.follow(ref, until=runs)
    for limit in (Limit(2, 0.5), Limit(1, None)):  # an older command arrives late
        await ground.cluster.send(ref, limit)
    outcome = (await ground.settle(ref)).outcome
    assert outcome is not None
    assert outcome.cause is Cause.RUNTIME_EXCEEDED


async def test_gangs_never_hold_more_slots_than_there_are(ground: Ground) -> None:
    """I3: of three gangs of two workers on four slots, two run, and the third gives up in time."""
    two = [await ground.launch("waits", 2) for _ in range(2)]
    for ref in two:
        await ground.follow(ref, until=runs)
    asked_at = time.monotonic()
    third = await ground.settle(await ground.launch("waits", 2, start_timeout_s=1.0))
    assert third.outcome is not None
    assert third.outcome.cause is Cause.SLOTS_UNAVAILABLE
    assert Phase.STARTING not in third.phase_times
    assert time.monotonic() - asked_at >= 0.9
    assert await ground.free_slots() == 0
    for ref in two:
        reply = await ground.poll(ref, wait_s=0.0)
        assert (reply.phase, reply.outcome) == (Phase.RUNNING, None)


async def test_a_gang_gets_the_slots_as_soon_as_another_has_left_them(ground: Ground) -> None:
    first = await ground.launch("waits", 3)
    await ground.follow(first, until=runs)
    second = await ground.launch("steps", 2)
    assert (await ground.poll(second, wait_s=0.3)).phase is Phase.ACQUIRING
    await ground.cluster.send(first, Stop())
    outcome = (await ground.settle(second)).outcome
    assert outcome is not None
    assert outcome.cause is Cause.SUCCEEDED


async def test_an_attempt_that_waits_for_slots_can_be_stopped(ground: Ground) -> None:
    first = await ground.launch("waits", SLOTS)
    await ground.follow(first, until=runs)
    second = await ground.launch("steps")
    await ground.poll(second, wait_s=0.2)
    await ground.cluster.send(second, Stop())
    outcome = (await ground.settle(second)).outcome
    assert outcome is not None
    assert outcome.cause is Cause.STOPPED


async def test_an_attempt_that_nobody_knows_has_lost_its_supervisor(ground: Ground) -> None:
    ref = await ground.ref(await ground.spec("steps"))
    reply = await ground.poll(ref)
    assert reply.outcome is not None
    assert (reply.phase, reply.outcome.cause) == (Phase.ENDED, Cause.SUPERVISOR_LOST)
    await ground.cluster.send(ref, Stop())
    await ground.cluster.acknowledge(ref)


async def test_an_attempt_on_a_node_that_is_gone_has_lost_its_node(ground: Ground) -> None:
    ref = await ground.ref(await ground.spec("steps"))
    reply = await ground.poll(replace(ref, node_ids=("0" * 56,)))
    assert reply.outcome is not None
    assert reply.outcome.cause is Cause.NODE_LOST


async def test_nothing_of_another_session_of_the_cluster_is_alive(ground: Ground) -> None:
    ref = await ground.launch("waits")
    older = replace(ref, session="session-of-yesterday")
    reply = await ground.poll(older, {"r0.0.log": 7})
    assert reply.outcome is not None
    assert reply.outcome.cause is Cause.NODE_LOST
    assert dict(reply.cursor) == {"r0.0.log": 7}
    await ground.follow(ref, until=runs)


async def test_a_live_attempt_is_never_launched_twice(ground: Ground) -> None:
    spec = await ground.spec("waits")
    await ground.cluster.launch(spec)
    with pytest.raises(ClusterUnavailable):
        await ground.cluster.launch(spec)
    (known,) = await ground.cluster.attempts()
    assert (known.job_id, known.attempt) == (spec.job_id, 1)


async def test_an_attempt_that_was_given_up_can_no_longer_be_launched(ground: Ground) -> None:
    """A launch can arrive late, from a service that was stopped in the meantime."""
    spec = await ground.spec("waits")
    ref = await ground.ref(spec)
    await ground.cluster.give_up(ref)
    await ground.cluster.give_up(ref)
    with pytest.raises(ClusterUnavailable):
        await ground.cluster.launch(spec)
    assert await ground.cluster.attempts() == []
    reply = await ground.poll(ref)
    assert reply.outcome is not None
    assert reply.outcome.cause is Cause.SUPERVISOR_LOST
    await ground.cluster.launch(replace(spec, attempt=2))
    await ground.follow(replace(await ground.ref(spec), attempt=2), until=runs)


async def test_the_cluster_lists_an_attempt_until_it_is_acknowledged(ground: Ground) -> None:
    ref = await ground.launch("steps", attempt=7)

    async def listed() -> bool:
        known = await ground.cluster.attempts()
        return [(k.job_id, k.attempt, k.session) for k in known] == [(ref.job_id, 7, ref.session)]

    async def forgotten() -> bool:
        return not await ground.cluster.attempts()

    assert await listed()
    replies = await ground.follow(ref)
    assert await listed()
    await ground.cluster.acknowledge(ref)
    await eventually(forgotten, "an acknowledged attempt is still listed")
    await ground.cluster.acknowledge(ref)
    reply = await ground.poll(ref, {})
    assert frames_of(replies)
    assert reply.frames == ()
    assert reply.outcome is not None
    assert reply.outcome.cause is Cause.SUPERVISOR_LOST


async def test_acknowledging_a_running_attempt_ends_it_whole(ground: Ground) -> None:
    ref = await ground.launch("waits", 2)
    await ground.follow(ref, until=runs)
    await ground.cluster.acknowledge(ref)
    assert await eventually(ground.all_free, "the slots of an ended attempt are held")


async def test_a_request_for_nodes_that_never_come_changes_nothing(ground: Ground) -> None:
    """None of these clusters has an autoscaler, and the only node of the real Ray is its head."""
    bundles = [({"CPU": 1.0, "label:zone=b": 0.001}, 2), ({"CPU": float(SLOTS)}, 1)]
    for asked in (bundles, []):
        await ground.cluster.request_nodes(asked, [])
        (node,) = (await ground.cluster.snapshot()).nodes
        assert node.accepted


async def test_a_job_has_a_directory_on_its_node_until_that_is_dropped(ground: Ground) -> None:
    ref = await ground.launch("steps")
    await ground.settle(ref)
    assert ref.job_id in await ground.cluster.kept_jobs()
    for _ in range(2):
        await ground.cluster.drop_jobs([ref.job_id, "job-unknown"])
        assert ref.job_id not in await ground.cluster.kept_jobs()
