"""Preemption and fault injection as flows, without I/O."""

from __future__ import annotations

import json
import uuid

from dray import views
from dray._http.calls import LONG_POLL_S, Calls, params
from dray._http.transport import Call, Flow, segment
from dray.views import DrillKind

JSON = "application/json"


def preempt(calls: Calls, job_id: str, grace_s: float | None) -> Flow[views.Job]:
    path = f"/v1/jobs/{segment(job_id)}/preempt"
    if grace_s is None:
        return (yield from calls.read(views.Job, Call("POST", path)))
    content = json.dumps({"grace_s": grace_s}).encode()
    call = Call("POST", path, headers={"Content-Type": JSON}, content=content)
    return (yield from calls.read(views.Job, call))


def drill(
    calls: Calls,
    job_id: str,
    kind: DrillKind,
    rank: int,
    at_step: int | None,
    wait: bool,
    idempotency_key: str | None,
) -> Flow[views.Drill]:
    """The drill when it is over; without `wait`, as soon as the server accepted it."""
    body = {"kind": kind.value, "rank": rank}
    if at_step is not None:
        body["at_step"] = at_step
    headers = {
        "Content-Type": JSON,
        # One key for all tries: a lost answer must not inject the fault twice.
        "Idempotency-Key": uuid.uuid4().hex if idempotency_key is None else idempotency_key,
    }
    path = f"/v1/jobs/{segment(job_id)}"
    content = json.dumps(body).encode()
    found = yield from calls.read(views.Drill, Call("POST", f"{path}/drill", (), headers, content))
    clock = calls.connection.retry.clock
    while wait and not found.state.is_over:
        asked = clock()
        call = Call(
            "GET",
            f"{path}/drills/{segment(found.id)}",
            params(wait_s=LONG_POLL_S),
            wait_s=LONG_POLL_S,
        )
        found = yield from calls.read(views.Drill, call, patient=True)
        yield from calls.pause_if_hurried(asked, LONG_POLL_S, changed=found.state.is_over)
    return found


def drills(calls: Calls, job_id: str) -> Flow[list[views.Drill]]:
    call = Call("GET", f"/v1/jobs/{segment(job_id)}/drills")
    return (yield from calls.read(views.DrillPage, call)).items


def hangs(calls: Calls, job_id: str) -> Flow[list[views.Hang]]:
    call = Call("GET", f"/v1/jobs/{segment(job_id)}/hangs")
    return (yield from calls.read(views.HangPage, call)).items
