"""Sweeps as flows, without I/O."""

from __future__ import annotations

from dray import views
from dray._http.calls import Calls, params
from dray._http.transport import Call, Flow, Item, Stream, segment


def get(calls: Calls, sweep_id: str) -> Flow[views.JobSweep]:
    return (yield from calls.read(views.JobSweep, Call("GET", f"/v1/sweeps/{segment(sweep_id)}")))


def trials(calls: Calls, sweep_id: str, page_size: int) -> Stream[views.Trial]:
    path = f"/v1/sweeps/{segment(sweep_id)}/trials"
    cursor: str | None = None
    while True:
        query = params(limit=page_size, cursor=cursor)
        page = yield from calls.read(views.TrialPage, Call("GET", path, query))
        for trial in page.items:
            yield Item(trial)
        cursor = page.next_cursor
        if cursor is None:
            return
