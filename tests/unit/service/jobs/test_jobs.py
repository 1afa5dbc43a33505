"""Submitting, waiting for, listing, cancelling, and deleting jobs, with both databases."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import event, func, select

from dray.filters import JobFilter
from dray.views import Job, JobState
from ray_workers.shared.contracts import Cause, Phase
from service.cluster.port import ClusterSnapshot
from service.db.models import DeletedAttemptRow
from service.db.notifications import ATTEMPTS, QUEUE
from service.db.repositories.scheduling import accounting
from service.domain.cursors import encode_cursor
from service.domain.errors import (
    ArtifactNotFound,
    BadCursor,
    IdempotencyInFlight,
    IdempotencyMismatch,
    JobFinished,
    JobLive,
    NotFound,
    StorageUnavailable,
    Unsatisfiable,
)
from service.jobs.idempotency import IdempotencyKey
from service.loops.shared import queue_view
from service.nodes import node_table
from service.telemetry.series_filters import MetricsFilter
from tests.unit.service.helpers import START, Service, log, metrics, spec
from tests.wire import cluster_node


def see_cluster(service: Service, **resources: float) -> None:
    node = cluster_node("node-a", resources)
    snapshot = ClusterSnapshot("session-1", "ray://x", "http://dash", False, (node,))
    service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))


async def test_a_submitted_job_is_answered_as_it_was_written(service: Service) -> None:
    document = spec(
        name="digits", labels={"team": "vision"}, priority=70, resources={"num_workers": 2}
    )
    job, created = await service.jobs.submit(document, owner="ann", project="p")
    assert created
    assert job == await service.jobs.get(job.id)
    assert (job.state, job.reason.code) == (JobState.QUEUED, "submitted")
    assert (job.owner, job.project, job.labels) == ("ann", "p", {"team": "vision"})
    assert job.spec == document.model_dump(mode="json")
    assert (job.attempt, job.world_size, job.priority) == (0, 2, 70)
    assert job.created_at == START


async def test_a_submit_asks_little_and_wakes_the_scheduler_alone(service: Service) -> None:
    """This is done for every job, and each statement takes a tenth of the time."""
    see_cluster(service, CPU=8.0)
    told: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        told.append(statement)

    signals = service.database.signals
    with signals.subscribe(ATTEMPTS) as of_attempts, signals.subscribe(QUEUE) as woken:
        event.listen(service.database.engine, "before_cursor_execute", note)
        await service.submit()
        assert await woken.wait(0)
        assert not await of_attempts.wait(0)
    told = [each for each in told if not each.startswith("BEGIN")]
    assert [each.split()[0] for each in told].count("INSERT") == 3, told
    assert len(told) <= 6, told


async def test_ids_sort_by_the_time_of_submission(service: Service) -> None:
    ids = []
    for _ in range(5):
        ids.append(await service.submit())
        service.advance(0.01)
    assert ids == sorted(ids)


async def test_the_same_key_and_request_give_the_same_job(service: Service) -> None:
    key = IdempotencyKey("k1", "hash-1")
    first, created = await service.jobs.submit(spec(), owner="ann", idempotency=key)
    again, created_again = await service.jobs.submit(spec(), owner="ann", idempotency=key)
    assert (created, created_again) == (True, False)
    assert first == again


async def test_a_key_is_refused_for_another_request(service: Service) -> None:
    await service.jobs.submit(spec(), owner="ann", idempotency=IdempotencyKey("k1", "hash-1"))
    with pytest.raises(IdempotencyMismatch):
        await service.jobs.submit(spec(), owner="ann", idempotency=IdempotencyKey("k1", "other"))
    assert len((await service.jobs.list()).items) == 1


async def test_keys_of_different_owners_do_not_meet(service: Service) -> None:
    key = IdempotencyKey("k1", "hash-1")
    ann, _ = await service.jobs.submit(spec(), owner="ann", idempotency=key)
    bob, created = await service.jobs.submit(spec(), owner="bob", idempotency=key)
    assert created
    assert ann.id != bob.id


async def test_many_submits_with_one_key_at_once_make_one_job(service: Service) -> None:
    key = IdempotencyKey("k1", "hash-1")

    async def submit() -> tuple[Job, bool]:
        while True:
            try:
                return await service.jobs.submit(spec(), owner="ann", idempotency=key)
            except IdempotencyInFlight:
                await asyncio.sleep(0.01)

    answers = await asyncio.gather(*(submit() for _ in range(12)))
    assert len({job.id for job, _ in answers}) == 1
    assert [created for _, created in answers].count(True) == 1
    assert len((await service.jobs.list()).items) == 1


async def test_a_refused_submit_does_not_use_up_its_key(service: Service) -> None:
    key = IdempotencyKey("k1", "hash-1")
    see_cluster(service, CPU=1.0)
    too_large = spec(resources={"num_workers": 2})
    with pytest.raises(Unsatisfiable):
        await service.jobs.submit(too_large, idempotency=key)
    see_cluster(service, CPU=2.0)
    _, created = await service.jobs.submit(too_large, idempotency=key)
    assert created


async def test_a_job_that_can_never_fit_is_refused_with_the_field_at_fault(
    service: Service,
) -> None:
    see_cluster(service, CPU=4.0)
    cases = {
        "/resources/num_workers": {"num_workers": 5},
        "/resources/gpus_per_worker": {"gpus_per_worker": 1},
        "/resources/cpus_per_worker": {"cpus_per_worker": 8},
        "/resources/memory_bytes": {"memory_bytes": 1 << 40},
        "/resources/accelerator": {"accelerator": "H100"},
        "/resources/node_labels": {"node_labels": {"zone": "b"}},
        "/resources/required_topology": {"required_topology": "rack"},
    }
    for pointer, resources in cases.items():
        with pytest.raises(Unsatisfiable) as caught:
            await service.jobs.submit(spec(resources=resources))
        assert caught.value.pointer == pointer, caught.value.message
    assert (await service.jobs.list()).items == []


async def test_a_gang_that_no_rack_could_hold_is_refused_and_a_level_that_is_unknown_always(
    service: Service,
) -> None:
    service.settings.topology = ("rack",)
    nodes = tuple(
        cluster_node(f"node-{at}", {"CPU": 4.0}, labels={"rack": rack})
        for at, rack in enumerate(("r1", "r1", "r2"))
    )
    snapshot = ClusterSnapshot("session-1", "ray://x", "http://dash", False, nodes)
    service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))

    async def refused(num_workers: int, level: str) -> Unsatisfiable:
        wanted = spec(resources={"num_workers": num_workers, "required_topology": level})
        with pytest.raises(Unsatisfiable) as caught:
            await service.jobs.submit(wanted)
        assert caught.value.pointer is not None
        return caught.value

    too_large = await refused(9, "rack")
    assert "the largest rack, r1, has room for 8 at once" in too_large.message
    assert too_large.pointer == "/resources/required_topology"
    assert (await refused(13, "rack")).pointer == "/resources/num_workers"
    job_id = await service.submit(resources={"num_workers": 8, "required_topology": "rack"})
    waiting = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now)[0])
    assert [(j.job_id, j.request.required_level) for j in waiting] == [(job_id, "rack")]
    service.database.write_sync(lambda s: node_table.store(s, None, "Ray is away", service.now))
    unknown = await refused(1, "row")
    assert (
        "'row' is not a level of the topology (DRAY_TOPOLOGY), whose levels are rack, node"
        in unknown.message
    )
    assert unknown.pointer == "/resources/required_topology"


async def test_while_the_cluster_is_unknown_every_job_is_taken(service: Service) -> None:
    see_cluster(service, CPU=1.0)
    service.database.write_sync(lambda s: node_table.store(s, None, "Ray is away", service.now))
    await service.submit(resources={"num_workers": 8})


@pytest.mark.parametrize("named", [True, False], ids=["named", "all there is"])
async def test_a_precision_that_no_gpu_has_is_refused(service: Service, named: bool) -> None:
    see_cluster(service, CPU=8.0, GPU=4.0, **{"accelerator_type:T4": 1.0})
    resources = {"gpus_per_worker": 1} | ({"accelerator": "T4"} if named else {})
    with pytest.raises(Unsatisfiable, match="bf16, which a T4") as caught:
        await service.jobs.submit(spec(resources=resources, train={"precision": "bf16"}))
    assert caught.value.pointer == "/train/precision"
    assert "fp16" in (caught.value.hint or "")
    assert (await service.jobs.list()).items == []
    for precision in ("fp32", "fp16"):
        await service.submit(resources=resources, train={"precision": precision})


async def test_on_heterogeneous_gpus_a_type_that_supports_the_precision_must_be_named(
    service: Service,
) -> None:
    see_cluster(service, CPU=8.0, GPU=4.0, **{"accelerator_type:T4": 1.0, "accelerator_type:L4": 1})
    train = {"precision": "bf16"}
    with pytest.raises(Unsatisfiable, match=r"which a T4 .* might be placed on one") as caught:
        await service.jobs.submit(spec(resources={"gpus_per_worker": 1}, train=train))
    assert "request L4 with resources.accelerator" in (caught.value.hint or "")
    await service.submit(resources={"gpus_per_worker": 1, "accelerator": "L4"}, train=train)


async def test_an_unknown_job_is_not_found(service: Service) -> None:
    for call in (service.jobs.get, service.jobs.cancel, service.jobs.delete):
        with pytest.raises(NotFound):
            await call("job-none")


async def test_pages_show_each_job_once_newest_first(service: Service) -> None:
    ids = [await service.submit(name=f"n{i}") for i in range(7)]
    seen: list[str] = []
    cursor = None
    while True:
        page = await service.jobs.list(limit=3, cursor=cursor)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ids[::-1]


async def test_filters_must_all_hold(service: Service) -> None:
    await service.queue("fast")
    wanted = await service.submit(labels={"team": "a", "kind": "x"}, queue="fast")
    await service.submit(labels={"team": "a"}, queue="fast")
    await service.submit(labels={"team": "a", "kind": "x"})
    query = JobFilter(
        state=(JobState.QUEUED, JobState.RUNNING),
        queue="fast",
        label=("team=a", "kind=x"),
        owner="ann",
        project="vision",
    )
    assert [job.id for job in (await service.jobs.list(query)).items] == [wanted]
    assert (await service.jobs.list(JobFilter(state=(JobState.FAILED,)))).items == []
    assert (await service.jobs.list(JobFilter(owner="bob"))).items == []


async def test_a_cursor_that_was_tampered_with_is_refused(service: Service) -> None:
    for _ in range(3):
        await service.submit()
    good = (await service.jobs.list(limit=1)).next_cursor
    assert good is not None
    flipped = good[:-1] + ("A" if good[-1] != "A" else "B")
    forged = encode_cursor("jobs", {"number": 1})
    foreign = encode_cursor("other", 3)
    for cursor in (flipped, forged, foreign, "", "é", "x" * 70_000, good + "=", good[:8]):
        with pytest.raises(BadCursor):
            await service.jobs.list(cursor=cursor)


async def test_a_waiting_job_is_cancelled_at_once(service: Service) -> None:
    job_id = await service.submit()
    service.advance(5)
    job = await service.jobs.cancel(job_id)
    assert (job.state, job.reason.code) == (JobState.CANCELLED, "cancelled_by_user")
    assert job.finished_at == START + timedelta(seconds=5)


async def test_a_live_job_is_cancelling_until_its_attempt_is_seen_gone(service: Service) -> None:
    job_id = await service.running()
    assert (await service.jobs.cancel(job_id)).state == JobState.CANCELLING
    assert (await service.jobs.cancel(job_id)).state == JobState.CANCELLING
    service.end(job_id, 1, Cause.STOPPED)
    assert (await service.jobs.cancel(job_id)).state == JobState.CANCELLED
    events = (await service.queries.events(job_id)).items
    assert [e.to_state for e in events if e.to_state == JobState.CANCELLING] == ["CANCELLING"]


async def test_a_job_that_ended_by_itself_can_not_be_cancelled(service: Service) -> None:
    job_id = await service.running()
    service.end(job_id, 1)
    with pytest.raises(JobFinished):
        await service.jobs.cancel(job_id)
    assert (await service.jobs.get(job_id)).state == JobState.SUCCEEDED


async def test_only_a_finished_job_can_be_deleted(service: Service) -> None:
    job_id = await service.running()
    with pytest.raises(JobLive):
        await service.jobs.delete(job_id)
    assert (await service.jobs.get(job_id)).state == JobState.RUNNING


async def test_a_deleted_job_leaves_no_row_but_of_its_use_and_no_file(service: Service) -> None:
    job_id = await service.running(labels={"a": "b"})
    other = await service.submit()
    big = [log(i, "x" * 1000) for i in range(100)]
    service.report(
        job_id, 1, [metrics(1, {"loss": 1.0}), *big, service.artifact(job_id, 1, "model")]
    )
    service.end(job_id, 1)
    folder = service.storage.local_path(f"jobs/{job_id}")
    assert folder is not None
    assert list(folder.rglob("*.jsonl"))
    await service.jobs.delete(job_id)
    assert not folder.exists()
    with pytest.raises(NotFound):
        await service.jobs.get(job_id)
    with pytest.raises(NotFound):
        await service.jobs.delete(job_id)
    with service.database.engine.connect() as connection:
        tables = connection.dialect.get_table_names(connection)
        for table in tables:
            columns = {c["name"] for c in connection.dialect.get_columns(connection, table)}
            if "job_id" in columns and table != DeletedAttemptRow.__tablename__:
                query = f"SELECT count(*) FROM {table} WHERE job_id = '{job_id}'"
                assert connection.exec_driver_sql(query).scalar() == 0, table
    assert [job.id for job in (await service.jobs.list()).items] == [other]


async def test_two_processes_can_finish_the_same_deletion(service: Service) -> None:
    job_id = await service.running()
    service.end(job_id, 1)
    for _ in range(2):
        service.database.write_sync(lambda s: accounting.keep(s, [job_id]))
    kept = select(func.count()).where(DeletedAttemptRow.job_id == job_id)
    assert service.database.read_sync(lambda s: s.scalar(kept)) == 1


async def test_a_deletion_that_was_cut_off_is_finished_later(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await service.submit()
    await service.jobs.cancel(job_id)

    def fail(_: str) -> None:
        raise OSError("the power is cut")

    with monkeypatch.context() as patch:
        patch.setattr(service.storage, "delete_tree", fail)
        with pytest.raises(StorageUnavailable, match="power"):
            await service.jobs.delete(job_id)
    assert (await service.jobs.list()).items == []
    assert await service.jobs.deletions.finish() == 1
    assert await service.jobs.deletions.finish() == 0


async def test_a_job_that_cannot_be_erased_does_not_keep_others_or_the_service_from_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await service.submit() for _ in range(3)]
    delete_tree = service.storage.delete_tree

    def fail(key: str) -> None:
        if key == f"jobs/{jobs[0]}" or is_down:
            raise PermissionError(1, "Operation not permitted")
        delete_tree(key)

    is_down = True
    monkeypatch.setattr(service.storage, "delete_tree", fail)
    for job_id in jobs:
        await service.jobs.cancel(job_id)
        with pytest.raises(StorageUnavailable, match="permitted"):
            await service.jobs.delete(job_id)
    is_down = False
    assert await service.jobs.deletions.finish() == 2
    monkeypatch.undo()
    assert await service.jobs.deletions.finish() == 1


@pytest.fixture
async def has_been_read(service: Service, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set after a job has been read."""
    read, get = asyncio.Event(), service.jobs.get

    async def noted(job_id: str) -> Job:
        job = await get(job_id)
        read.set()
        return job

    monkeypatch.setattr(service.jobs, "get", noted)
    return read


