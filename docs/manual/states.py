"""Generates the reference of states and events from the table of transitions."""

from __future__ import annotations

from manual.tables import table
from service.domain.events import REMARKS
from service.domain.states import TRANSITIONS, JobState

_HEAD = """# States and events

```text
submit -> QUEUED -- claim --> STARTING -- step --> RUNNING -- succeed --> SUCCEEDED
            ^                                   |     ^
            |                              reform     step
            |                                   v     |
            +-- retry, of an attempt ------- RECOVERING

QUEUED                          -- cancel --> CANCELLED
STARTING, RUNNING, RECOVERING   -- cancel --> CANCELLING -- stopped --> CANCELLED
all of these but CANCELLING     -- fail ----> FAILED
```

The table below lists every transition. SUCCEEDED, FAILED and CANCELLED are final. A job that is
cancelled ends as SUCCEEDED if its training finished before the command to stop arrived; otherwise
it ends as CANCELLED, and the attempt keeps its own reason.

A trial of a [sweep](../guides/sweeps.md) that performs worse than others is CANCELLED with the
reason `stopped_early`. A trial that never starts because too many others failed is CANCELLED with
the reason `too_many_failed`. A job of a [schedule](../guides/schedules.md) whose reservation has
ended before the job started is CANCELLED with the reason `reservation_missed`.

## Transitions

Each transition creates an event with the type `state` and one of the reason codes as its `code`.

"""
_REMARKS = """
## Other events

These events don't change the state. `dray events JOB` prints the events of a job, and
`GET /v1/jobs/JOB/events` streams them.

"""


def page() -> str:
    order = list(JobState)
    moves = sorted(TRANSITIONS.items(), key=lambda move: (order.index(move[0][0]), move[0][1]))
    rows = [
        (state, trigger, rule.to, ", ".join(f"`{code}`" for code in sorted(rule.codes)))
        for (state, trigger), rule in moves
    ]
    remarks = [(f"`{type_}`", meaning) for type_, meaning in REMARKS.items()]
    return (
        _HEAD
        + table(("from", "trigger", "to", "reason codes"), rows)
        + _REMARKS
        + table(("type", "meaning"), remarks)
    )
