"""The cost of onlookers for training: 200 clients that poll and 20 that follow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from benchmarks.figures import median_of_ratios
from benchmarks.machine import BenchmarkError
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.serving.load import exchange, get, post
from benchmarks.serving.servers import Running
from benchmarks.serving.training import training
from dray import Client
from dray.views import JobState

NUM_JOBS = 8
NUM_POLLERS = 200
NUM_FOLLOWERS = 20
NUM_AWAITING = 10
"""Followers to whose jobs something happens."""
PERIOD_S = 5.0
"""Pause between two polls of one client."""
TURN_S = 15.0
WARMUP_S = 20.0
SLOWDOWN_GOAL = 1.01
P99_GOAL_S = 0.1

METHOD = (
    f"A real `python -m api` with its embedded Ray and {NUM_JOBS} slots trains {NUM_JOBS} jobs "
    "of one worker each (the digits CNN), which together need more cores than the machine has.",
    f"Looked on: every {PERIOD_S:g} s, {NUM_POLLERS} clients each request the status of one job "
    f"and its new metrics. {NUM_FOLLOWERS} other clients hold an event stream open, "
    f"{NUM_AWAITING} of them for a job that waits for a slot and is cancelled during the turn. "
    "The clients run in one process on the same machine, so the figures include their work.",
    "An event: from sending the cancellation until the follower has read the event's line.",
    f"The floor: {NUM_POLLERS} clients request `/healthz` equally often, which reads nothing and "
    "returns two words, and there are no followers. This is the cost of HTTP in Python and of "
    "the clients, regardless of the requests.",
    f"Turns of {TURN_S:g} s without clients, with the clients, and with the floor's clients "
    "alternate (A B C C B A). The training speed is the number of steps of all jobs in the "
    "turn, according to the stored series, over the duration of the turn.",
    "Slowdown: for neighbouring turns, the speed without clients over the speed with clients; "
    "shown is the median, with an interval from a bootstrap of the pairs. A/A: one turn without "
    "clients over the next.",
    "Nothing lost: each poller received every step of its job between its first and last poll, "
    "each stream contained every event number, the streams of cancelled jobs ended, and each "
    "stored series has every step.",
)


@dataclass
class Seen:
    """Measurements of the clients of all turns."""

    latencies_s: list[float] = field(default_factory=list)
    deliveries_s: list[float] = field(default_factory=list)
    num_points: int = 0
    gaps: list[str] = field(default_factory=list)


class Crowd(StrEnum):
    """The clients of a turn."""

    NOBODY = "nobody looks on"
    FLOOR = "asked for nothing"
    ALL = "looked on"


@dataclass(frozen=True)
class Turn:
    crowd: Crowd
    steps_per_s: float
    server_share: float
    """Share of one processor that the service takes, without Ray and training."""


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    seen, turns = Seen(), list[Turn]()
    with training(NUM_JOBS) as (server, client, job_ids):
        progress(f"{NUM_JOBS} jobs train; warming up")
        time.sleep(WARMUP_S)
        for number in range(num_rounds):
            order = (Crowd.NOBODY, Crowd.ALL, Crowd.FLOOR)[:: 1 if number % 2 == 0 else -1]
            turns += [_turn(server, client, job_ids, seen, crowd) for crowd in order]
            speeds = ", ".join(f"{t.crowd} {t.steps_per_s:.1f} steps/s" for t in turns[-3:])
            progress(f"round {number + 1}: {speeds}")
        seen.gaps += _holes(client, job_ids)
    if seen.gaps:
        raise BenchmarkError(f"something was lost: {seen.gaps[:5]}")
    return conclude(turns, seen)


def _turn(server: Running, client: Client, job_ids: list[str], seen: Seen, crowd: Crowd) -> Turn:
    waiting = _submit_waiting(client) if crowd is Crowd.ALL else []
    own = server.processes[0]
    steps, began = _steps(client, job_ids), time.monotonic()
    used = sum(own.cpu_times()[:2])
    if crowd is Crowd.NOBODY:
        time.sleep(TURN_S)
    elif crowd is Crowd.FLOOR:
        asyncio.run(_knock(server.port))
    else:
        asyncio.run(_look_on(server.port, job_ids, waiting, seen))
    took = time.monotonic() - began
    share = (sum(own.cpu_times()[:2]) - used) / took
    return Turn(crowd, (_steps(client, job_ids) - steps) / took, share)


def _submit_waiting(client: Client) -> list[str]:
    """Jobs for which there is no slot while the others train."""
    document = {"name": "waits", "recipe": "image_classification", "resources": {"num_workers": 2}}
    return [client.submit(document).id for _ in range(NUM_AWAITING)]


def _steps(client: Client, job_ids: list[str]) -> int:
    """Steps of all jobs so far, as the service has stored them."""
    jobs = [client.get(job_id) for job_id in job_ids]
    return sum(job.progress.step for job in jobs if job.progress is not None)


async def _look_on(port: int, job_ids: list[str], waiting: list[str], seen: Seen) -> None:
    until = time.monotonic() + TURN_S
    followers = [
        _follow(port, job_ids[number % NUM_JOBS], until, seen)
        for number in range(NUM_FOLLOWERS - NUM_AWAITING)
    ]
    followers += [
        _await_cancelled(port, job_id, (number + 1) / (NUM_AWAITING + 1) * TURN_S, until, seen)
        for number, job_id in enumerate(waiting)
    ]
    pollers = [
        _poll(port, job_ids[number % NUM_JOBS], number / NUM_POLLERS * PERIOD_S, until, seen)
        for number in range(NUM_POLLERS)
    ]
    await asyncio.gather(*pollers, *followers)


async def _knock(port: int) -> None:
    """Send as many requests as all onlookers do, for the smallest answer."""
    until = time.monotonic() + TURN_S

    async def knocks(offset_s: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(offset_s)
        try:
            while time.monotonic() < until:
                for _ in range(2):
                    await exchange(reader, writer, get("/healthz", port))
                await asyncio.sleep(PERIOD_S)
        finally:
            writer.close()

    await asyncio.gather(*(knocks(n / NUM_POLLERS * PERIOD_S) for n in range(NUM_POLLERS)))


async def _poll(port: int, job_id: str, offset_s: float, until: float, seen: Seen) -> None:
    """One client: first all of the last steps, then whatever is new."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    steps: dict[int, Any] = {}
    after = None
    await asyncio.sleep(offset_s)
    try:
        while time.monotonic() < until:
            path = f"/v1/jobs/{job_id}"
            metrics = f"{path}/metrics?keys=train/loss&max_points=100000"
            if after is None:
                newest = json.loads(await exchange(reader, writer, get(path, port)))
                after = (newest["progress"] or {"step": 0})["step"]
            for asked in (path, f"{metrics}&after_step={after}"):
                began = time.perf_counter()
                answer = await exchange(reader, writer, get(asked, port))
                seen.latencies_s.append(time.perf_counter() - began)
            found = json.loads(answer)
            series = found["series"].get("train/loss", {"steps": [], "values": []})
            steps.update(zip(series["steps"], series["values"], strict=True))
            after = found["next_step"]
            await asyncio.sleep(PERIOD_S)
    finally:
        writer.close()
    seen.num_points += len(steps)
    if steps and len(steps) != max(steps) - min(steps) + 1:
        seen.gaps.append(
            f"a poller of {job_id} has {len(steps)} steps of {min(steps)} to {max(steps)}"
        )