async def test_waiting_ends_when_the_state_changes(
    service: Service, has_been_read: asyncio.Event
) -> None:
    job_id = await service.submit()
    waiting = asyncio.create_task(service.jobs.wait(job_id, wait_s=30))
    await has_been_read.wait()  # the wait knows the state by now
    started = asyncio.get_running_loop().time()
    await asyncio.to_thread(service.claim, job_id)
    job = await waiting
    assert job.state == JobState.STARTING
    assert asyncio.get_running_loop().time() - started < 15, "half of its wait"


@pytest.mark.usefixtures("signals_get_lost")
async def test_waiting_ends_also_where_the_process_that_made_the_change_said_nothing(
    service: Service, has_been_read: asyncio.Event
) -> None:
    job_id = await service.submit()
    waiting = asyncio.create_task(service.jobs.wait(job_id, wait_s=60))
    await has_been_read.wait()  # the wait knows the state by now
    await asyncio.to_thread(service.claim, job_id)
    async with asyncio.timeout(30):  # half of what it would wait
        assert (await waiting).state == JobState.STARTING


@pytest.fixture
def signals_get_lost(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.database.signals, "publish", lambda _: None)
    monkeypatch.setattr("service.jobs.service.LOOK_AGAIN_S", 0.01)


async def test_waiting_ends_when_the_time_is_up(service: Service) -> None:
    job_id = await service.submit()
    job = await service.jobs.wait(job_id, wait_s=0.05, known_state=JobState.QUEUED)
    assert job.state == JobState.QUEUED


