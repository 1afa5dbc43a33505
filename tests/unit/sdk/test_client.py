"""The synchronous and asynchronous clients with a real server."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from dray import AsyncClient, Client, JobSpec, JobState, errors
from dray._http.transport import Retry
from ray_workers.shared.contracts import Cause
from tests.unit.api.routes.reports.test_checkpoints import saved
from tests.unit.api.serving import LiveServer, serving, wait_until
from tests.unit.sdk.lossy import Lossy
from tests.unit.service.helpers import log, metrics, used

JOB = {"recipe": "image_classification"}
IMPATIENT = Retry(patience_s=0.0)


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_both_clients_have_the_same_methods_and_parameters() -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    blocking, asynchronous = surface(Client), surface(AsyncClient)
    assert blocking.pop("close") == asynchronous.pop("aclose")
    assert "submit" in blocking
    assert blocking == asynchronous


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_each_method_has_a_docstring(kind: type) -> None:
    methods = inspect.getmembers(kind, inspect.isfunction)
    assert not [name for name, one in methods if not name.startswith("_") and not one.__doc__]


def test_a_job_is_submitted_as_a_mapping_a_spec_or_a_file(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: image_classification\nname: from-file\n")
    spec = JobSpec.model_validate({**JOB, "name": "spec", "train": {"epochs": 3}})
    names = [client.submit(given).name for given in ({**JOB, "name": "m"}, spec, path, str(path))]
    assert names == ["m", "spec", "from-file", "from-file"]


def test_a_plan_is_of_the_document_and_what_is_given(server: LiveServer, client: Client) -> None:
    plan = client.plan({**JOB, "resources": {"num_workers": 2}}, memory_bytes_per_rank=1 << 30)
    assert {mesh.name for mesh in plan.meshes} == {"data 2", "shard 2"}
    assert plan.memory_bytes_per_rank == 1 << 30

    async def same() -> object:
        async with AsyncClient(server.url) as other:
            return await other.plan(
                {**JOB, "resources": {"num_workers": 2}}, memory_bytes_per_rank=1 << 30
            )

    assert asyncio.run(same()) == plan
    with pytest.raises(errors.NotPlannable):
        client.plan({"script": {"entrypoint": "train.py"}})


def test_what_json_can_not_carry_is_refused_before_it_is_sent(client: Client) -> None:
    for value in (float("nan"), object()):
        with pytest.raises(errors.SpecError, match="JSON"):
            client.submit({**JOB, "train": {"seed": value}})
    with pytest.raises(errors.SpecError) as caught:
        client.submit({"script": {"entrypoint": "a.py", "parameters": {"a/b": [float("inf")]}}})
    assert caught.value.pointer == "/script/parameters/a~1b/0"


def test_a_wrong_document_raises_with_the_field_and_the_hint(client: Client) -> None:
    with pytest.raises(errors.Unprocessable) as caught:
        client.submit({**JOB, "trian": {}})
    assert (caught.value.pointer, caught.value.hint) == ("/trian", "did you mean 'train'?")


def test_one_key_makes_one_job(client: Client) -> None:
    first = client.submit(JOB, idempotency_key="sdk")
    assert client.submit(JOB, idempotency_key="sdk").id == first.id
    with pytest.raises(errors.IdempotencyMismatch):
        client.submit({**JOB, "name": "b"}, idempotency_key="sdk")
    with pytest.raises(errors.BadIdempotencyKey):
        client.submit(JOB, idempotency_key="x" * 256)


def test_a_submit_whose_answer_was_lost_makes_one_job(server: LiveServer) -> None:
    """The server gets the request, and the connection fails before the answer is read."""
    transport = Lossy()
    with Client(server.url, transport=transport, retry=Retry(patience_s=60)) as client:
        job = client.submit({**JOB, "labels": {"test": "lost"}})
        assert [found.id for found in client.jobs(label={"test": "lost"})] == [job.id]
    assert len(transport.lost) == 1


def test_listing_goes_through_all_pages(client: Client) -> None:
    made = [client.submit({**JOB, "labels": {"test": "sdk-pages"}}).id for _ in range(5)]
    found = client.jobs(label={"test": "sdk-pages"}, state="QUEUED", page_size=2)
    assert [job.id for job in found] == made[::-1]
    assert not list(client.jobs(label={"test": "sdk-pages"}, queue="other"))


def test_waiting_ends_with_the_job(client: Client, server: LiveServer) -> None:
    job_id = server.submit()

    def finish() -> None:
        wait_until(lambda: server.num_waiting(job_id), "the client to wait")
        server.train(job_id)
        server.succeed(job_id)

    thread = in_background(finish)
    assert client.wait(job_id, 30).state is JobState.SUCCEEDED
    thread.join()


def test_waiting_for_a_state_ends_there_or_at_the_end(client: Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id)
    assert client.wait(job_id, 30, states=[JobState.RUNNING]).state is JobState.RUNNING
    server.hands.end(job_id, 1, Cause.BAD_DATA)
    assert client.wait(job_id, 30, states=["RUNNING"]).state is JobState.FAILED


def test_waiting_too_long_raises_with_the_job_as_it_is(client: Client, server: LiveServer) -> None:
    with pytest.raises(errors.WaitTimeout, match=r"still QUEUED after 0\.2 s") as caught:
        client.wait(server.submit(), 0.2)
    assert caught.value.job.state is JobState.QUEUED


def test_following_gives_each_event_once_up_to_the_end(client: Client, server: LiveServer) -> None:
    job_id = server.submit()
    following = client.follow(job_id)
    assert next(following).to_state is JobState.QUEUED
    thread = in_background(
        lambda: (
            wait_until(lambda: server.num_waiting(job_id), "the client to follow"),
            server.train(job_id),
            server.succeed(job_id),
        )
    )
    rest = list(following)
    thread.join()
    assert rest[-1].to_state is JobState.SUCCEEDED
    assert [event.seq for event in rest] == list(range(2, 2 + len(rest)))
    assert [event.seq for event in client.events(job_id)] == list(range(1, 2 + len(rest)))
    assert list(client.follow(job_id, after_seq=rest[-1].seq)) == []


def test_logs_are_followed_to_the_end(client: Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, log(0, "first"))
    assert [line.text for line in client.logs(job_id)] == ["first"]
    following = client.logs(job_id, follow=True)
    assert next(following).text == "first"
    thread = in_background(
        lambda: (
            wait_until(lambda: server.num_waiting(job_id), "the client to follow"),
            server.hands.report(job_id, 1, [log(1, "second")]),
            server.succeed(job_id, log(2, "third")),
        )
    )
    assert [line.text for line in following] == ["second", "third"]
    thread.join()
    assert [line.text for line in client.logs(job_id, rank=1)] == []


def test_the_rest_of_a_job_is_read(client: Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, metrics(1, {"train/loss": float("nan"), "lr": 0.5}))
    server.hands.report(job_id, 1, [server.hands.checkpoint(job_id, 1, 1)])
    found = client.metrics(job_id, ["train/loss"])
    assert {key: series.values for key, series in found.series.items()} == {"train/loss": ["NaN"]}
    assert [attempt.attempt for attempt in client.attempts(job_id)] == [1]
    assert [checkpoint.step for checkpoint in client.checkpoints(job_id)] == [1]
    assert client.explain(job_id).state is JobState.RUNNING
    assert client.cluster().connected is False
    assert client.get(job_id).summary == {"lr": 0.5, "train/loss": "NaN"}


def test_cancel_and_delete_raise_what_stands_in_the_way(client: Client, server: LiveServer) -> None:
    job_id = server.submit()
    with pytest.raises(errors.JobLive):
        client.delete(job_id)
    assert client.cancel(job_id).state is JobState.CANCELLED
    client.delete(job_id)
    with pytest.raises(errors.JobNotFound):
        client.get(job_id)
    done = server.submit()
    server.train(done)
    server.succeed(done)
    with pytest.raises(errors.JobFinished):
        client.cancel(done)


MODEL = bytes(range(256)) * 100


def test_a_server_that_is_none_is_named() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>hello</html>"))
    with (
        Client("http://localhost", transport=transport) as client,
        pytest.raises(errors.TransportError, match="not a valid Job"),
    ):
        client.get("job")


def test_answers_with_fields_of_a_newer_server_are_read() -> None:
    body = {"connected": True, "nodes": [], "colour": "blue"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
    with Client("http://localhost", transport=transport) as client:
        assert client.cluster().connected


def test_nobody_listening_is_a_sentence() -> None:
    with (
        Client("http://127.0.0.1:9", retry=IMPATIENT) as client,
        pytest.raises(errors.ServerUnreachable, match="no dray server is reachable"),
    ):
        client.cluster()


def test_the_token_is_sent_and_its_absence_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    path = folder / "tokens"
    path.write_text(f"ann:{hashlib.sha256(b'secret').hexdigest()}\n")
    with serving(folder / "home", tokens_file=path) as server:
        with Client(server.url, "secret") as client:
            assert client.submit(JOB).owner == "ann"
        with Client(server.url) as client, pytest.raises(errors.Unauthorized, match="DRAY_TOKEN"):
            client.cluster()


def test_a_server_that_says_stop_at_once_is_not_hammered(server: LiveServer) -> None:
    """If long polls return immediately, for example because the server is stopping, there are
    pauses between them."""
    job = json.loads(server.ask("GET", f"/v1/jobs/{server.submit()}").text)
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=job)

    with (
        Client("http://localhost", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(errors.WaitTimeout),
    ):
        client.wait("job", 0.7)
    assert len(asked) <= 4


async def all_of(client: AsyncClient, server: LiveServer, dest: Path) -> dict[str, Any]:
    job = await client.submit({**JOB, "labels": {"test": "async"}})
    listed = [found.id async for found in client.jobs(label={"test": "async"})]
    await asyncio.to_thread(
        server.train, job.id, log(0, "hello"), server.artifact(job.id, "model.bin", MODEL)
    )
    waiting = asyncio.create_task(client.wait(job.id, 30))
    following = asyncio.create_task(collect(client, job.id))
    await asyncio.to_thread(
        wait_until, lambda: server.num_waiting(job.id) >= 2, "the client to wait and follow"
    )
    await asyncio.to_thread(server.succeed, job.id)
    return {
        "listed": listed == [job.id],
        "state": (await waiting).state,
        "last": (await following)[-1],
        "logs": [line.text async for line in client.logs(job.id, follow=True)],
        "files": [path.read_bytes() for path in await client.download(job.id, dest)],
        "explained": (await client.explain(job.id)).state,
        "deleted": await client.delete(job.id),
    }


async def collect(client: AsyncClient, job_id: str) -> list[JobState | None]:
    return [event.to_state async for event in client.follow(job_id)]


async def test_the_asynchronous_client_does_all_of_it_too(
    server: LiveServer, tmp_path: Path
) -> None:
    async with AsyncClient(server.url) as client:
        done = await all_of(client, server, tmp_path)
        with pytest.raises(errors.NotFound):
            await client.get("job-none")
    assert done == {
        "listed": True,
        "state": JobState.SUCCEEDED,
        "last": JobState.SUCCEEDED,
        "logs": ["hello"],
        "files": [MODEL],
        "explained": JobState.SUCCEEDED,
        "deleted": None,
    }


def test_following_outlives_a_restart_of_the_server(
    tmp_path_factory: pytest.TempPathFactory, server: LiveServer
) -> None:
    """Half of the answers are lost or refused, but every event is received once and in order."""
    job_id = server.submit()
    server.train(job_id)
    server.succeed(job_id)
    real = httpx.HTTPTransport()
    count = 0

    class Restarting(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal count
            count += 1
            if count % 2:
                raise httpx.ConnectError("refused", request=request)
            return real.handle_request(request)

    with Client(server.url, transport=Restarting()) as client:
        seqs = [event.seq for event in client.follow(job_id)]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) >= 3


async def test_each_method_gives_the_same_awaited(
    client: Client, server: LiveServer, tmp_path: Path
) -> None:
    job_id = server.submit()
    frames = [log(0, "hello"), metrics(1, {"loss": 0.5}), saved(server, job_id, 10)]
    frames.append(used(server.hands.now, {"system/cpu": 1.5}))
    server.train(job_id, *frames, server.artifact(job_id, "model.bin", MODEL))
    server.succeed(job_id)
    async with AsyncClient(server.url) as other:
        for name in ("get", "metrics", "attempts", "checkpoints", "artifacts", "explain"):
            found = await getattr(other, name)(job_id)
            assert found == getattr(client, name)(job_id), name
        assert await other.checkpoint_files(job_id, 10) == client.checkpoint_files(job_id, 10)
        for name in ("system_metrics", "newest_system_metrics"):
            found = await getattr(other, name)(job_id)
            assert found == getattr(client, name)(job_id), name
        assert client.system_metrics(job_id, ["system/cpu"]).series["system/cpu"].values == [1.5]
        assert client.newest_system_metrics(job_id).ranks[0].values == {"system/cpu": 1.5}
        assert await other.cluster() == client.cluster()
        for name in ("events", "follow", "logs", "follow_metrics"):
            streamed = [one async for one in getattr(other, name)(job_id)]
            assert streamed == list(getattr(client, name)(job_id)), name
            assert streamed
        with pytest.raises(errors.JobFinished):
            await other.cancel(job_id)


def test_times_without_a_zone_are_refused_here(client: Client) -> None:
    with pytest.raises(ValueError, match="no time zone"):
        list(client.jobs(created_after=datetime(2026, 1, 1)))


def test_jobs_are_narrowed_by_time_owner_and_project(client: Client) -> None:
    before = datetime.now(UTC)
    made = client.submit({**JOB, "labels": {"test": "narrow"}})
    chosen = {"test": "narrow"}
    after = made.created_at + timedelta(microseconds=1)
    assert [job.id for job in client.jobs(label=chosen, created_after=made.created_at)] == [made.id]
    assert not list(client.jobs(label=chosen, created_after=after))
    assert not list(client.jobs(label=chosen, created_before=before - timedelta(hours=1)))
    assert [job.id for job in client.jobs(label=chosen, owner=made.owner)] == [made.id]
    assert not list(client.jobs(label=chosen, project="another"))


def test_a_job_is_found_by_how_its_id_begins_and_by_its_name(client: Client) -> None:
    first, second = (client.submit({**JOB, "name": name}).id for name in ("found a", "found b"))
    assert client.resolve(first) == first
    assert client.resolve("found a") == first
    assert client.resolve(second[:-1]) == second
    assert client.resolve("@last") == second
    assert [job.id for job in client.jobs(name="found a", owner="@me")] == [first]
    unknown = "job-" + "0" * 26
    assert client.resolve(unknown) == unknown  # a complete id is returned, and using it fails
    for reference in ("job-zzz", "none of this name", ".."):
        with pytest.raises(errors.JobNotFound, match=f"there is no job {reference}"):
            client.resolve(reference)
    with pytest.raises(ValueError, match="an id must not be empty"):
        client.resolve("")


def test_a_name_that_several_jobs_have_is_an_error_with_the_newest_first(client: Client) -> None:
    made = [client.submit({**JOB, "name": "twice"}).id for _ in range(12)]
    with pytest.raises(errors.AmbiguousJob, match="matches more than 10 jobs") as caught:
        client.resolve("twice")
    assert [job.id for job in caught.value.candidates] == made[:1:-1]


def test_the_asynchronous_client_resolves_as_well(server: LiveServer) -> None:
    async def last() -> str:
        async with AsyncClient(server.url) as client:
            job = await client.submit(JOB)
            assert await client.resolve("@last") == job.id
            return job.id

    assert asyncio.run(last())
