"""Queues, and the places of jobs in them, as flows, without I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dray import errors, views
from dray._http.calls import Calls, params
from dray._http.transport import Call, Flow, segment

HEADERS = {"Content-Type": "application/json"}


def every(calls: Calls) -> Flow[list[views.Queue]]:
    return (yield from calls.read(views.QueuePage, Call("GET", "/v1/queues"))).items


def get(calls: Calls, name: str) -> Flow[views.Queue]:
    return (yield from calls.read(views.Queue, Call("GET", _path(name))))


def set_rules(calls: Calls, name: str, rules: Mapping[str, Any]) -> Flow[views.Queue]:
    """Change the rules that are given; a queue that is not there is made."""
    call = Call("PATCH", _path(name), params(create="true"), HEADERS, _as_json(rules))
    return (yield from calls.read(views.Queue, call))


def delete(calls: Calls, name: str) -> Flow[None]:
    yield from calls.send(Call("DELETE", _path(name)))


def change_job(calls: Calls, job_id: str, **changes: Any) -> Flow[views.Job]:
    """Change where the job waits; None leaves a field as it is."""
    content = _as_json({name: value for name, value in changes.items() if value is not None})
    call = Call("PATCH", f"/v1/jobs/{segment(job_id)}", (), HEADERS, content)
    return (yield from calls.read(views.Job, call))


def _path(name: str) -> str:
    return f"/v1/queues/{segment(name)}"


def _as_json(document: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(document, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise errors.SpecError(f"the rules can't be written as JSON: {error}") from None
