"""A minimal client that sends the requests of an open page.

50 tabs of a real browser would use the cores on which training is measured, whereas users' browsers
run on other machines. `observe` counts the requests of a real page, for comparison.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.browsing.browser import chromium
from benchmarks.machine import BenchmarkError
from benchmarks.serving.load import read_answer

if TYPE_CHECKING:
    from playwright.sync_api import Request

MAX_POINTS = 800
REREAD_POINTS = 2 * MAX_POINTS
"""A page that has more points of a series reads the series again from the start."""
METRICS = "/metrics"
JOB_POLLS = {
    "": 3.0,
    METRICS: 5.0,
    "/explain": 30.0,
    "/attempts": 60.0,
    "/checkpoints": 30.0,
    "/annotations": 30.0,
}
"""Paths below the job's path that a job page requests, and the seconds between requests. In the
first ten seconds of a job, it requests the first two more often."""
LIST_POLLS = {"/v1/jobs?brief=true&limit=50": 4.0, "/v1/queues": 30.0}
HEADERS = (
    "Accept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: en-US\r\nPragma: no-cache\r\n"
    "Cache-Control: no-cache\r\nConnection: keep-alive\r\nSec-Fetch-Dest: empty\r\n"
    "Sec-Fetch-Mode: cors\r\nSec-Fetch-Site: same-origin\r\nUser-Agent: Mozilla/5.0 (X11; Linux "
    "x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/150.0.0.0 Safari/537.36\r\nsec-ch-ua: "
    '"Chromium";v="150", "Not.A/Brand";v="24"\r\nsec-ch-ua-mobile: ?0\r\nsec-ch-ua-platform: '
    '"Linux"\r\n'
)
"""Headers that a browser sends."""
_ETAG = re.compile(rb"\r\netag: ([^\r]+)", re.IGNORECASE)


@dataclass
class Asked:
    """Counts of the requests of pages."""

    is_counted: bool = False
    routes: Counter[str] = field(default_factory=Counter)
    """Number of requests by route."""
    latencies_s: list[float] = field(default_factory=list)
    num_not_modified: int = 0
    num_refused: int = 0
    """Responses with status 429, after which the client retries later, like a page."""
    num_bytes: int = 0
    """Bytes of the bodies of all responses."""

    def add(self, target: str, status: bytes, took_s: float, num_bytes: int) -> None:
        if self.is_counted:
            self.routes[route_of(target)] += 1
            self.latencies_s.append(took_s)
            self.num_bytes += num_bytes
            self.num_not_modified += status == b"304"
            self.num_refused += status == b"429"


def route_of(target: str) -> str:
    """Return the path of a request with a placeholder for the id."""
    return re.sub(r"job-[0-9a-z]+", "{job_id}", urlsplit(target).path)


class OpenPage:
    """One page, with the state that it keeps between requests."""

    def __init__(self, port: int, asked: Asked, turn: float) -> None:
        """turn: the fraction of its period, from 0 to 1, after which each poll begins. It is
        different for pages opened at different times."""
        self._port = port
        self._asked = asked
        self._turn = turn
        self._tags: dict[str, str] = {}
        self._bodies: dict[str, bytes] = {}
        self._lock = asyncio.Lock()
        self._next: int | None = None
        self._num_points = 0

    async def show_list(self) -> None:
        """Act as the job list, until cancelled."""
        await self._run([self._polls(*poll) for poll in LIST_POLLS.items()])

    async def show_job(self, job_id: str) -> None:
        """Act as a job page that shows the job's curves, until cancelled."""
        path = f"/v1/jobs/{job_id}"
        polls = [
            self._repeat(functools.partial(self._read_metrics, path), every_s)
            if part == METRICS
            else self._polls(path + part, every_s)
            for part, every_s in JOB_POLLS.items()
        ]
        await self._run([*polls, self._follow(f"{path}/events")])

    async def _run(self, doing: Sequence[Awaitable[None]]) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(*doing)
        finally:
            self._writer.close()

    def _polls(self, target: str, every_s: float) -> Awaitable[None]:
        return self._repeat(functools.partial(self._get, target), every_s)

    async def _repeat(self, ask: Callable[[], Awaitable[object]], every_s: float) -> None:
        await asyncio.sleep(self._turn * every_s)
        while True:
            await ask()
            await asyncio.sleep(every_s)

    async def _read_metrics(self, path: str) -> None:
        is_whole = self._next is None or self._num_points > REREAD_POINTS
        after = "" if is_whole else f"&after_step={self._next}"
        target = f"{path}{METRICS}?rank=0&max_points={MAX_POINTS}{after}"
        answer = json.loads(await self._get(target))
        longest = max((len(one["steps"]) for one in answer["series"].values()), default=0)
        self._num_points = longest if is_whole else self._num_points + longest
        self._next = answer["next_step"]

    async def _get(self, target: str) -> bytes:
        """Get like `fetch` with cache mode `no-cache`: conditionally if a response is cached."""
        known = self._tags.get(target)
        async with self._lock:
            began = time.perf_counter()
            self._writer.write(self._head(target, f"If-None-Match: {known}\r\n" if known else ""))
            head, body = await read_answer(self._reader)
        took_s = time.perf_counter() - began
        status = head.split(b" ", 2)[1]
        self._asked.add(target, status, took_s, len(body))
        if status == b"304":
            return self._bodies[target]
        if status == b"429":
            return b""
        if status != b"200":
            raise BenchmarkError(f"{target} was answered by {head.splitlines()[0].decode()}")
        if tag := _ETAG.search(head):
            self._tags[target], self._bodies[target] = tag[1].decode(), body
        return body

    async def _follow(self, target: str) -> None:
        """Hold the event stream open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._head(target, "Last-Event-ID: 0\r\n", "text/event-stream"))
        try:
            while await reader.readline():
                pass
        finally:
            writer.close()
        raise BenchmarkError(f"the stream {target} has ended")

    def _head(self, target: str, more: str, accept: str = "*/*") -> bytes:
        head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAccept: {accept}\r\n"
        return f"{head}{HEADERS}{more}\r\n".encode()


def observe(
    port: int, places: Sequence[str], settle_s: float, watch_s: float
) -> list[Counter[str]]:
    """Return how often the page at each place requests each route, in a real browser that has all
    of them open at once."""
    with chromium() as browser:
        context = browser.new_context()
        found = [Counter[str]() for _ in places]
        for place, routes in zip(places, found, strict=True):
            page = context.new_page()
            page.on("request", functools.partial(_count, routes))
            page.goto(f"http://127.0.0.1:{port}/#/{place}", wait_until="commit", timeout=60_000)
        page.wait_for_timeout(1000 * settle_s)
        before = [Counter(routes) for routes in found]
        page.wait_for_timeout(1000 * watch_s)
        return [routes - earlier for routes, earlier in zip(found, before, strict=True)]


def _count(routes: Counter[str], request: Request) -> None:
    routes[route_of(request.url)] += 1
