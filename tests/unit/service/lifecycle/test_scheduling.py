"""The scheduler's SQL: the snapshot, claims, reasons, and the stored view of the cluster."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.commands import Stop
from ray_workers.shared.contracts import Cause, Phase
from ray_workers.shared.slices import Slice
from service.cluster.port import ClusterNode, ClusterSnapshot
from service.db.models import AttemptRow
from service.db.repositories import attempts
from service.db.repositories import jobs as repository
from service.domain.scheduling import policy
from service.domain.states import IllegalTransition, Trigger
from service.lifecycle import transitions
from service.loops.shared.queue_view import SLOW_START_S, followed, snapshot
from service.nodes import node_table
from tests.marks import RULES
from tests.unit.service.helpers import START, Service, regrouping
from tests.wire import cluster_node

pytestmark = RULES


def see_nodes(service: Service, *there: ClusterNode) -> None:
    snapshot = ClusterSnapshot("session-1", "ray://x", "http://dash", False, there)
    service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))


def host(
    name: str, cpus: float, *, accepted: bool = True, problem: str | None = None
) -> ClusterNode:
    return cluster_node(
        name, {"CPU": cpus}, hostname=f"{name}.lan", accepted=accepted, problem=problem
    )


async def test_of_many_claims_at_once_one_wins(service: Service) -> None:
    job_id = await service.submit()
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: service.claim(job_id), range(8)))
    winners = [claimed for claimed in claims if claimed is not None]
    assert [claimed.attempt for claimed in winners] == [1]
    assert len((await service.queries.attempts(job_id)).items) == 1
    events = (await service.queries.events(job_id)).items
    assert [event.to_state for event in events] == [JobState.QUEUED, JobState.STARTING]


async def test_live_attempts_are_the_same_with_and_without_the_queue(service: Service) -> None:
    running, cancelled = [await service.submit() for _ in range(2)]
    await service.submit()
    assert service.claim(running) is not None
    assert service.claim(cancelled) is not None
    await service.jobs.cancel(cancelled)
    alone = service.database.read_sync(lambda s: followed(s, service.now))
    waiting, beside_the_queue = service.database.read_sync(lambda s: snapshot(s, service.now))
    shown = [
        [(a.job_id, a.attempt, a.cluster_session, a.node_ids) for a in attempts]
        for attempts in (alone, beside_the_queue)
    ]
    assert [(each.job_id, each.commands) for each in alone] == [
        (running, ()),
        (cancelled, (Stop(),)),
    ]
    assert (shown[0], len(waiting)) == (shown[1], 1)


async def test_a_claim_and_a_cancel_at_once_leave_one_story(service: Service) -> None:
    for _ in range(5):
        job_id = await service.submit()
        claimed, job = await asyncio.gather(
            asyncio.to_thread(service.claim, job_id), service.jobs.cancel(job_id)
        )
        state = (await service.jobs.get(job_id)).state
        assert state == (JobState.CANCELLED if claimed is None else JobState.CANCELLING)
        assert job.state in (JobState.CANCELLED, JobState.CANCELLING)


async def test_a_claim_of_an_older_attempt_is_lost(service: Service) -> None:
    job_id = await service.running()
    service.end(job_id, 1, Cause.NODE_LOST)
    assert service.claim(job_id, 0) is None
    claimed = service.claim(job_id, 1)
    assert claimed is not None
    assert claimed.attempt == 2


async def test_the_schema_itself_allows_one_live_attempt_of_a_job(service: Service) -> None:
    job_id = await service.running()
    columns = [column.name for column in AttemptRow.__table__.columns]
    values = ["2" if name == "attempt" else name for name in columns]
    copy = text(
        f"INSERT INTO attempts ({', '.join(columns)}) SELECT {', '.join(values)} "
        "FROM attempts WHERE job_id = :job_id"
    )
    with pytest.raises(IntegrityError):
        service.database.write_sync(lambda s: s.execute(copy, {"job_id": job_id}))


async def test_a_claim_says_what_the_launch_needs(service: Service) -> None:
    job_id = await service.submit(max_runtime_s=60, resources={"num_workers": 2})
    claimed = service.claim(job_id, workers=2)
    assert claimed is not None
    job = await service.jobs.get(job_id)
    assert claimed.spec == job.spec
    assert (claimed.resume_from, claimed.max_runtime_s) == ((), 60)
    assert (job.state, job.attempt, job.world_size) == (JobState.STARTING, 1, 2)
    assert job.reason.message == "starts 2 workers on 1 node"


async def test_the_snapshot_shows_the_queue_in_order_and_who_holds_slots(
    service: Service,
) -> None:
    low = await service.submit(priority=10)
    first = await service.submit(resources={"num_workers": 2, "gpus_per_worker": 1})
    second = await service.submit()
    live_id = await service.running(max_runtime_s=9)
    cancelling = await service.running()
    await service.jobs.cancel(cancelling)
    cancelled = await service.submit()
    await service.jobs.cancel(cancelled)
    waiting, live = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert [job.job_id for job in waiting] == [first, second, low]
    assert waiting[0].request == policy.Request(2, {"CPU": 1.0, "GPU": 1.0})
    assert {(a.job_id, a.attempt, a.job_state) for a in live} == {
        (live_id, 1, JobState.RUNNING),
        (cancelling, 1, JobState.CANCELLING),
    }
    (attempt,) = [a for a in live if a.job_id == live_id]
    assert attempt.slices == (Slice("node-a", 1),)
    assert (attempt.cluster_session, attempt.max_runtime_s) == ("session-1", 9)
    cursors = service.database.read_sync(lambda s: attempts.cursors(s, [live_id, first]))
    assert cursors == {(live_id, 1): {"rank-0": 100}}
    service.end(live_id, 1)
    _, live = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert [a.job_id for a in live] == [cancelling]


async def test_a_job_with_a_limit_ends_within_what_is_left_of_it(service: Service) -> None:
    job_id = await service.running(max_runtime_s=100)
    await service.submit()
    service.advance(40)
    service.end(job_id, 1, Cause.WORKER_LOST)
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    ends = {job.job_id == job_id: job.ends_within_s for job in waiting}
    assert ends[False] is None
    assert ends[True] is not None
    assert 59 <= ends[True] <= 100


def held_s(service: Service) -> float:
    _, (attempt,) = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert attempt.running is not None
    return attempt.running.held_s


async def test_the_minimum_run_time_begins_when_the_job_runs(service: Service) -> None:
    job_id = await service.submit()
    assert service.claim(job_id) is not None
    service.advance(600)
    assert held_s(service) == 0.0, "it waits for its slots"
    service.report(job_id, 1, phase=Phase.STARTING)
    service.advance(SLOW_START_S)
    assert held_s(service) == 0.0, "it loads its data"
    service.report(job_id, 1)
    service.advance(20)
    service.report(job_id, 1, [regrouping(0)])
    service.advance(40)
    assert held_s(service) == 60.0, "a recovery is not another start"


async def test_a_job_that_hangs_in_its_start_may_be_asked_for_its_slots(service: Service) -> None:
    job_id = await service.submit()
    assert service.claim(job_id) is not None
    service.report(job_id, 1, phase=Phase.STARTING)
    service.advance(SLOW_START_S + 10)
    assert held_s(service) == 10.0


async def test_a_requeued_job_keeps_its_position_and_waits_for_its_time(service: Service) -> None:
    first = await service.running()
    second = await service.submit()
    service.end(first, 1, Cause.WORKER_LOST)
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert [job.job_id for job in waiting] == [first, second]
    assert waiting[0].not_before == START + timedelta(seconds=1)
    service.advance(1)
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert waiting[0].not_before is None


async def test_why_a_job_waits_is_stored_once_and_explained(service: Service) -> None:
    blocker = await service.running(max_runtime_s=100)
    job_id = await service.submit(resources={"num_workers": 4})
    reason = policy.Reason("waiting_for_slots", "needs 4 workers of 1 CPU; 1 is free")
    wait = policy.Wait(job_id, reason, 1, (blocker,))

    def note() -> int:
        return service.database.write_sync(
            lambda s: transitions.note_waiting(s, [wait], service.now)
        )

    assert (note(), note()) == (1, 0)
    explained = await service.queries.explain(job_id)
    assert (explained.reason.code, explained.reason.message) == (reason.code, reason.message)
    assert (explained.position, explained.blocked_by) == (1, [blocker])
    assert len((await service.queries.events(job_id)).items) == 1
    assert (await service.jobs.get(job_id)).position == 1
    service.claim(job_id, workers=4)
    assert note() == 0
    assert (await service.jobs.get(job_id)).position is None
    explained = await service.queries.explain(job_id)
    assert (explained.position, explained.blocked_by) == (None, [])
    assert explained.reason.code == "claimed"


async def test_a_waiting_job_names_who_waits_before_it_and_who_runs(service: Service) -> None:
    runs = await service.running(name="runs")
    normal = await service.submit(name="normal")
    urgent = await service.submit(name="urgent", priority=90)
    last = await service.submit(name="last")
    await service.submit(name="later")
    assert (await service.queries.explain(last)).position is None
    note_plan(service)
    explained = await service.queries.explain(last)
    assert (explained.position, explained.queue_length) == (3, 4)
    assert [(job.id, job.name) for job in explained.ahead] == [
        (urgent, "urgent"),
        (normal, "normal"),
    ]
    assert [(job.id, job.name, job.state) for job in explained.running] == [
        (runs, "runs", "RUNNING")
    ]
    explained = await service.queries.explain(runs)
    assert (explained.position, explained.ahead, explained.running) == (None, [], [])


async def test_a_long_queue_is_counted_and_its_head_is_named(service: Service) -> None:
    made = [await service.submit() for _ in range(25)]
    note_plan(service)
    explained = await service.queries.explain(made[-1])
    assert (explained.position, explained.queue_length) == (25, 25)
    assert [job.id for job in explained.ahead] == made[:20]


def note_plan(service: Service) -> None:
    """Store a plan for a node whose slots are all used by others."""
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    nodes = (policy.Node("n", {"CPU": 8.0}, {"CPU": 0.0}),)
    plan = policy.plan(policy.Snapshot(waiting, nodes, connected=True), service.now)
    waits = [decision for decision in plan if isinstance(decision, policy.Wait)]
    service.database.write_sync(lambda s: transitions.note_waiting(s, waits, service.now))


async def test_before_a_forecast_was_made_nobody_guesses_when_a_job_starts(
    service: Service,
) -> None:
    await service.running()
    job_id = await service.submit()
    note_plan(service)
    told = await service.queries.explain(job_id)
    assert (told.expected_start_at, told.start, told.counterfactuals) == (None, None, [])


async def test_a_waiting_job_that_became_impossible_fails_with_the_reason(
    service: Service,
) -> None:
    job_id, running = await service.submit(), await service.running()
    reason = policy.Reason("unsatisfiable", "no node of the cluster has the accelerator H100")

    def fail(target: str) -> bool:
        return service.database.write_sync(
            lambda s: transitions.fail_impossible(s, target, reason, service.now)
        )

    assert fail(job_id)
    assert not fail(job_id)
    assert not fail(running)
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "unsatisfiable")


async def test_a_move_that_the_table_does_not_have_changes_nothing(service: Service) -> None:
    job_id = await service.submit()

    def illegal(session: Session) -> None:
        row = repository.lock(session, job_id)
        assert row is not None
        code = "succeeded"
        transitions.move(session, row, Trigger.SUCCEED, code=code, message="m", now=service.now)

    with pytest.raises(IllegalTransition):
        service.database.write_sync(illegal)
    assert (await service.jobs.get(job_id)).state == JobState.QUEUED


async def test_the_cluster_is_shown_as_last_seen_with_what_we_hold(service: Service) -> None:
    assert not (await service.queries.cluster()).connected
    see_nodes(service, host("node-a", 8.0), host("node-b", 4.0, accepted=False, problem="old"))
    job_id = await service.running()
    seen = await service.queries.cluster()
    assert seen.connected
    assert (seen.ray_address, seen.ray_dashboard) == ("ray://x", "http://dash")
    a, b = seen.nodes
    assert (a.node_id, a.resources, a.held, a.jobs) == (
        "node-a",
        {"CPU": 8.0},
        {"CPU": 1.0},
        [job_id],
    )
    assert (b.accepted, b.reason, b.held, b.jobs) == (False, "old", {}, [])
    assert (await service.jobs.get(job_id)).links.ray_dashboard == "http://dash"
    see_nodes(service, host("node-c", 2.0))
    assert [n.node_id for n in (await service.queries.cluster()).nodes] == ["node-c"]
    service.database.write_sync(lambda s: node_table.store(s, None, "it is away", service.now))
    seen = await service.queries.cluster()
    assert (seen.connected, seen.reason) == (False, "it is away")
    assert [n.node_id for n in seen.nodes] == ["node-c"]
