"""Following a job: its events over one stream, which is reopened whenever the connection breaks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from typing import Any

import httpx

from dray import errors, views
from dray._http import sse
from dray._http.calls import LONG_POLL_S, Calls, params
from dray._http.transport import (
    Call,
    Close,
    Effect,
    Flow,
    Item,
    Read,
    Sleep,
    Stream,
    no_answer,
    segment,
)

EVENT_STREAM = "text/event-stream"
SILENCE_S = 15.0
"""Read timeout of a stream, on top of the client's: longer than the pauses between keep-alives."""
RESET = "reset"
"""Event of a server that can't resume after the given id; all events follow, from the first."""
METRIC_TICK_S = 1.0
MOST_POINTS = 5000
"""Points of a series in one answer of the server."""


def follow_events(calls: Calls, job_id: str, after_seq: int) -> Stream[views.Event]:
    """Yield each event after `after_seq` once, in order, up to the one that ends the job.

    Raises TransportError when the server stays away, or sends nothing, for too long.
    """
    retry = calls.patient
    given: dict[int, datetime] = {}
    position, fruitless = after_seq, 0
    silent_since: float | None = None
    while True:
        call = _stream_call(job_id, position)
        response = yield from calls.send(call, patient=True)
        if response.status_code == 204:  # the job is over, without further events
            return
        if not response.headers.get("content-type", "").startswith(EVENT_STREAM):
            raise errors.TransportError(f"{calls.connection.url} answered with no event stream")
        decoder = sse.Decoder()
        fruitless += 1
        broken: httpx.RequestError | None = None
        try:
            while piece := (yield Read(response)):
                fruitless, silent_since = 0, None
                for message in decoder.feed(piece):
                    if message.name == RESET:
                        position = 0
                        continue
                    event = calls.parse(views.Event, message.data, call)
                    position = event.seq
                    # Yielded before a reset; in a database restored from a backup, another event
                    # may have the same number.
                    if event.seq <= after_seq or given.get(event.seq) == event.time:
                        continue
                    given[event.seq] = event.time
                    yield Item(event)
                    if event.to_state is not None and event.to_state.is_terminal:
                        return
        except httpx.RequestError as error:
            broken = error
        yield Close(response)
        # Counted from the first break: before, the caller may have spent long on an event.
        silent_since = retry.clock() if silent_since is None else silent_since
        if retry.clock() - silent_since > retry.patience_s:
            if broken is not None:
                raise no_answer(broken, calls.connection.url)
            raise errors.TransportError(f"{calls.connection.url} ends every stream of events")
        yield Sleep(retry.delay_s(fruitless + 1, decoder.retry_s))


def _stream_call(job_id: str, position: int) -> Call:
    headers = {"Accept": EVENT_STREAM, "Cache-Control": "no-store"}
    if position:
        headers["Last-Event-ID"] = str(position)
    path = f"/v1/jobs/{segment(job_id)}/events"
    return Call("GET", path, (), headers, wait_s=SILENCE_S, streamed=True)


def wait_for_state(
    calls: Calls, job_id: str, timeout_s: float | None, wanted: frozenset[views.JobState]
) -> Flow[views.Job]:
    """The job once it is over or in one of the `wanted` states, by long polls."""
    clock = calls.connection.retry.clock
    deadline = None if timeout_s is None else clock() + timeout_s
    job = yield from get(calls, job_id, patient=True)
    while not (job.state in wanted or job.state.is_terminal):
        asked = clock()
        left_s = LONG_POLL_S if deadline is None else deadline - asked
        if left_s <= 0:
            raise errors.WaitTimeout(job, timeout_s or 0.0)
        wait_s = min(LONG_POLL_S, left_s)
        known = job.state
        job = yield from get(calls, job_id, wait_s, known, patient=True)
        yield from calls.pause_if_hurried(asked, wait_s, changed=job.state != known)
    return job


def get(
    calls: Calls,
    job_id: str,
    wait_s: float = 0.0,
    known_state: views.JobState | None = None,
    *,
    patient: bool = False,
) -> Flow[views.Job]:
    """The job; with `wait_s` once its state is not `known_state`."""
    query = params(wait_s=wait_s or None, state=known_state)
    call = Call("GET", f"/v1/jobs/{segment(job_id)}", query, wait_s=wait_s)
    return (yield from calls.read(views.Job, call, patient=patient))


def follow_metrics(
    calls: Calls,
    job_id: str,
    keys: Sequence[str] | None,
    rank: int | None,
    after: Mapping[str, int],
) -> Stream[views.Point]:
    """Yield each point once until the job is over, none left out: in the order of steps, unless
    one is reported later than points of higher steps.

    after: by the name of a series, only points of higher steps.
    """
    given = dict(after)
    after_step: int | None = max(given.values(), default=0) - 1
    # The state is read before the points: if the job is over by then, the points are complete.
    job = yield from get(calls, job_id, patient=True)
    while True:
        after_step = yield from _new_points(calls, job_id, keys, rank, after_step, given)
        if job.state.is_terminal:
            # Points at steps that this has passed: each series has its own.
            call = metrics_call(job_id, keys, rank, None, max_points=2)
            ends = yield from calls.read(views.Metrics, call, patient=True)
            for key, series in ends.series.items():
                if series.steps[-1] > given.get(key, -1):
                    yield from _new_points(calls, job_id, [key], rank, given.get(key, -1), given)
            return
        asked = calls.connection.retry.clock()
        known = job.state
        job = yield from get(calls, job_id, METRIC_TICK_S, known, patient=True)
        yield from calls.pause_if_hurried(asked, METRIC_TICK_S, changed=job.state != known)


def _new_points(
    calls: Calls,
    job_id: str,
    keys: Sequence[str] | None,
    rank: int | None,
    after_step: int | None,
    given: dict[str, int],
) -> Generator[Effect | Item[views.Point], Any, int]:
    """Yield the points after `after_step` that are not in `given`, and note them there; the step
    after which later ones come."""
    while True:
        call = metrics_call(job_id, keys, rank, after_step, MOST_POINTS, in_order=True, times=True)
        found = yield from calls.read(views.Metrics, call, patient=True)
        points = [
            views.Point(key=key, step=step, value=value, time=time)
            for key, series in found.series.items()
            for step, value, time in zip(
                series.steps, series.values, series.times or repeat(None), strict=False
            )
            if step > given.get(key, -1)
        ]
        for point in sorted(points, key=lambda point: (point.step, point.key)):
            given[point.key] = point.step
            yield Item(point)
        after_step = found.next_step
        if all(len(series.steps) < MOST_POINTS for series in found.series.values()):
            return after_step


def metrics_call(
    job_id: str,
    keys: Sequence[str] | None,
    rank: int | None,
    after_step: int | None,
    max_points: int | None,
    *,
    until_step: int | None = None,
    in_order: bool = False,
    times: bool = False,
) -> Call:
    query = (
        *(("keys", key) for key in keys or ()),
        *params(rank=rank, after_step=after_step, until_step=until_step, max_points=max_points),
        *params(in_order="true" if in_order else None, times="true" if times else None),
    )
    return Call("GET", f"/v1/jobs/{segment(job_id)}/metrics", query)
