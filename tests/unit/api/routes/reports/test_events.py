from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy.orm import Session

from api.routes.reports import events as events_route
from service.db.repositories import jobs as repository
from service.domain.errors import DatabaseUnavailable
from service.lifecycle.transitions import remark
from tests.unit.api.serving import LiveServer, serving, wait_until

STREAM = {"Accept": "text/event-stream"}


def frames(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield each event of a stream with its id, as an EventSource does."""
    last_id = None
    for line in lines:
        if line.startswith("id: "):
            last_id = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            yield {**json.loads(line.removeprefix("data: ")), "id": last_id}


def raw_frames(text: str) -> list[dict[str, str]]:
    """Return the fields of each event of a stream that has ended."""
    blocks = [block.split("\n") for block in text.split("\n\n") if "data: " in block]
    return [dict(line.split(": ", 1) for line in block) for block in blocks]


def test_events_are_numbered_without_gaps_and_paged_by_number(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    server.train(job_id)
    server.succeed(job_id)
    seqs, after = [], 0
    while page := http.get(f"/v1/jobs/{job_id}/events?limit=1&after_seq={after}").json()["items"]:
        seqs.append(page[0]["seq"])
        after = page[0]["seq"]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) >= 3


def test_a_long_poll_of_events_answers_when_one_comes(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    url = f"/v1/jobs/{job_id}/events?after_seq=1&wait_s=60"
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(http.get, url, timeout=70)
        wait_until(lambda: server.num_waiting(job_id), "the long poll")
        server.hands.claim(job_id)
        page = waiting.result().json()
    assert page["items"][0]["to_state"] == "STARTING"
    assert page["next_seq"] == page["items"][-1]["seq"]
    assert time.monotonic() - began < 30, "half of what it would wait"


def test_a_stream_follows_a_job_to_its_end(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=STREAM) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        coming = frames(response.iter_lines())
        assert next(coming)["to_state"] == "QUEUED"
        server.hands.claim(job_id)
        assert next(coming)["to_state"] == "STARTING"
        server.hands.report(job_id, 1)
        server.succeed(job_id)
        rest = list(coming)  # the server closes the stream
    assert rest[-1]["to_state"] == "SUCCEEDED"
    assert [event["id"] for event in rest] == [event["seq"] for event in rest]


def test_a_stream_goes_on_after_the_last_event_id(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id)
    server.succeed(job_id)
    everything = http.get(f"/v1/jobs/{job_id}/events").json()["items"]
    url = f"/v1/jobs/{job_id}/events"
    response = http.get(url, headers={**STREAM, "Last-Event-ID": "2"})
    found = list(frames(iter(response.text.splitlines())))
    assert [event["seq"] for event in found] == [event["seq"] for event in everything[2:]]


def test_a_stream_goes_on_to_what_is_told_after_the_end_and_no_further(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    server.train(job_id)
    server.succeed(job_id)
    ended = len(http.get(f"/v1/jobs/{job_id}/events").json()["items"])

    def tell(session: Session) -> None:
        job = repository.lock(session, job_id)
        assert job is not None
        now = server.hands.now
        remark(
            session,
            job,
            type_="slot_released",
            code="slot_released",
            message="",
            now=now,
        )

    server.hands.database.write_sync(tell)
    for after in (0, ended):
        url = f"/v1/jobs/{job_id}/events?after_seq={after}"
        with http.stream("GET", url, headers=STREAM, timeout=20) as response:
            seqs = [event["id"] for event in frames(response.iter_lines())]
        assert seqs == list(range(after + 1, ended + 2))


def test_a_stream_that_has_nothing_more_to_tell_says_do_not_come_back(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    http.post(f"/v1/jobs/{job_id}/cancel")
    headers = {**STREAM, "Last-Event-ID": "2"}
    assert http.get(f"/v1/jobs/{job_id}/events", headers=headers).status_code == 204


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30, "٣", "3", "job-1", "0x1"])
def test_a_stream_that_can_not_go_on_where_it_was_says_so_and_begins_anew(
    http: httpx.Client, server: LiveServer, last: str
) -> None:
    job_id = server.submit()
    http.post(f"/v1/jobs/{job_id}/cancel")
    headers = {**STREAM, "Last-Event-ID": last.encode()}
    response = http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert response.status_code == 200
    reset, *replayed = raw_frames(response.text)
    assert (reset["event"], reset["id"]) == ("reset", "0")
    assert json.loads(reset["data"])["newest_seq"] == 2
    assert [(frame["event"], frame["id"]) for frame in replayed] == [("state", "1"), ("state", "2")]


def test_a_stream_that_begins_beyond_the_newest_event_begins_anew(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    http.post(f"/v1/jobs/{job_id}/cancel")
    response = http.get(f"/v1/jobs/{job_id}/events?after_seq=3", headers=STREAM)
    assert [frame["event"] for frame in raw_frames(response.text)] == ["reset", "state", "state"]


@pytest.mark.parametrize("last", ["", "0", "00"])
def test_a_stream_from_the_start_is_no_reset(
    http: httpx.Client, server: LiveServer, last: str
) -> None:
    job_id = server.submit()
    http.post(f"/v1/jobs/{job_id}/cancel")
    headers = {**STREAM, "Last-Event-ID": last}
    response = http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert response.text.startswith("retry: ")
    assert [frame["event"] for frame in raw_frames(response.text)] == ["state", "state"]


def test_a_stream_of_a_job_that_is_not_there_is_a_problem(http: httpx.Client) -> None:
    response = http.get("/v1/jobs/job-none/events", headers=STREAM)
    assert (response.status_code, response.json()["code"]) == (404, "job_not_found")


def test_a_quiet_stream_is_kept_alive_by_comments(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_route, "KEEP_ALIVE_S", 0.05)
    with http.stream("GET", f"/v1/jobs/{server.submit()}/events", headers=STREAM) as response:
        assert any(line == ": keep-alive" for line in response.iter_lines())


def test_a_stream_whose_reader_has_gone_ends(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=STREAM) as response:
        queries = frames(response.iter_lines())  # kept: httpx disconnects if it is collected
        next(queries)
        wait_until(lambda: server.num_waiting(job_id), "the stream to wait")
        queries.close()
    wait_until(lambda: not server.num_waiting(job_id), "the stream to end")


def test_a_stream_that_can_not_be_read_on_ends_so_that_its_reader_comes_back(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = server.submit()

    async def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailable("the database does not respond")

    with monkeypatch.context() as broken:
        broken.setattr(server.context.runtime.queries, "events", away)
        assert http.get(f"/v1/jobs/{job_id}/events", headers=STREAM).text == "retry: 1000\n\n"
    http.post(f"/v1/jobs/{job_id}/cancel")
    resumed = http.get(f"/v1/jobs/{job_id}/events", headers={**STREAM, "Last-Event-ID": "1"})
    assert [frame["id"] for frame in raw_frames(resumed.text)] == ["2"]


def test_a_stop_ends_a_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("home")) as server:
        job_id = server.submit()
        url = f"{server.url}/v1/jobs/{job_id}/events"
        with (
            httpx.Client(trust_env=False) as client,
            client.stream("GET", url, headers=STREAM, timeout=30) as response,
        ):
            coming = frames(response.iter_lines())
            next(coming)
            wait_until(lambda: server.num_waiting(job_id), "the stream to wait")
            began = time.monotonic()
            server.ask_to_stop()
            assert list(coming) == []
            assert time.monotonic() - began < 20, "it would stay open for ever"
