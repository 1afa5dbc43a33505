"""Parts shared by several examples of requests and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JOB_ID = "job-01kamq6v3c7y2m5w9r4t8e1x0z"
OTHER_ID = "job-01kamq2b8n4f6h0j3k5p7s9v1d"
ARRAY_ID = "array-01kamq7r5e8g0j2n4q6s8t1v3x"
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
WEBHOOK_ID = "webhook-01kamq3d6f9h1k4m7p0r2t5w8y"
SCHEDULE_ID = "schedule-01kamq1c4e7g9j2m5p8r0t3v6x"
MADE, STARTED, STEPPED = (f"2026-11-21T08:45:0{second}Z" for second in (0, 1, 2))

DOCUMENT: Mapping[str, Any] = {
    "name": "digits",
    "labels": {"team": "vision"},
    "recipe": "image_classification",
    "model": {"name": "cnn", "width": 32},
    "data": {"source": "sklearn://digits"},
    "train": {"epochs": 10, "optimizer": {"name": "adamw", "lr": 0.001}},
    "resources": {"num_workers": 2},
    "checkpoint": {"every_steps": 50, "best": "val/accuracy"},
}

COST: Mapping[str, Any] = {
    "currency": "EUR",
    "total": 0.0306,
    "useful": 0.0286,
    "wasted": 0.002,
    "unreported": 0.0,
}

JOB: Mapping[str, Any] = {
    "id": JOB_ID,
    "name": "digits",
    "owner": "ann",
    "project": "default",
    "labels": {"team": "vision", "experiment": "digits"},
    "tags": ["good"],
    "state": "RUNNING",
    "reason": {"code": "running", "message": "trains on 2 workers"},
    "queue": "default",
    "priority": 50,
    "held_by": None,
    "begin_at": None,
    "reservation": None,
    "deadline": "2026-11-21T18:00:00Z",
    "max_runtime_s": 7200,
    "max_runtime_from": "queue",
    "spec": {"version": 1, **DOCUMENT},
    "array_id": None,
    "array_index": None,
    "variant": None,
    "colour": 4,
    "schedule_id": SCHEDULE_ID,
    "scheduled_at": "2026-11-21T09:45:00+01:00",
    "attempt": 1,
    "world_size": 2,
    "spares": 0,
    "spares_ready": 0,
    "memory_copies": None,
    "position": None,
    "progress": {
        "step": 12,
        "total_steps": 60,
        "epoch": 2,
        "samples_per_s": 5230.5,
        "earliest_end_at": "2026-11-21T08:46:10Z",
        "latest_end_at": "2026-11-21T08:47:40Z",
    },
    "summary": {"train/loss": 0.41, "val/accuracy": 0.93},
    "warnings": [],
    "recoveries": 1,
    "goodput": {
        "slot_seconds": {
            "useful": 41.2,
            "recomputed": 0.0,
            "starting": 1.1,
            "data_wait": 0.3,
            "recovering": 0.8,
            "checkpointing": 0.2,
            "idle": 0.4,
            "unreported": 0.0,
            "spare": 0.0,
        },
        "total": 44.0,
        "useful_share": 0.9364,
    },
    "cost": COST,
    "created_at": MADE,
    "started_at": STARTED,
    "first_step_at": STEPPED,
    "finished_at": None,
    "values": {"lr": 0.001, "best:val/accuracy": 0.93},
    "values_as_of": STEPPED,
    "links": {
        "self": f"/v1/jobs/{JOB_ID}",
        "metrics": f"/v1/jobs/{JOB_ID}/metrics",
        "logs": f"/v1/jobs/{JOB_ID}/logs",
        "events": f"/v1/jobs/{JOB_ID}/events",
        "artifacts": f"/v1/jobs/{JOB_ID}/artifacts",
        "ray_dashboard": None,
    },
}

SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "dray job document",
    "type": "object",
}

RULES: Mapping[str, Any] = {
    "parent": "lab",
    "weight": 2.0,
    "user_weights": {"ann": 2.0},
    "quota": {"GPU": 4.0},
    "borrowing_limit": {"GPU": 3.0},
    "lending_limit": {"GPU": 2.0},
    "limit": {"GPU": 8.0, "memory": 68_719_476_736.0},
    "user_limit": {"GPU": 2.0},
    "max_running": None,
    "max_running_per_user": 4,
    "max_queued": 1000,
    "max_queued_per_user": 50,
    "max_priority": 70,
    "default_max_runtime_s": 7200,
    "max_runtime_s": 86400,
    "budget": None,
    "monthly_budget": 5000.0,
}
REPORT_TEXT = """Low rates are better.

```chart
metrics: [val/loss]
where: experiment = "digits"
sort: -best:val/accuracy
limit: 5
scale: log
```
"""
