"""Reports of costs as flows, without I/O."""

from __future__ import annotations

from datetime import datetime

from dray import views
from dray._http.calls import Calls, moment, params
from dray._http.transport import Call, Flow


def report(
    calls: Calls, by: str, since: datetime | None, until: datetime | None
) -> Flow[views.CostReport]:
    query = params(by=by, since=moment(since), until=moment(until))
    return (yield from calls.read(views.CostReport, Call("GET", "/v1/costs", query)))
