"""Repeated calls, without a network and without sleeping."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from dray import errors
from dray._http.problems import from_response
from dray._http.transport import Call, Connection, Retry, segment
from dray._sync.calls import Calls

URL = "http://server:1"


class Clock:
    """Time that only advances by sleeping."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    @property
    def now(self) -> float:
        return sum(self.slept)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("dray._sync.calls.time", found)
    return found


def send(call: Call, retry: Retry, answers: list[Any]) -> httpx.Response:
    """Return the result of a call that gets these answers (responses or errors) one after
    another."""
    remaining = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        one = next(remaining)
        if isinstance(one, Exception):
            raise one
        assert isinstance(one, httpx.Response)
        return one

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        response = Calls(Connection(URL, {}, 30.0, retry), http)._send(call)
    assert list(remaining) == []
    return response


def retry(clock: Clock, **more: Any) -> Retry:
    return Retry(**{"patience_s": 3.0, "jitter": lambda: 1.0, "clock": clock, **more})


def problem(status: int, code: str = "", **headers: str) -> httpx.Response:
    body = {"type": "x", "title": "x", "status": status, "detail": "why", "code": code}
    return httpx.Response(status, json=body, headers=headers)


GET = Call("GET", "/x")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 520])
def test_what_says_later_is_tried_again_with_growing_pauses(clock: Clock, status: int) -> None:
    answers = [problem(status), problem(status), httpx.Response(200)]
    response = send(GET, retry(clock), answers)
    assert response.status_code == 200
    assert clock.slept == [0.2, 0.4]


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.ReadTimeout("slow")]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_call_without_an_answer_is_sent_again(
    clock: Clock, method: str, error: Exception
) -> None:
    answers = [error, httpx.Response(200)]
    headers = {"Idempotency-Key": "k"} if method == "POST" else {}
    response = send(Call(method, "/x", (), headers), retry(clock), answers)
    assert (response.status_code, len(clock.slept)) == (200, 1)


@pytest.mark.parametrize("answer", [httpx.ReadError("reset"), problem(503)])
def test_what_may_have_been_done_is_not_done_twice(clock: Clock, answer: Any) -> None:
    with pytest.raises(errors.DrayError):
        send(Call("POST", "/x"), retry(clock), [answer])
    assert clock.now == 0


def test_what_never_arrived_is_sent_again_whatever_it_is(clock: Clock) -> None:
    answers = [httpx.ConnectError("refused"), httpx.Response(200)]
    send(Call("POST", "/x"), retry(clock), answers)
    assert clock.now > 0


def test_a_submit_in_flight_is_waited_for_and_other_conflicts_are_not(clock: Clock) -> None:
    call = Call("POST", "/v1/jobs", (), {"Idempotency-Key": "k"})
    answers = [problem(409, "idempotency_in_flight", **{"Retry-After": "1"}), httpx.Response(201)]
    response = send(call, retry(clock), answers)
    assert (response.status_code, clock.slept) == (201, [1.2])
    with pytest.raises(errors.JobLive):
        send(call, retry(clock), [problem(409, "job_live")])


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 501, 507])
def test_what_would_fail_again_is_not_tried_again(clock: Clock, status: int) -> None:
    with pytest.raises(errors.ApiError):
        send(GET, retry(clock), [problem(status)])
    assert clock.now == 0


def test_patience_ends(clock: Clock) -> None:
    answers = [problem(503, "unavailable")] * 99
    with pytest.raises(errors.Unavailable):
        send(GET, retry(clock), answers)
    assert 1.0 < clock.now <= 3.0


def test_pauses_are_drawn_from_nothing_up_to_a_growing_bound() -> None:
    low, high = Retry(jitter=lambda: 0.0), Retry(max_delay_s=5.0, jitter=lambda: 1.0)
    assert [low.delay_s(tries, None) for tries in (1, 2, 3)] == [0.0, 0.0, 0.0]
    assert [high.delay_s(tries, None) for tries in (1, 2, 3, 99)] == [0.2, 0.4, 0.8, 5.0]


def test_the_pause_that_the_server_asks_for_is_kept(clock: Clock) -> None:
    answers = [problem(429, **{"Retry-After": "2"}), httpx.Response(200)]
    send(GET, retry(clock), answers)
    assert clock.slept == [2.2]


def test_a_call_that_was_refused_untouched_is_sent_again_though_it_has_no_key(clock: Clock) -> None:
    answers = [problem(429), httpx.Response(200)]
    post = Call("POST", "/x")
    response = send(post, retry(clock), answers)
    assert response.status_code == 200


def test_a_pause_longer_than_patience_is_not_slept(clock: Clock) -> None:
    answers = [problem(429, **{"Retry-After": "60"})]
    with pytest.raises(errors.ApiError) as caught:
        send(GET, retry(clock), answers)
    assert (clock.now, caught.value.retry_after_s) == (0, 60.0)


