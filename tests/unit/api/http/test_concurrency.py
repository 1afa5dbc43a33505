"""Calls that take long to answer: some run immediately, some wait, and further ones are refused."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http.concurrency import ConcurrencyLimiter, ConcurrencyLimits
from api.problems import Refused
from dray import views
from dray.spec import JobSpec
from dray.views import JobState
from service.config.settings import Settings
from tests.unit.api.serving import serving, wait_until


async def test_a_caller_runs_two_requests_and_all_callers_four_and_the_others_wait() -> None:
    limiter = ConcurrencyLimiter(ConcurrencyLimits(at_once=4, of_caller=2, waiting_of_caller=3))
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    served: list[str] = []
    go_on = asyncio.Event()

    async def ask(caller: str) -> None:
        try:
            async with limiter.acquire(caller):
                served.append(caller)
                running[caller] += 1
                most[caller] = max(most[caller], running[caller])
                most["all"] = max(most["all"], running.total())
                await go_on.wait()
                running[caller] -= 1
        except Refused:
            refused[caller] += 1

    asked = [asyncio.create_task(ask(caller)) for caller in "abc" for _ in range(7)]
    while refused.total() < 6:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert served == ["a", "a", "b", "b"], "in the order of asking"
    go_on.set()
    await asyncio.gather(*asked)
    assert (max(most[caller] for caller in "abc"), most["all"]) == (2, 4)
    assert refused == dict.fromkeys("abc", 2)
    assert Counter(served) == dict.fromkeys("abc", 5)
    async with limiter.acquire("a"):
        pass


async def test_a_request_that_stops_waiting_is_not_counted() -> None:
    limiter = ConcurrencyLimiter(ConcurrencyLimits(at_once=1, of_caller=1, waiting_of_caller=1))

    async def ask() -> None:
        async with limiter.acquire("a"):
            raise AssertionError("it was given a turn")

    async with limiter.acquire("a"):
        for _ in range(3):  # the next would be refused if the previous call were still waiting
            waiting = asyncio.create_task(ask())
            await asyncio.sleep(0)
            waiting.cancel()
            (end,) = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(end, asyncio.CancelledError)
    async with limiter.acquire("a"):
        pass


def test_a_dry_run_beyond_the_limit_is_a_429_that_says_when_to_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, ThreadPoolExecutor(3) as threads:
        server.context.limiter = ConcurrencyLimiter(
            ConcurrencyLimits(at_once=1, of_caller=1, waiting_of_caller=2)
        )
        jobs = server.context.runtime.jobs
        go_on = asyncio.Event()
        running = most = 0

        async def dry_run(spec: JobSpec, *, owner: str, project: str) -> views.Explanation:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await go_on.wait()
            running -= 1
            reason = views.Reason(code="would_start", message="would start now")
            return views.Explanation(state=JobState.QUEUED, reason=reason)

        monkeypatch.setattr(jobs, "dry_run", dry_run)
        job_id = server.submit()
        ask = "POST", "/v1/jobs?dry_run=true"
        spec = {"recipe": "image_classification"}
        answers = [threads.submit(server.ask, *ask, json=spec) for _ in range(3)]
        wait_until(lambda: server.context.limiter._asked.total() == 3, "three questions")
        for refused in (
            server.ask(*ask, json=spec),
            server.ask("GET", f"/v1/jobs/{job_id}/explain"),
            server.ask("GET", "/v1/jobs", params={"where": "val/loss < 1"}),
            server.ask("GET", "/v1/compare", params={"jobs": f"{job_id},{job_id}"}),
            server.ask("GET", "/v1/experiments"),
            server.ask("GET", "/v1/experiments/rates"),
            server.ask("PATCH", "/v1/experiments/rates", json={"baseline": None}),
        ):
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["code"] == "too_many_requests"
        for method, path, body in (
            ("POST", "runs/search", {"experiment_ids": ["0"]}),
            ("POST", "experiments/search", {}),
            ("GET", "experiments/get-by-name?experiment_name=rates", None),
        ):
            refused = server.ask(method, f"/api/2.0/mlflow/{path}", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error_code"] == "REQUEST_LIMIT_EXCEEDED"
        for other in (f"/v1/jobs/{job_id}", "/v1/jobs"):
            assert server.ask("GET", other).status_code == 200, "other calls go on"
        server._loop.call_soon_threadsafe(go_on.set)
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert most == 1
        assert server.ask("GET", f"/v1/jobs/{job_id}/explain").status_code == 200


def test_changes_of_many_jobs_and_other_requests_do_not_wait_for_each_other(
    tmp_path: Path,
) -> None:
    body = {"action": "hold", "filter": {"name": "a"}, "dry_run": True}
    with serving(tmp_path) as server:
        job_id = server.submit(name="a")
        context, limiter = server.context, server.context.limiter
        context.limiter = ConcurrencyLimiter(ConcurrencyLimits(at_once=0))
        assert server.ask("POST", "/v1/jobs/bulk", json=body).json()["changed"] == 1
        context.limiter = limiter
        context.bulk = ConcurrencyLimiter(ConcurrencyLimits(at_once=0))
        assert server.ask("GET", f"/v1/jobs/{job_id}/explain").status_code == 200


def test_a_caller_that_has_disconnected_waits_no_longer(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.context.limiter = limiter = ConcurrencyLimiter(ConcurrencyLimits(at_once=0))
        job_id = server.submit()
        for ask in (
            f"GET /v1/jobs/{job_id}/explain HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "POST /v1/jobs?dry_run=true HTTP/1.1\r\nHost: localhost\r\nContent-Length: 34\r\n"
            'Content-Type: application/json\r\n\r\n{"recipe": "image_classification"}',
        ):
            url = httpx.URL(server.url)
            with socket.create_connection((url.host, url.port or 0)) as connection:
                connection.sendall(ask.encode())
                wait_until(lambda: limiter._asked.total() == 1, "the question")
            wait_until(lambda: not limiter._asked, "the caller's place")


@pytest.mark.parametrize(
    ("proxies", "callers"),
    [
        (None, {"127.0.0.1": 3}),
        (["10.0.0.0/8"], {"127.0.0.1": 3}),
        (["127.0.0.0/8"], {"192.0.2.1": 1, "192.0.2.2": 2}),
        # Behind several proxies, the last address that is not a proxy of ours is the caller.
        (["127.0.0.1", "192.0.2.2"], {"192.0.2.1": 1, "203.0.113.9": 2}),
    ],
)
def test_a_proxy_that_the_operator_names_is_believed_for_whom_it_calls(
    tmp_path: Path, proxies: list[str] | None, callers: dict[str, int]
) -> None:
    settings: dict[str, Any] = {"forwarded_allow_ips": proxies, "open_to_local_users": True}
    with serving(tmp_path, **settings) as server, ExitStack() as held:
        server.context.limiter = limiter = ConcurrencyLimiter(ConcurrencyLimits(at_once=0))
        job_id = server.submit()
        url = httpx.URL(server.url)
        for forwarded in ("192.0.2.1", *["203.0.113.9, 192.0.2.2"] * 2):
            address = url.host, url.port or 0
            connection = held.enter_context(socket.create_connection(address))
            head = f"GET /v1/jobs/{job_id}/explain HTTP/1.1\r\nHost: localhost\r\n"
            connection.sendall(f"{head}X-Forwarded-For: {forwarded}\r\n\r\n".encode())
        wait_until(lambda: limiter._asked.total() == 3, "the questions")
        assert limiter._asked == callers


def test_a_proxy_that_is_no_address_is_refused_at_the_start() -> None:
    with pytest.raises(
        ValueError, match="contains 'proxy', which is neither an address nor a network"
    ):
        Settings(forwarded_allow_ips=("127.0.0.1", "proxy"))
