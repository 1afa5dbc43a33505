"""Examples of responses about webhooks and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.examples.parts import DOCUMENT, JOB_ID, MADE, SCHEDULE_ID, STARTED, WEBHOOK_ID

WEBHOOK: Mapping[str, Any] = {
    "id": WEBHOOK_ID,
    "owner": "ann",
    "url": "https://hooks.example.org/dray",
    "format": "json",
    "states": ["FAILED"],
    "queue": None,
    "labels": {"team": "vision"},
    "all_users": False,
    "enabled": True,
    "disabled_reason": None,
    "enabled_by": None,
    "failing_since": STARTED,
    "paused_until": "2026-11-21T08:45:10Z",
    "num_waiting": 1,
    "created_at": MADE,
    "secret": None,
}

DELIVERY: Mapping[str, Any] = {
    "id": f"{WEBHOOK_ID}-17",
    "type": "job.failed",
    "job_id": JOB_ID,
    "status": "waiting",
    "tries": 1,
    "created_at": MADE,
    "tried_at": STARTED,
    "next_try_at": "2026-11-21T08:45:06Z",
    "answer": {"status": 503, "body": "busy", "error": "the receiver answered 503", "took_s": 0.2},
}

SCHEDULE_RUN: Mapping[str, Any] = {
    "at": "2026-11-21T02:30:00+01:00",
    "outcome": "submitted",
    "message": None,
    "problem": None,
    "job_id": JOB_ID,
    "array_id": None,
    "job_state": "SUCCEEDED",
    "decided_at": "2026-11-21T01:30:00.04Z",
}

REFUSED_RUN: Mapping[str, Any] = {
    **SCHEDULE_RUN,
    "at": "2026-11-20T02:30:00+01:00",
    "outcome": "refused",
    "message": "there is no queue 'night'; the only queue is default",
    "problem": {
        "code": "unknown_queue",
        "detail": "there is no queue 'night'; the only queue is default",
        "pointer": "/queue",
        "hint": "`dray queue set` creates a queue",
    },
    "job_id": None,
    "job_state": None,
    "decided_at": "2026-11-20T01:30:00.03Z",
}

SCHEDULE: Mapping[str, Any] = {
    "id": SCHEDULE_ID,
    "name": "nightly",
    "owner": "ann",
    "cron": "30 2 * * *",
    "time_zone": "Europe/Berlin",
    "overlap": "skip",
    "missed": "last",
    "deadline_s": 3600,
    "job": {"version": 1, **DOCUMENT},
    "paused": False,
    "paused_reason": None,
    "next_times": [f"2026-11-{day}T02:30:00+01:00" for day in (22, 23, 24)],
    "last_run": SCHEDULE_RUN,
    "created_at": MADE,
    "changed_at": MADE,
}


VIEWS: Mapping[str, Mapping[str, Any]] = {
    "Webhook": {**WEBHOOK, "secret": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"},
    "WebhookPage": {"items": [WEBHOOK]},
    "WebhookDelivery": DELIVERY,
    "WebhookDeliveryPage": {"items": [DELIVERY], "next_cursor": "n1K9sWvxeJyrVspMUbJSqgUADKkC0Q"},
    "JobSchedule": SCHEDULE,
    "SchedulePage": {"items": [SCHEDULE], "next_cursor": "n1K9sWvxeJyrVspMUbJSqgUADKkC0Q"},
    "ScheduleRunPage": {"items": [SCHEDULE_RUN, REFUSED_RUN]},
}
"""Response bodies, keyed by schema name."""
