"""Decisions of the scheduler, and the errors of forecasts, as flows, without I/O."""

from __future__ import annotations

from dray import views
from dray._http.calls import Calls, params
from dray._http.transport import Call, Flow


def decisions(calls: Calls, before: int | None, limit: int) -> Flow[list[views.Decision]]:
    call = Call("GET", "/v1/decisions", params(before=before, limit=limit))
    return (yield from calls.read(views.DecisionPage, call)).items


def decision(calls: Calls, number: int) -> Flow[views.ReplayedDecision]:
    return (yield from calls.read(views.ReplayedDecision, Call("GET", f"/v1/decisions/{number}")))


def forecast_errors(calls: Calls) -> Flow[views.ForecastErrors]:
    return (yield from calls.read(views.ForecastErrors, Call("GET", "/v1/forecasts")))