def test_a_retry_after_may_be_a_date_and_nonsense_is_none() -> None:
    def asked(value: str) -> float | None:
        response = problem(503, **{"Retry-After": value})
        response.request = httpx.Request("GET", URL)
        return from_response(response).retry_after_s

    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 95 < (asked(soon) or 0) <= 100
    assert asked("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    assert asked("soon") is asked("-1") is asked("") is None


def test_a_delete_whose_answer_was_lost_is_done_when_the_job_is_gone(clock: Clock) -> None:
    call = Call("DELETE", "/v1/jobs/x")
    answers = [httpx.ReadError("reset"), problem(404, "job_not_found")]
    send(call, retry(clock), answers)
    with pytest.raises(errors.JobNotFound):
        send(call, retry(clock), [problem(404, "job_not_found")])


def test_a_refused_connection_says_how_to_start_a_server(clock: Clock) -> None:
    answers = [httpx.ConnectError("[Errno 111] Connection refused")] * 99
    with pytest.raises(
        errors.ServerUnreachable, match=r"no dray server is reachable.*`make run`"
    ) as caught:
        send(GET, retry(clock), answers)
    assert isinstance(caught.value, ConnectionError)
    assert URL in str(caught.value)


def test_an_answer_that_comes_too_late_is_a_timeout(clock: Clock) -> None:
    with pytest.raises(errors.RequestTimeout) as caught:
        send(GET, retry(clock, patience_s=0.0), [httpx.ReadTimeout("")])
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (code, kind_status, kind)
        for code, kind, kind_status in [
            ("job_not_found", errors.JobNotFound, 404),
            ("unsatisfiable", errors.Unsatisfiable, 422),
            ("from_the_future", errors.Conflict, 409),
            ("from_the_future", errors.NotFound, 404),
            ("from_the_future", errors.BadRequest, 418),
            ("from_the_future", errors.ServerError, 599),
        ]
    ],
)
def test_a_problem_becomes_the_class_of_its_code_or_its_status(
    code: str, status: int, kind: type[errors.ApiError]
) -> None:
    response = problem(status, code)
    response.request = httpx.Request("GET", URL)
    assert type(from_response(response)) is kind


def test_an_answer_of_something_else_is_described() -> None:
    response = httpx.Response(404, text="<html>nginx</html>", request=httpx.Request("GET", URL))
    error = from_response(response)
    assert isinstance(error, errors.NotFound)
    assert "404" in str(error)


def test_an_error_is_shown_with_its_pointer_and_its_hint() -> None:
    body = {"type": "x", "title": "x", "status": 422, "detail": "no field 'a'"}
    body |= {"code": "invalid_document", "pointer": "/train/a", "hint": "did you mean 'b'?"}
    response = httpx.Response(422, json=body, request=httpx.Request("POST", URL))
    error = from_response(response)
    assert str(error) == "/train/a: no field 'a' (did you mean 'b'?)"
    assert (error.pointer, error.hint, error.status) == ("/train/a", "did you mean 'b'?", 422)


@pytest.mark.parametrize(
    ("name", "quoted"), [("a/b", "a%2Fb"), ("a b?", "a%20b%3F"), ("ü", "%C3%BC")]
)
def test_an_id_stays_one_segment_of_the_path(name: str, quoted: str) -> None:
    assert segment(name) == quoted


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_an_id_that_would_change_the_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="be part of a URL"):
        segment(name)


def test_url_and_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_URL", "http://there:1/")
    monkeypatch.setenv("DRAY_TOKEN", "secret")
    found = Connection.open(None, None, 30.0, Retry())
    assert found.url == "http://there:1"
    assert found.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(found)
    given = Connection.open("http://here:2", "other", 30.0, Retry())
    assert (given.url, given.headers["Authorization"]) == ("http://here:2", "Bearer other")
    monkeypatch.delenv("DRAY_URL")
    monkeypatch.delenv("DRAY_TOKEN")
    default = Connection.open(None, None, 30.0, Retry())
    assert default.url == "http://127.0.0.1:8420"
    assert "Authorization" not in default.headers


@pytest.mark.parametrize("url", ["nowhere", "ftp://x", "http://", "http://x?y=z"])
def test_what_is_no_address_is_told_at_once(url: str) -> None:
    with pytest.raises(errors.ServerUnreachable, match="not an http"):
        Connection.open(url, None, 30.0, Retry())


@pytest.mark.parametrize("token", ["a b", "a\nb", "schlüssel"])
def test_a_token_that_no_header_carries_is_told_without_saying_it(token: str) -> None:
    with pytest.raises(ValueError, match="DRAY_TOKEN") as caught:
        Connection.open(URL, token, 30.0, Retry())
    assert token not in str(caught.value)


def test_a_long_poll_gives_the_server_its_time_on_top_of_the_timeout() -> None:
    connection = Connection.open(URL, None, 10.0, Retry())
    timeout = connection.arguments(Call("GET", "/x", wait_s=30.0))["timeout"]
    assert (timeout.read, timeout.connect) == (40.0, 10.0)
