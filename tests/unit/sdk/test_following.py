"""Following and waiting in spite of interrupted streams, resets and server restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from dray import AsyncClient, Client, JobState, errors
from dray._http.transport import Retry
from dray.views import Event
from tests.marks import ONE_SET
from tests.unit.api.serving import LiveServer, serving, wait_until
from tests.unit.service.helpers import START, metrics

PATIENT = Retry(first_delay_s=0.01, max_delay_s=0.05)


def event(seq: int, to_state: str | None = None, second: int = 0) -> str:
    body = Event.model_validate(
        {
            "seq": seq,
            "time": f"2026-01-01T00:00:{second:02d}Z",
            "type": "state",
            "to_state": to_state,
            "attempt": 1,
            "code": "c",
            "message": "line\u2028break",
        }
    )
    return f"event: state\nid: {seq}\ndata: {body.model_dump_json()}\n\n"


RESET = 'event: reset\nid: 0\ndata: {"code": "unknown_event_id"}\n\n'


class Streams(httpx.BaseTransport):
    """Answers each call for the stream with the next item of `answers`, and records the ids that
    are sent."""

    def __init__(self, *answers: str | int | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["accept"] == "text/event-stream"
        self.asked.append(request.headers.get("last-event-id"))
        answer = self._answers.pop(0)
        if isinstance(answer, int):
            return httpx.Response(answer)
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, headers=headers, stream=Pieces(answer))


class Pieces(httpx.SyncByteStream):
    """A body that is interrupted at BREAK."""

    def __init__(self, text: str | Exception) -> None:
        self._text = text

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._text, str)
        whole, broken, _ = self._text.partition("BREAK")
        yield whole.encode()
        if broken:
            raise httpx.ReadError("the connection broke")


def follow(transport: httpx.BaseTransport, after_seq: int = 0, retry: Retry = PATIENT) -> list[int]:
    with Client("http://localhost", transport=transport, retry=retry) as client:
        return [found.seq for found in client.follow("job", after_seq=after_seq)]


def test_a_stream_that_breaks_is_resumed_after_the_last_event() -> None:
    streams = Streams(
        event(1) + event(2) + "id: 3\ndata: {hal" + "BREAK",
        event(3),
        ": keep-alive\n\n",
        event(4, "SUCCEEDED") + event(5),
    )
    assert follow(streams) == [1, 2, 3, 4]
    assert streams.asked == [None, "2", "3", "3"]


def test_a_server_that_is_away_is_waited_for() -> None:
    assert follow(Streams(event(1), 503, 502, event(2, "FAILED"))) == [1, 2]


def test_after_a_reset_what_was_given_is_not_given_again() -> None:
    streams = Streams(
        event(1) + event(2),
        RESET + event(1) + event(2) + event(3),
        event(4, "CANCELLED"),
    )
    assert follow(streams) == [1, 2, 3, 4]
    assert streams.asked == [None, "2", "3"]


def test_after_a_reset_another_event_under_an_old_number_is_given() -> None:
    """A database that was restored from a backup continues to count from an earlier number."""
    streams = Streams(
        event(1) + event(2) + event(3), RESET + event(1) + event(2, "SUCCEEDED", second=9)
    )
    assert follow(streams) == [1, 2, 3, 2]


def test_a_reset_does_not_bring_back_what_the_caller_had_before() -> None:
    assert follow(Streams(RESET + event(1) + event(2) + event(3, "FAILED")), after_seq=2) == [3]


def test_a_job_that_is_over_has_no_more_events() -> None:
    streams = Streams(204)
    assert follow(streams, after_seq=7) == []
    assert streams.asked == ["7"]


def test_a_server_that_ends_every_stream_is_given_up() -> None:
    clock = iter(range(0, 10_000, 10))
    impatient = Retry(first_delay_s=0.0, clock=lambda: float(next(clock)))
    with pytest.raises(errors.TransportError, match="keeps closing the event stream"):
        follow(Streams(*[""] * 50), retry=impatient)


def test_who_takes_long_with_an_event_does_not_lose_the_stream() -> None:
    now = 0.0
    patient = Retry(first_delay_s=0.0, clock=lambda: now)
    streams = Streams(event(1) + "BREAK", event(2, "SUCCEEDED"))
    with Client("http://localhost", transport=streams, retry=patient) as client:
        following = client.follow("job")
        assert next(following).seq == 1
        now += 3600
        assert [found.seq for found in following] == [2]


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: httpx.Response(200, text="<html>"),
        lambda _: httpx.Response(
            200, text="data: {}\n\n", headers={"content-type": "text/event-stream"}
        ),
    ],
)
def test_what_is_no_stream_of_events_is_said(
    answer: Callable[[httpx.Request], httpx.Response],
) -> None:
    with pytest.raises(
        errors.TransportError, match=r"did not respond with an event stream|is not a valid Event"
    ):
        follow(httpx.MockTransport(answer))


def test_who_stops_iterating_closes_the_stream(server: LiveServer) -> None:
    job_id = server.submit()
    with Client(server.url) as client:
        following = client.follow(job_id)
        assert next(following).seq == 1
        wait_until(lambda: server.num_waiting(job_id), "the stream")
        following.close()
        wait_until(lambda: not server.num_waiting(job_id), "the server to see it go")


async def test_who_stops_iterating_closes_the_stream_of_the_asynchronous_client_too(
    server: LiveServer,
) -> None:
    job_id = server.submit()
    async with AsyncClient(server.url) as client:
        following = client.follow(job_id)
        assert (await anext(following)).seq == 1
        await following.aclose()
        await asyncio.to_thread(
            wait_until, lambda: not server.num_waiting(job_id), "the server to see it go"
        )


class Moving(httpx.BaseTransport):
    """A server that may use another port after a restart."""

    url: str | None = None

    def __init__(self) -> None:
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.url is None:
            raise httpx.ConnectError("refused", request=request)
        here = httpx.URL(self.url)
        request.url = request.url.copy_with(host=here.host, port=here.port)
        return self._real.handle_request(request)


@ONE_SET
@pytest.mark.parametrize("way", ["wait", "follow"])
def test_waiting_and_following_outlive_a_restart_of_the_server(
    tmp_path_factory: pytest.TempPathFactory, way: str
) -> None:
    home = tmp_path_factory.mktemp("restarted")
    transport = Moving()
    found: list[JobState | int] = []

    def watch() -> None:
        with Client("http://localhost", transport=transport, retry=PATIENT) as client:
            if way == "wait":
                found.append(client.wait(job_id, 30).state)
            else:
                found.extend(one.seq for one in client.follow(job_id))

    with serving(home) as server:
        transport.url = server.url
        job_id = server.submit()
        thread = threading.Thread(target=watch)
        thread.start()
        wait_until(lambda: server.num_waiting(job_id), "the client")
        transport.url = None
        server.ask_to_stop()
    with serving(home) as server:
        transport.url = server.url
        wait_until(lambda: server.num_waiting(job_id), "the client to come back")
        server.train(job_id)
        server.succeed(job_id)
        thread.join(30)
        seqs = [one.seq for one in Client(server.url).events(job_id)]
    assert found == ([JobState.SUCCEEDED] if way == "wait" else seqs)


def test_points_are_followed_each_once_to_the_end(server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, metrics(1, {"loss": 3.0, "lr": 0.1}))
    found: list[Any] = []

    def watch() -> None:
        with Client(server.url) as client:
            found.extend(
                (point.step, point.key, point.value) for point in client.follow_metrics(job_id)
            )

    thread = threading.Thread(target=watch)
    thread.start()
    wait_until(lambda: server.num_waiting(job_id), "the client")
    server.hands.report(job_id, 1, [metrics(2, {"loss": float("inf")})])
    wait_until(lambda: len(found) == 3, "the second point")
    server.succeed(job_id, metrics(3, {"loss": 1.0}))
    thread.join(30)
    assert found == [(1, "loss", 3.0), (1, "lr", 0.1), (2, "loss", "Infinity"), (3, "loss", 1.0)]
    with Client(server.url) as client:
        assert [point.step for point in client.follow_metrics(job_id, ["lr"])] == [1]


def test_points_that_come_late_or_in_many_pages_are_followed_too(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The series is behind others, is read in pages of two steps, and also from a given
    position."""
    monkeypatch.setattr("dray._sync.reports.POINTS_AT_ONCE", 2)
    job_id = server.submit()
    server.train(job_id, *(metrics(n, {"loss": 1.0}) for n in range(7)))
    found: list[Any] = []

    def watch() -> None:
        with Client(server.url) as client:
            found.extend((one.key, one.step, one.time) for one in client.follow_metrics(job_id))

    thread = threading.Thread(target=watch)
    thread.start()
    wait_until(lambda: server.num_waiting(job_id), "the client")
    server.hands.report(job_id, 1, [metrics(7, {"loss": 1.0}), metrics(2, {"val": 1.0})])
    server.succeed(job_id)
    thread.join(30)
    at = START.timestamp()
    wanted = [*(("loss", n, at) for n in range(8)), ("val", 2, at)]
    assert sorted(found) == sorted(wanted)
    with Client(server.url) as client:
        after = client.follow_metrics(job_id, after={"loss": 5, "val": 1})
        assert [(one.key, one.step) for one in after] == [("loss", 6), ("loss", 7), ("val", 2)]
