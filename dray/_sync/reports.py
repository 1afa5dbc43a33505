# Written by `make blocking` from dray/_async/reports.py: change that file instead.
"""Read the events, metrics, logs and attempts of jobs."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat

import httpx

from dray import errors, views
from dray._http import sse
from dray._http.transport import LONG_POLL_S, Call, no_answer, params, segment
from dray._sync.jobs import JobCalls

EVENT_STREAM = "text/event-stream"
SILENCE_S = 15.0
"""Time in seconds that is added to the client's timeout to get the read timeout of a stream. This
time is longer than the interval between keep-alives."""
RESET = "reset"
"""Event that a server sends if it can't resume the stream after the given id. After this event, the
server sends all events again, beginning with the first."""
METRIC_TICK_S = 1.0
POINTS_AT_ONCE = 5000
"""Number of points per series that an iteration requests at once."""


@dataclass
class _Yielded:
    """Progress of an iteration over metric points."""

    steps: dict[str, int]
    """Series name -> step of the last yielded point."""
    after_step: int
    """Points after this step are requested next."""


class ReportCalls(JobCalls):
    def follow(self, job_id: str, *, after_seq: int = 0) -> Generator[views.Event, None, None]:
        """Yield each event after `after_seq` as it happens, until the job ends.

        Events are read from a stream (SSE). The stream is resumed after a broken connection or a
        restart of the server, without missing or repeating events. Raises TransportError if the
        server is unreachable or silent for too long.
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
            with closing(self._send(call, patient=True)) as response:
                if response.status_code == 204:  # the job has ended, and there are no more events
                    return
                if not response.headers.get("content-type", "").startswith(EVENT_STREAM):
                    url = self._connection.url
                    raise errors.TransportError(f"{url} did not respond with an event stream")
                try:
                    for piece in response.iter_bytes():
                        fruitless, silent_since = 0, None
                        for message in decoder.feed(piece):
                            if message.name == RESET:
                                position = 0
                                continue
                            event = self._connection.parse(views.Event, message.data, call)
                            position = event.seq
                            # Skip events that were yielded before the server restarted the stream.
                            # Compare the time too, because a different event may have the same
                            # number after the database has been restored from a backup.
                            if event.seq <= after_seq or given.get(event.seq) == event.time:
                                continue
                            given[event.seq] = event.time
                            yield event
                            if event.to_state is not None and event.to_state.is_terminal:
                                return
                except httpx.RequestError as error:
                    broken = error
            # Start the clock at the first interruption, because the caller might have spent a long
            # time on an event before the interruption.
            silent_since = retry.clock() if silent_since is None else silent_since
            if retry.clock() - silent_since > retry.patience_s:
                if broken is not None:
                    raise no_answer(broken, self._connection.url)
                raise errors.TransportError(
                    f"{self._connection.url} keeps closing the event stream"
                )
            time.sleep(retry.delay_s(fruitless + 1, decoder.retry_s))

    def events(self, job_id: str, *, after_seq: int = 0) -> Generator[views.Event, None, None]:
        """Yield the existing events after `after_seq`."""
        while True:
            call = Call("GET", _path(job_id, "events"), params(after_seq=after_seq))
            page = self._read(views.EventPage, call)
            for event in page.items:
                yield event
                after_seq = event.seq
            if not page.items:
                return

    def metrics(
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
        """Return the metrics of rank 0 (or `rank`), either all or only `keys`, with at most
        `max_points` points per series. Longer series are downsampled or, with `in_order`, truncated
        to the first points after `after_step`. after_step, until_step: return only this range of
        steps, in more detail. times: include the time at which each point was reported."""
        query = params(
            keys=keys,
            rank=rank,
            after_step=after_step,
            until_step=until_step,
            max_points=max_points,
            in_order=in_order,
            times=times,
        )
        return self._read(views.Metrics, Call("GET", _path(job_id, "metrics"), query))

    def follow_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Generator[views.Point, None, None]:
        """Yield each point of all series, or only of `keys`, as it is reported, until the job ends.

        No point is omitted. If a later attempt repeats a step, the step is yielded only once.
        Points are yielded in the order of their steps, unless they are reported after points with
        higher steps. after: for each series, the last step that the caller already has.
        """
        steps = dict(after or {})
        yielded = _Yielded(steps, max(steps.values(), default=0) - 1)
        # Read the state before the points, so that all points are included if the job has ended.
        job = self._job(job_id, patient=True)
        while True:
            for point in self._new_points(job_id, keys, rank, yielded):
                yield point
            if job.state.is_terminal:
                break
            asked = self._clock()
            known = job.state
            job = self._job(job_id, METRIC_TICK_S, known, patient=True)
            self._pause_if_hurried(asked, METRIC_TICK_S, changed=job.state != known)
        # Not all series have points at the same steps.
        query = params(keys=keys, rank=rank, max_points=2)
        call = Call("GET", _path(job_id, "metrics"), query)
        ends = self._read(views.Metrics, call, patient=True)
        for key, series in ends.series.items():
            if series.steps[-1] > steps.get(key, -1):
                yielded.after_step = steps.get(key, -1)
                for point in self._new_points(job_id, [key], rank, yielded):
                    yield point

    def _new_points(
        self, job_id: str, keys: Sequence[str] | None, rank: int | None, yielded: _Yielded
    ) -> Generator[views.Point, None, None]:
        """Yield the points that come after `yielded`, and update `yielded`."""
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
            found = self._read(views.Metrics, call, patient=True)
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

    def system_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_time: int | None = None,
        max_points: int | None = None,
    ) -> views.SystemMetrics:
        """Return the system metrics of rank 0 (or `rank`) over time, either all series or only
        `keys`, with at most `max_points` points per series. The metrics of the node are included if
        the rank is the lowest rank on its node."""
        query = params(keys=keys, rank=rank, after_time=after_time, max_points=max_points)
        call = Call("GET", _path(job_id, "metrics/system"), query)
        return self._read(views.SystemMetrics, call)

    def newest_system_metrics(self, job_id: str) -> views.SystemSample:
        """Return the most recent system metrics of each rank."""
        call = Call("GET", _path(job_id, "metrics/system/newest"))
        return self._read(views.SystemSample, call)

    def logs(
        self,
        job_id: str,
        rank: int | None = None,
        *,
        attempt: int | None = None,
        contains: str | None = None,
        follow: bool = False,
    ) -> Generator[views.LogLine, None, None]:
        """Yield the log lines of all ranks and attempts, or only of the given rank or attempt, or
        only lines that contain a text, in upper or lower case. With `follow`, yield new lines until
        the job ends."""
        cursor: str | None = None
        wait_s = LONG_POLL_S if follow else 0.0
        while True:
            asked = self._clock()
            query = params(
                rank=rank,
                attempt=attempt,
                contains=contains,
                cursor=cursor,
                wait_s=wait_s or None,
            )
            call = Call("GET", _path(job_id, "logs"), query, wait_s=wait_s)
            page = self._read(views.LogPage, call, patient=follow)
            yield from page.items
            goes_on = bool(page.items) or (contains is not None and page.next_cursor != cursor)
            cursor = page.next_cursor
            if page.complete or not (goes_on or follow):
                return
            self._pause_if_hurried(asked, wait_s, changed=goes_on)

    def samples(
        self, job_id: str, *, step: int | None = None
    ) -> Generator[views.SampledTexts, None, None]:
        """Yield the texts that the job's model generated at its evaluations, in the order of the
        steps, or only the texts of `step`. The prompts are in the job's document."""
        path, query = _path(job_id, "samples"), params(step=step)
        return self._items(views.SampledTextsPage, path, query, page_size=100)

    def attempts(self, job_id: str) -> list[views.Attempt]:
        """Return the attempts of the job, with the state from which each attempt resumed."""
        return self._list(views.AttemptPage, _path(job_id, "attempts"))


def _path(job_id: str, part: str) -> str:
    return f"/v1/jobs/{segment(job_id)}/{part}"


def _stream_call(job_id: str, position: int) -> Call:
    headers = {"Accept": EVENT_STREAM, "Cache-Control": "no-store"}
    if position:
        headers["Last-Event-ID"] = str(position)
    return Call("GET", _path(job_id, "events"), (), headers, wait_s=SILENCE_S, streamed=True)
