"""/v1/jobs/{id}/events: the events of a job, as pages or as a live stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi import Query as QueryParameters
from fastapi.responses import StreamingResponse
from pydantic import Field

from api.context import Caller, Context, Query, TheContext
from api.http.caching import answer
from api.http.waiting import MAX_WAIT_S, long_poll, unless_over
from api.problems import declare
from dray import views
from service.db.notifications import events_of

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["events"])

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_S = 5.0
"""Interval in seconds between keep-alive comments, and between queries, while there are no
events."""
RETRY = b"retry: 1000\n\n"
"""Makes a client that has lost the connection wait 1000 ms before it reconnects."""
PAGE = 500
MAX_SEQ = 2**31 - 1

logger = logging.getLogger(__name__)


class EventsQuery(Query):
    after_seq: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
    """Return only events whose number is higher than this. Pass the `next_seq` of the previous
    response."""
    limit: Annotated[int, Field(ge=1, le=1000)] = PAGE
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    """Maximum number of seconds to wait for events."""


@router.get(
    "/events",
    operation_id="get_events",
    response_model=views.EventPage,
    responses={
        200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}},
        204: {"description": "A stream was requested, but there will be no further events."},
        **declare("malformed_request", "invalid_parameter", "job_not_found"),
    },
)
async def events(
    request: Request,
    context: TheContext,
    _: Caller,
    job_id: str,
    query: Annotated[EventsQuery, QueryParameters()],
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """List the events of a job in order. Every event is included.

    With `Accept: text/event-stream`, events are streamed as they happen, until the end of the job.
    In the stream, the name of an event is its `type`, and its id is its `seq`. To resume a stream,
    send the id of the last event in `Last-Event-ID`. If that id is unknown, the server sends a
    `reset` event and then all events, starting with the first."""
    if EVENT_STREAM in request.headers.get("accept", ""):
        return await _stream(context, request, job_id, query.after_seq, last_event_id)

    runtime, seq = context.runtime, query.after_seq

    async def look() -> tuple[views.EventPage, bool]:
        # Read the state before the events, so that no events are missing if the job has ended.
        over = query.wait_s > 0 and (await runtime.jobs.get(job_id)).state.is_terminal
        return await runtime.queries.events(job_id, after_seq=seq, limit=query.limit), over

    page, _over = await long_poll(
        context,
        request,
        events_of(job_id),
        query.wait_s,
        look,
        lambda seen: bool(seen[0].items) or seen[1],
    )
    return answer(request, page, {"Vary": "Accept"})


def _last_seq(last_event_id: str | None, newest_seq: int) -> int | None:
    """Return the number of the last event that the client has received. The result is 0 if the
    client sent no id, and None if there is no event with that id."""
    if not last_event_id:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 10):
        return None
    seq = int(last_event_id)
    return seq if seq <= newest_seq else None


async def _stream(
    context: Context, request: Request, job_id: str, after_seq: int, last_event_id: str | None
) -> Response:
    """Respond with a stream. Looks up the newest event before the stream begins, so that an error
    is returned as a problem document."""
    newest_seq, over = await context.runtime.queries.newest_event(job_id)
    last_seq = _last_seq(last_event_id, newest_seq)
    begin = [RETRY]
    if last_seq is None or after_seq > newest_seq:
        begin.append(_reset(newest_seq))
        after_seq = 0
    else:
        after_seq = max(after_seq, last_seq)
        if over and after_seq >= newest_seq:
            return Response(status_code=204)  # an EventSource does not reconnect after 204
    return StreamingResponse(
        _follow(context, request, job_id, after_seq, b"".join(begin), over),
        media_type=EVENT_STREAM,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", "Vary": "Accept"},
    )


async def _follow(
    context: Context, request: Request, job_id: str, after_seq: int, begin: bytes, over: bool
) -> AsyncIterator[bytes]:
    """Yield frames until the job has ended and all of its events have been sent. Events about slots
    can follow the end of the job. Starlette closes the generator when the client disconnects."""
    queries = context.runtime.queries
    yield begin
    with context.runtime.signals.subscribe(events_of(job_id)) as woken:
        while not context.stopping.is_set() and await context.sign_in.knows(request):
            try:
                page = await queries.events(job_id, after_seq=after_seq, limit=PAGE)
            except Exception as error:
                logger.warning("the event stream of %s ended early: %s", job_id, error)
                return  # the client will reconnect with Last-Event-ID
            if page.items:
                yield b"".join(map(_frame, page.items))
                after_seq = page.items[-1].seq
                over = over or any(map(_is_last, page.items))
                continue
            if over:
                return
            woke = await unless_over(context, None, woken.wait(KEEP_ALIVE_S))
            if woke is None:
                return
            if not woke:
                yield b": keep-alive\n\n"


def _is_last(event: views.Event) -> bool:
    return event.to_state is not None and event.to_state.is_terminal


def _frame(event: views.Event) -> bytes:
    """Encode an event as a frame. Neither the JSON of the event nor its type contains a line
    break."""
    return f"event: {event.type}\nid: {event.seq}\ndata: {event.model_dump_json()}\n\n".encode()


def _reset(newest_seq: int) -> bytes:
    """Return a frame that resets the client's last event id, and reports that the stream can't be
    resumed."""
    data = views.Reset(
        code="unknown_event_id",
        message="there is no event with this Last-Event-ID; the stream restarts with the first "
        "event",
        newest_seq=newest_seq,
    )
    return f"event: reset\nid: 0\ndata: {data.model_dump_json()}\n\n".encode()
