"""Read the reports of jobs: events, metrics, logs and attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat

import httpx

from dray import errors, views
from dray._async.jobs import JobCalls
from dray._http import sse
from dray._http.transport import LONG_POLL_S, Call, no_answer, params, segment

EVENT_STREAM = "text/event-stream"
SILENCE_S = 15.0
"""Read timeout of a stream, on top of the client's: longer than the pauses between keep-alives."""
RESET = "reset"
"""Event of a server that can't resume after the given id; all events follow from the first one."""
METRIC_TICK_S = 1.0
POINTS_AT_ONCE = 5000
"""Points of each series that an iteration requests at once."""


@dataclass
class _Yielded:
    """The progress of an iteration over the points of metrics."""

    steps: dict[str, int]
    """Name of a series -> step of the last point that was yielded."""
    after_step: int
    """Step after which points are requested."""


class ReportCalls(JobCalls):
    async def follow(self, job_id: str, *, after_seq: int = 0) -> AsyncGenerator[views.Event, None]:
        """Yield each event after `after_seq` when it happens, until the job ends.

        Events are read from one stream (SSE), which is resumed after a broken connection or a
        restart of the server: no event is missed or repeated. Raises TransportError if the server
        is unreachable, or sends nothing, for too long.
        """
        retry = self._connection.patient
        given: dict[int, datetime] = {}
        position, fruitless = after_seq, 0
        silent_since: float | None = None
        while True:
            call = _stream_call(job_id, position)
            decoder = sse.Decoder()
            fruitless += 1
            broken: httpx.RequestError | None = None
            async with aclosing(await self._send(call, patient=True)) as response:
                if response.status_code == 204:  # the job is over, without further events
                    return
                if not response.headers.get("content-type", "").startswith(EVENT_STREAM):
                    url = self._connection.url
                    raise errors.TransportError(f"{url} answered with no event stream")
                try:
                    async for piece in response.aiter_bytes():
                        fruitless, silent_since = 0, None
                        for message in decoder.feed(piece):
                            if message.name == RESET:
                                position = 0
                                continue
                            event = self._connection.parse(views.Event, message.data, call)
                            position = event.seq
                            # Yielded before a reset; in a database restored from a backup, another
                            # event may have the same number.
                            if event.seq <= after_seq or given.get(event.seq) == event.time:
                                continue
                            given[event.seq] = event.time
                            yield event
                            if event.to_state is not None and event.to_state.is_terminal:
                                return
                except httpx.RequestError as error:
                    broken = error
            # Counted from the first break: before, the caller may have spent long on an event.
            silent_since = retry.clock() if silent_since is None else silent_since
            if retry.clock() - silent_since > retry.patience_s:
                if broken is not None:
                    raise no_answer(broken, self._connection.url)
                raise errors.TransportError(f"{self._connection.url} ends every stream of events")
            await asyncio.sleep(retry.delay_s(fruitless + 1, decoder.retry_s))

    async def events(self, job_id: str, *, after_seq: int = 0) -> AsyncGenerator[views.Event, None]:
        """Yield the events so far, after `after_seq`."""
        while True:
            call = Call("GET", _path(job_id, "events"), params(after_seq=after_seq))
            page = await self._read(views.EventPage, call)
            for event in page.items:
                yield event
                after_seq = event.seq
            if not page.items:
                return

    async def metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_step: int | None = None,
        until_step: int | None = None,
        max_points: int | None = None,
        in_order: bool = False,
        times: bool = False,
    ) -> views.Metrics:
        """Return the metrics of rank 0 (or `rank`), all or only `keys`, with at most `max_points`
        points per series. Longer series are thinned out, or with `in_order` cut to the first points
        after `after_step`. after_step, until_step: return this part in more detail. times: whether
        the answer has the time at which each point was reported."""
        query = params(
            keys=keys,
            rank=rank,
            after_step=after_step,
            until_step=until_step,
            max_points=max_points,
            in_order=in_order,
            times=times,
        )
        return await self._read(views.Metrics, Call("GET", _path(job_id, "metrics"), query))

    async def follow_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after: Mapping[str, int] | None = None,
    ) -> AsyncGenerator[views.Point, None]:
        """Yield each point when it is reported, of all series or of `keys`, until the job is over.

        No point is left out. A step that a later attempt trains again is yielded once. Points are
        in the order of steps, except points that are reported after points of higher steps. after:
        the last step that the caller has of each series, to go on from there.
        """
        steps = dict(after or {})
        yielded = _Yielded(steps, max(steps.values(), default=0) - 1)
        # The state is read before the points: if the job is over by then, the points are complete.
        job = await self._job(job_id, patient=True)
        while True:
            async for point in self._new_points(job_id, keys, rank, yielded):
                yield point
            if job.state.is_terminal:
                break
            asked = self._clock()
            known = job.state
            job = await self._job(job_id, METRIC_TICK_S, known, patient=True)
            await self._pause_if_hurried(asked, METRIC_TICK_S, changed=job.state != known)
        # Each series has passed other steps.
        query = params(keys=keys, rank=rank, max_points=2)
        call = Call("GET", _path(job_id, "metrics"), query)
        ends = await self._read(views.Metrics, call, patient=True)
        for key, series in ends.series.items():
            if series.steps[-1] > steps.get(key, -1):
                yielded.after_step = steps.get(key, -1)
                async for point in self._new_points(job_id, [key], rank, yielded):
                    yield point

    async def _new_points(
        self, job_id: str, keys: Sequence[str] | None, rank: int | None, yielded: _Yielded
    ) -> AsyncGenerator[views.Point, None]:
        """Yield the points after `yielded`, and update `yielded`."""
        is_more = True
        while is_more:
            query = params(
                keys=keys,
                rank=rank,
                after_step=yielded.after_step,
                max_points=POINTS_AT_ONCE,
                in_order=True,
                times=True,
            )
            call = Call("GET", _path(job_id, "metrics"), query)
            found = await self._read(views.Metrics, call, patient=True)
            points = [
                views.Point(key=key, step=step, value=value, time=time)
                for key, series in found.series.items()
                for step, value, time in zip(
                    series.steps, series.values, series.times or repeat(None), strict=False
                )
                if step > yielded.steps.get(key, -1)
            ]
            for point in sorted(points, key=lambda point: (point.step, point.key)):
                yielded.steps[point.key] = point.step
                yield point
            yielded.after_step = found.next_step
            is_more = any(len(series.steps) >= POINTS_AT_ONCE for series in found.series.values())

    async def system_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_time: int | None = None,
        max_points: int | None = None,
    ) -> views.SystemMetrics:
        """Return the system metrics of rank 0 (or `rank`) over time, and of its node if it is the
        lowest rank there: all series or only `keys`, with at most `max_points` points each."""
        query = params(keys=keys, rank=rank, after_time=after_time, max_points=max_points)
        call = Call("GET", _path(job_id, "metrics/system"), query)
        return await self._read(views.SystemMetrics, call)

    async def newest_system_metrics(self, job_id: str) -> views.SystemSample:
        """Return the newest system metrics of each rank."""
        call = Call("GET", _path(job_id, "metrics/system/newest"))
        return await self._read(views.SystemSample, call)

    async def logs(
        self,
        job_id: str,
        rank: int | None = None,
        *,
        attempt: int | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[views.LogLine, None]:
        """Yield log lines of all ranks and attempts, or of one; with `follow`, until the job is
        over."""
        cursor: str | None = None
        wait_s = LONG_POLL_S if follow else 0.0
        while True:
            asked = self._clock()
            query = params(rank=rank, attempt=attempt, cursor=cursor, wait_s=wait_s or None)
            call = Call("GET", _path(job_id, "logs"), query, wait_s=wait_s)
            page = await self._read(views.LogPage, call, patient=follow)
            for line in page.items:
                yield line
            cursor = page.next_cursor
            if page.complete or not (page.items or follow):
                return
            await self._pause_if_hurried(asked, wait_s, changed=bool(page.items))

    async def attempts(self, job_id: str) -> list[views.Attempt]:
        """Return the attempts of the job, with the state that each attempt resumed from."""
        return await self._list(views.AttemptPage, _path(job_id, "attempts"))


def _path(job_id: str, part: str) -> str:
    return f"/v1/jobs/{segment(job_id)}/{part}"


def _stream_call(job_id: str, position: int) -> Call:
    headers = {"Accept": EVENT_STREAM, "Cache-Control": "no-store"}
    if position:
        headers["Last-Event-ID"] = str(position)
    return Call("GET", _path(job_id, "events"), (), headers, wait_s=SILENCE_S, streamed=True)
