"""Examples of responses about queues, reservations and costs, and of the scheduler's
explanations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.examples.parts import JOB, JOB_ID, MADE, OTHER_ID, RULES, STEPPED

NEXT_ID = "job-01kamq5x1c3e7g9j2m4p6r8t0w"

OTHER_JOB: dict[str, Any] = {
    "id": OTHER_ID,
    "name": "nightly",
    "state": "RUNNING",
    "priority": 50,
    "world_size": 4,
}

USED: Mapping[str, Any] = {
    "slot_hours": [96.0, 12.0],
    "cpu_hours": [384.0, 48.0],
    "gpu_hours": [96.0, 12.0],
    "measured_gpu_hours": [95.9, 11.8],
    "idle_gpu_hours": [10.5, 0.0],
    "costs": [{"currency": "EUR", "amounts": [240.0, 30.0]}],
    "num_started": [12, 3],
    "num_succeeded": [9, 2],
    "num_failed": [1, 0],
    "num_cancelled": [1, 0],
}

USE: Mapping[str, Any] = {
    "num_waiting": 3,
    "num_held": 1,
    "num_running": 1,
    "holds": {"CPU": 2.0, "GPU": 2.0},
}

QUEUE: Mapping[str, Any] = {
    "name": "night",
    **RULES,
    "spent": 12_345.67,
    "spent_this_month": 1234.5,
    "currency": "EUR",
    **USE,
    "users": [{"owner": "ann", "weight": 2.0, **USE}],
    "children": [],
    "allowed": [
        {"resource": "GPU", "left": 1.0, "most": 8.0, "queue": "lab", "rule": "limit"},
    ],
    "warnings": [
        {
            "code": "quota_above_cluster",
            "message": "the queue's quota is 4 GPU, but the cluster has 2 GPU",
        }
    ],
}

RESERVATION: Mapping[str, Any] = {
    "name": "class",
    "state": "planned",
    "begins_at": "2026-12-01T07:00:00Z",
    "ends_at": "2026-12-01T11:00:00Z",
    "maintenance": False,
    "users": ["ann"],
    "queues": [],
    "projects": [],
    "nodes": [],
    "node_labels": {},
    "num_nodes": 2,
    "num_gpus": None,
    "all_nodes": False,
    "accepts_unnamed": False,
    "flex": False,
    "at_begin": "preempt",
    "at_end": "continue",
    "comment": "distributed training, second lesson",
    "includes": [{"node_id": "8f2c", "hostname": "node7"}],
    "num_waiting": 3,
    "num_running": 0,
    "created_by": "root",
    "warnings": [{"code": "too_few_nodes", "message": "includes 1 of 2 nodes so far"}],
}

STARTS = {"count": 120, "median_s": 42.0, "p90_s": 310.0, "median_ahead_s": 1260.0}

ROUND = {
    "number": 4711,
    "made_at": STEPPED,
    "started": [JOB_ID],
    "grew": [],
    "shrank": [],
    "left": [],
    "failed": [],
    "num_changes": 1,
    "num_waiting": 9,
    "num_running": 3,
}

DECIDED = {
    "job_id": JOB_ID,
    "decision": "start",
    "reason": None,
    "num_workers": 2,
    "node_ids": ["a1"],
    "because_of": None,
    "queue": "default",
    "owner": "ann",
    "priority": 50,
    "left_s": 600.0,
    "waited_s": 12.5,
}


VIEWS: Mapping[str, Mapping[str, Any]] = {
    "Queue": QUEUE,
    "QueuePage": {"items": [QUEUE]},
    "Reservation": RESERVATION,
    "ReservationPage": {"items": [RESERVATION]},
    "ShareReport": {
        "made_at": MADE,
        "half_life_s": 1209600.0,
        "cluster": {"CPU": 64.0, "GPU": 8.0},
        "queues": [
            {
                "name": "night",
                "weight": 1.0,
                "quota": {},
                "used_s": 90000.0,
                "share": 1.0,
                "due_s": 90000.0,
                "difference_s": 0.0,
                "margin_s": 600.0,
                "tier": "share",
                "until": None,
                "users": [
                    {
                        "owner": "ann",
                        "weight": 2.0,
                        "used_s": 90000.0,
                        "share": 2 / 3,
                        "due_s": 60000.0,
                        "difference_s": 30000.0,
                        "margin_s": 14400.0,
                        "standing": "ahead",
                        "until": "2026-12-06T04:32:17Z",
                    },
                    {"owner": "bob", "weight": 1.0, "used_s": 0.0},
                ],
            }
        ],
        "warnings": [],
    },
    "AccountingPage": {
        "since": "2026-01-01T00:00:00Z",
        "until": MADE,
        "items": [
            {
                "job_id": JOB["id"],
                "attempt": 2,
                "num_attempts": 1,
                "name": "cifar",
                "owner": "ann",
                "queue": "default",
                "project": "default",
                "labels": {"team": "vision"},
                "state": "SUCCEEDED",
                "is_deleted": False,
                "reason": "succeeded",
                "exit_code": 0,
                "submitted_at": "2026-01-02T08:00:00Z",
                "eligible_at": "2026-01-02T09:00:00Z",
                "began_at": "2026-01-02T09:10:00Z",
                "started_at": "2026-01-02T09:10:01Z",
                "finished_at": "2026-01-02T10:10:01Z",
                "waited_s": 600.0,
                "elapsed_s": 3600.0,
                "num_workers": 2,
                "resources": {"CPU": 8.0, "GPU": 2.0},
                "slot_seconds": 7200.0,
                "cpu_seconds": 28800.0,
                "gpu_seconds": 7200.0,
                "nodes": ["gpu-1"],
            }
        ],
        "next_cursor": None,
    },
    "UsageReport": {
        "since": "2026-01-01T00:00:00Z",
        "until": "2026-01-03T00:00:00Z",
        "per": "day",
        "by": "user",
        "time_zone": "UTC",
        "starts": ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"],
        "total": {"name": None, **USED},
        "series": [{"name": "ann", **USED}],
        "capacity": {
            "measured_s": [86400.0, 43200.0],
            "cpu_hours": [1536.0, 768.0],
            "gpu_hours": [192.0, 96.0],
        },
        "waits": [{"code": "waiting_for_slots", "job_hours": [31.5, 0.0]}],
    },
    "IdleGpuReport": {
        "min_idle_s": 900.0,
        "items": [
            {
                "job_id": JOB_ID,
                "name": "digits",
                "owner": "ann",
                "queue": "night",
                "ranks": [1],
                "num_idle": 1,
                "num_measured": 2,
                "idle_since": "2026-01-01T11:20:00Z",
            }
        ],
        "unmeasured": [
            {
                "job_id": OTHER_ID,
                "name": "nightly",
                "owner": "bob",
                "queue": "night",
                "num_gpus": 4.0,
            }
        ],
    },
    "CostReport": {
        "by": "user",
        "since": "2026-01-01T00:00:00Z",
        "until": MADE,
        "items": [
            {
                "name": "ann",
                "cost": {
                    "currency": "EUR",
                    "total": 1234.5,
                    "useful": 1150.2,
                    "wasted": 80.1,
                    "unreported": 4.2,
                },
                "slot_hours": 493.8,
                "num_jobs": 12,
            }
        ],
        "prices": [
            {
                "resource": "GPU",
                "per_hour": 0.9,
                "currency": "EUR",
                "labels": {"ray.io/market-type": "spot"},
            },
            {"resource": "GPU", "per_hour": 2.5, "currency": "EUR", "labels": {}},
        ],
        "warnings": [],
    },
    "JobFactors": {
        "job_id": JOB_ID,
        "state": "QUEUED",
        "reason": None,
        "made_at": MADE,
        "position": 2,
        "factors": [
            {
                "name": "tier",
                "value": 1.0,
                "message": "its queue has used at most its share",
            },
            {"name": "priority", "value": 50.0, "message": "priority 50"},
        ],
        "ahead": [
            {
                "job": OTHER_JOB | {"id": NEXT_ID, "name": "wine", "state": "QUEUED"},
                "decided_by": "priority",
                "message": "priority 60 > 50",
            }
        ],
    },
    "Explanation": {
        "state": "QUEUED",
        "reason": {"code": "no_slots", "message": "needs 4 GPUs; 2 are free"},
        "position": 2,
        "queue_length": 9,
        "blocked_by": [OTHER_ID],
        "ahead": [OTHER_JOB | {"id": NEXT_ID, "name": "wine", "state": "QUEUED"}],
        "running": [OTHER_JOB],
        "favoured": [
            {
                "code": "other_quota",
                "message": "jobs within the quota of the queue 'night' come first",
            }
        ],
        "expected_start_at": "2026-11-21T09:45:00Z",
        "start": {
            "at": "2026-11-21T09:45:00Z",
            "earliest_at": "2026-11-21T09:40:00Z",
            "latest_at": "2026-11-21T09:55:00Z",
            "not_before": None,
            "reason": None,
            "num_assumed": 1,
            "made_at": STEPPED,
            "first_at": "2026-11-21T09:50:00Z",
        },
        "end": None,
        "counterfactuals": [
            {
                "message": "starts now with 2 workers",
                "at": STEPPED,
                "num_workers": 2,
                "queue": None,
                "priority": None,
            }
        ],
        "forecast_error": STARTS,
        "sync": None,
        "round": None,
    },
    "DecisionPage": {"items": [ROUND], "next_before": None},
    "ReplayedDecision": {
        **ROUND,
        "nodes": {"a1": {"CPU": 8.0, "GPU": 4.0}},
        "is_same": True,
        "decided": [DECIDED],
        "replayed": [DECIDED],
    },
    "ForecastErrors": {"starts": STARTS, "ends": {**STARTS, "count": 90, "median_s": 31.0}},
}
"""Response bodies, keyed by schema name."""
