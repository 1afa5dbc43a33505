"""Arrays of jobs as flows, without I/O."""

from __future__ import annotations

from dray import errors, views
from dray._http.calls import LONG_POLL_S, Calls, params
from dray._http.transport import Call, Flow, segment
from dray.views import JobState


def get(
    calls: Calls,
    array_id: str,
    wait_s: float = 0.0,
    states: frozenset[JobState] = frozenset(),
    *,
    patient: bool = False,
) -> Flow[views.JobArray]:
    """The array; with `wait_s` once each of its jobs is over or in one of the states."""
    query = (*params(wait_s=wait_s or None), *(("state", state.value) for state in sorted(states)))
    call = Call("GET", f"/v1/arrays/{segment(array_id)}", query, wait_s=wait_s)
    return (yield from calls.read(views.JobArray, call, patient=patient))


def wait(
    calls: Calls, array_id: str, timeout_s: float | None, states: frozenset[JobState]
) -> Flow[views.JobArray]:
    """The array once each of its jobs is over or in one of the states, by long polls."""
    clock = calls.connection.retry.clock
    deadline = None if timeout_s is None else clock() + timeout_s
    array = yield from get(calls, array_id, patient=True)
    while not array.is_settled(states):
        asked = clock()
        left_s = LONG_POLL_S if deadline is None else deadline - asked
        if left_s <= 0:
            raise errors.ArrayWaitTimeout(array, timeout_s or 0.0)
        wait_s = min(LONG_POLL_S, left_s)
        array = yield from get(calls, array_id, wait_s, states, patient=True)
        yield from calls.pause_if_hurried(asked, wait_s, changed=array.is_settled(states))
    return array


def cancel(calls: Calls, array_id: str) -> Flow[views.JobArray]:
    call = Call("POST", f"/v1/arrays/{segment(array_id)}/cancel")
    return (yield from calls.read(views.JobArray, call))


def delete(calls: Calls, array_id: str) -> Flow[None]:
    yield from calls.send(Call("DELETE", f"/v1/arrays/{segment(array_id)}"))