async def test_waiting_for_what_already_changed_answers_at_once(service: Service) -> None:
    job_id = await service.running()
    async with asyncio.timeout(30):  # half of what it would wait
        job = await service.jobs.wait(job_id, wait_s=60, known_state=JobState.QUEUED)
        assert job.state == JobState.RUNNING
        service.end(job_id, 1)
        job = await service.jobs.wait(job_id, wait_s=60, known_state=JobState.SUCCEEDED)
        assert job.state == JobState.SUCCEEDED


async def test_jobs_are_counted_by_state(service: Service) -> None:
    await service.submit()
    await service.running()
    counts = await service.queries.count_jobs()
    assert counts[JobState.QUEUED] == counts[JobState.RUNNING] == 1
    assert counts[JobState.FAILED] == 0


async def test_the_attempts_phase_is_shown(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    for phase in (Phase.ACQUIRING, Phase.STARTING, Phase.RUNNING):
        service.report(job_id, 1, phase=phase)
        (attempt,) = (await service.queries.attempts(job_id)).items
        assert attempt.state == phase


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
async def test_text_that_no_row_can_hold_finds_nothing(service: Service, text: str) -> None:
    job_id = await service.running()
    for call in (service.jobs.get, service.jobs.cancel, service.queries.events):
        with pytest.raises(NotFound):
            await call(text)
    with pytest.raises(ArtifactNotFound):
        await service.queries.artifact(job_id, text)
    texts: list[dict[str, object]] = [{"queue": text}, {"owner": text}]
    texts += [{"label": (f"{text}=a",)}, {"label": (f"a={text}",)}]
    for given in texts:
        query = JobFilter.model_construct(None, **given)
        assert (await service.jobs.list(query)).items == []
    series = MetricsFilter.model_construct(None, keys=(text,))
    assert (await service.queries.metrics(job_id, series)).series == {}
