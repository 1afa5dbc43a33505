"""An example of every request body, for the description of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.examples.parts import DOCUMENT, JOB_ID, OTHER_ID, REPORT_TEXT, RULES, SHA256

REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "InvitationRequest": {"clients": 2},
    "UpdateRequest": {
        "sha256": SHA256,
        "num_samples": 1200,
        "num_steps": 38,
        "loss": 0.52,
        "num_val_samples": 300,
        "val_loss": 0.61,
    },
    "PreemptRequest": {"grace_s": 30},
    "JobChangeRequest": {
        "queue": "night",
        "priority": 70,
        "document": {"resources": {"num_workers": 2}, "max_runtime_s": "2h"},
    },
    "ReservationRequest": {
        "name": "class",
        "begin_at": "2026-12-01T08:00:00+01:00",
        "duration_s": "4h",
        "users": ["ann"],
        "num_nodes": 2,
    },
    "ReservationChangeRequest": {"end_at": "2026-12-01T14:00:00+01:00", "users": ["ann", "bob"]},
    "ArrayChangeRequest": {"held": True, "max_running": 4},
    "BulkRequest": {
        "action": "priority",
        "filter": {"state": ["QUEUED"], "where": "train.optimizer.lr > 0.1"},
        "parameters": {"priority": 20},
        "dry_run": True,
    },
    "SavedViewRequest": {
        "query": {
            "label": ["experiment=digits"],
            "sort": "-best:val/accuracy",
            "columns": "name,lr,best:val/accuracy",
        },
        "project": "vision",
    },
    "ReportRequest": {"title": "Rates", "text": REPORT_TEXT, "project": "vision"},
    "ReportChangeRequest": {"version": 3, "title": "Learning rates"},
    "AnnotationRequest": {"add_tags": ["good"], "notes": "Best so far.", "colour": 4},
    "ExperimentRequest": {
        "baseline": OTHER_ID,
        "notes": "Lower rates **diverge** less.",
        "pinned": [JOB_ID],
    },
    "QueueRequest": {**RULES, "limit": {"GPU": 8, "memory": "64GiB"}},
    "QueueChangeRequest": {"limit": {"GPU": 16, "memory": None}, "max_queued": None},
    "PlanRequest": {**DOCUMENT, "memory_bytes_per_rank": 67_108_864},
    "DrillRequest": {"kind": "kill", "rank": 1, "at_step": 50},
    "WebhookRequest": {
        "url": "https://hooks.example.org/dray",
        "states": ["FAILED"],
        "labels": {"team": "vision"},
    },
    "WebhookChangeRequest": {"enabled": True},
    "ScheduleRequest": {
        "name": "nightly",
        "cron": "30 2 * * *",
        "time_zone": "Europe/Berlin",
        "job": DOCUMENT,
        "deadline_s": 3600,
    },
    "ScheduleChangeRequest": {"cron": "30 2 * * MON-FRI", "paused": False},
    "DownloadRequest": {"checkpoint": {"step": 50, "path": "model.safetensors"}},
    "RegistrationRequest": {
        "name": "digits",
        "job": OTHER_ID,
        "card": "Recognizes handwritten digits.",
        "aliases": ["production"],
    },
    "AliasRequest": {"version": 3, "from_version": 2},
    "CardRequest": {"card": "Recognizes handwritten digits of 8 x 8 pixels."},
    "CodeRequest": {
        "files": [{"path": "train.py", "size_bytes": 4, "is_executable": False, "parts": [SHA256]}]
    },
}
"""Request bodies, keyed by schema name."""