async def _await_cancelled(
    port: int, job_id: str, after_s: float, until: float, seen: Seen
) -> None:
    """Follow a job that is cancelled meanwhile: its stream reports this at once, and ends."""
    sent = 0.0

    async def cancel() -> None:
        nonlocal sent
        await asyncio.sleep(after_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = time.perf_counter()
        await exchange(reader, writer, post(f"/v1/jobs/{job_id}/cancel", port, b""))
        writer.close()

    last, _ = await asyncio.gather(_follow(port, job_id, until, seen), cancel())
    if last is None or last[0] != JobState.CANCELLED:
        seen.gaps.append(f"the stream of {job_id} did not end with its cancellation: {last}")
    else:
        seen.deliveries_s.append(last[1] - sent)


async def _follow(port: int, job_id: str, until: float, seen: Seen) -> tuple[str, float] | None:
    """Hold an event stream open; its ids must count up without a gap.

    The state that the last event led to, and when it came.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        "Accept: text/event-stream\r\n\r\n"
    )
    writer.write(head.encode())
    ids, last = [], None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic()):
                while line := await reader.readline():
                    if line.startswith(b"id:"):
                        ids.append(int(line[3:]))
                    elif line.startswith(b"data:"):
                        event = json.loads(line[5:])
                        last = (str(event.get("to_state")), time.perf_counter())
    finally:
        writer.close()
    if ids != list(range(1, len(ids) + 1)) or not ids:
        seen.gaps.append(f"a follower of {job_id} got the events {ids}")
    return last


def _holes(client: Client, job_ids: list[str]) -> list[str]:
    """Steps that the stored series lack."""
    found = []
    for job_id in job_ids:
        after, count, last = None, 0, 0
        while True:
            page = client.metrics(job_id, keys=["train/loss"], after_step=after, max_points=100_000)
            steps = page.series["train/loss"].steps if "train/loss" in page.series else []
            new = [step for step in steps if step > last]
            if not new:
                break
            count, last, after = count + len(new), new[-1], new[-1]
        if count != last:
            found.append(f"{job_id} has {count} of {last} steps")
    return found


def conclude(turns: list[Turn], seen: Seen) -> Result:
    speeds = {crowd: [t.steps_per_s for t in turns if t.crowd is crowd] for crowd in Crowd}
    quiet = speeds[Crowd.NOBODY]
    slowdown = median_of_ratios(list(zip(quiet, speeds[Crowd.ALL], strict=True)))
    floor = median_of_ratios(list(zip(quiet, speeds[Crowd.FLOOR], strict=True)))
    same = [
        (one, two) if number % 2 else (two, one)
        for number, (one, two) in enumerate(pairwise(quiet))
    ]
    ordered = sorted(seen.latencies_s)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    same_again = median_of_ratios(same or [(1.0, 1.0)])
    shares = {crowd: [t.server_share for t in turns if t.crowd is crowd] for crowd in Crowd}
    return Result(
        name="onlookers",
        title="Many who look on while jobs train",
        method=METHOD,
        rows=[
            *(
                Row(
                    f"a step of all jobs together, {crowd}",
                    [1 / speed for speed in speeds[crowd]],
                )
                for crowd in Crowd
            ),
            Row("a poll", seen.latencies_s),
            Row("an event, to its follower", seen.deliveries_s),
        ],
        comparisons=[
            Comparison(
                label="training time, looked on / not",
                n=len(quiet),
                ratio=slowdown,
                same=same_again,
                goal=f"at most {SLOWDOWN_GOAL}; p99 of a poll at most {seconds(P99_GOAL_S)}",
                met=slowdown.value <= SLOWDOWN_GOAL and p99 <= P99_GOAL_S,
            ),
            Comparison(
                label="training time, asked for nothing / not",
                n=len(quiet),
                ratio=floor,
                same=same_again,
                goal="none: what any server in Python would cost here",
                met=None,
            ),
        ],
        tables=[
            Table(
                "Polls and the service's own processor time",
                ("", "value"),
                [
                    ["polls", str(len(ordered))],
                    ["p50", seconds(p50)],
                    ["p99", seconds(p99)],
                    ["points that pollers got", str(seen.num_points)],
                    ["lost", "nothing"],
                    *(
                        [
                            f"share of one processor, {crowd}",
                            f"{sum(share) / len(share):.1%}",
                        ]
                        for crowd, share in shares.items()
                    ),
                ],
            )
        ],
    )
