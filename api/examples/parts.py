"""Parts shared by several examples of requests and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JOB_ID = "job-01kamq6v3c7y2m5w9r4t8e1x0z"
OTHER_ID = "job-01kamq2b8n4f6h0j3k5p7s9v1d"
NEXT_ID = "job-01kamq5x1c3e7g9j2m4p6r8t0w"
ARRAY_ID = "array-01kamq7r5e8g0j2n4q6s8t1v3x"
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
CODE_ID = "code-3f1c0a5d9b7e42868c1d2e3f4a5b6c7d"
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
    "schedule_id": SCHEDULE_ID,
    "scheduled_at": "2026-11-21T09:45:00+01:00",
    "attempt": 1,
    "world_size": 2,
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
        },
        "total": 44.0,
        "useful_share": 0.9364,
    },
    "cost": COST,
    "created_at": MADE,
    "started_at": STARTED,
    "first_step_at": STEPPED,
    "finished_at": None,
    "links": {
        "self": f"/v1/jobs/{JOB_ID}",
        "metrics": f"/v1/jobs/{JOB_ID}/metrics",
        "logs": f"/v1/jobs/{JOB_ID}/logs",
        "events": f"/v1/jobs/{JOB_ID}/events",
        "artifacts": f"/v1/jobs/{JOB_ID}/artifacts",
        "ray_dashboard": None,
    },
}

EVENT: Mapping[str, Any] = {
    "seq": 2,
    "time": STARTED,
    "type": "state",
    "from_state": "QUEUED",
    "to_state": "STARTING",
    "attempt": 1,
    "code": "placed",
    "message": "2 slots on node-a",
    "data": {},
}

SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "dray job document",
    "type": "object",
}

OTHER_JOB: dict[str, Any] = {
    "id": OTHER_ID,
    "name": "nightly",
    "state": "RUNNING",
    "priority": 50,
    "world_size": 4,
}

NODE: Mapping[str, Any] = {
    "node_id": "3f6c1e0a",
    "hostname": "gpu-7",
    "alive": True,
    "resources": {"CPU": 16.0, "GPU": 4.0},
    "held": {"CPU": 2.0, "GPU": 2.0},
    "accepted": True,
    "reason": None,
    "reservations": [
        {
            "name": "course",
            "begins_at": "2026-11-22T08:00:00Z",
            "ends_at": "2026-11-22T12:00:00Z",
            "maintenance": False,
            "users": ["ann"],
            "queues": ["night"],
            "projects": [],
        }
    ],
    "jobs": [JOB_ID],
}

STACK = 'File "train.py", line 12 in forward\nFile "loop.py", line 80 in run_step'

HANG: Mapping[str, Any] = {
    "seq": 1,
    "attempt": 1,
    "time": STEPPED,
    "culprits": [1],
    "step": 50,
    "phase": "forward",
    "waited_s": 12.3,
    "limit_s": 4.0,
    "ranks": [
        {
            "rank": rank,
            "step": 50,
            "phase": phase,
            "collective": 101,
            "since_s": 12.3,
            "stack": STACK,
        }
        for rank, phase in enumerate(("all_reduce", "forward"))
    ],
}

EXPERIMENT: Mapping[str, Any] = {
    "name": "digits",
    "num_jobs": 2,
    "newest_job": JOB_ID,
    "baseline": OTHER_ID,
}


def compared(job_id: str) -> Mapping[str, Any]:
    return {
        **{name: JOB[name] for name in ("name", "owner", "world_size", "created_at", "goodput")},
        "id": job_id,
        "state": "SUCCEEDED",
        "experiment": "digits",
        "tags": ["good"] if job_id == JOB_ID else [],
        "waited_s": 1.0,
        "ran_s": 24.0,
        "cost": COST,
    }


def final(last: float) -> Mapping[str, Any]:
    return {"last": last, "last_step": 60, "min": 0.35, "min_step": 6, "max": last, "max_step": 60}


def kept_in_step(topology: str, sent_bytes: float, staleness: float) -> Mapping[str, Any]:
    return {
        "topology": topology,
        "steps": 60,
        "samples_per_s": 5_120.0,
        "sent_bytes": sent_bytes,
        "staleness_mean": staleness,
        "staleness_max": 4 * staleness,
        "consensus_distance": 0.1 * staleness,
        "loss": 0.35,
    }


SYNC_PLAN: Mapping[str, Any] = {
    "chosen": "all-reduce",
    "options": [
        {
            "name": "all-reduce",
            "sync": {"kind": "all_reduce"},
            "sent_bytes": 233_896,
            "step_time_s": 0.062,
            "staleness_steps": 0,
            "why": (
                "takes 62 ms per step, and no other option that the document allows is known to "
                "be 1.5 times as fast"
            ),
        }
    ],
    "facts": ["all workers (2) run on 1 node"],
}

COMPARISON: Mapping[str, Any] = {
    "jobs": [compared(OTHER_ID), compared(JOB_ID)],
    "baseline": OTHER_ID,
    "differences": [{"pointer": "/train/optimizer/lr", "values": [0.01, 0.001]}],
    "sync": [
        kept_in_step("all-reduce", 233_896.0, 0.0),
        kept_in_step("gossip, ad_psgd, ring", 116_948.0, 0.5),
    ],
    "metrics": [
        {"key": "val/accuracy", "values": [final(0.91), final(0.93)], "changes": [0.0, 0.02]}
    ],
}

DRILL_ID = "drill-01kamq6v3c7y2m5w9r4t8e1x0z"
DRILL: Mapping[str, Any] = {
    "id": DRILL_ID,
    "kind": "kill",
    "rank": 1,
    "at_step": 50,
    "attempt": 1,
    "state": "passed",
    "step": 50,
    "recovery_s": 0.41,
    "steps_lost": 0,
    "message": "recovered in 0.41 s, 0 steps lost",
    "created_at": STARTED,
    "finished_at": STEPPED,
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

SWEEP: Mapping[str, Any] = {
    "metric": "val/accuracy",
    "trials": 20,
    "max_running": 4,
    "parameters": {
        "train.optimizer.lr": {"min": 0.0001, "max": 0.1, "log": True},
        "train.optimizer.name": {"choices": ["sgd", "adamw"]},
    },
    "early_stopping": {"min_steps": 20, "eta": 3},
}
TRIAL: Mapping[str, Any] = {
    "index": 3,
    "job_id": JOB_ID,
    "state": "SUCCEEDED",
    "reason": {"code": "succeeded", "message": "trained to its end"},
    "parameters": {"train.optimizer.lr": 0.00316, "train.optimizer.name": "adamw"},
    "value": 0.981,
    "step": 60,
    "last_step": 60,
    "is_best": True,
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


FEDERATED_CLIENT: Mapping[str, Any] = {
    "client": 0,
    "invited_by": "ann",
    "created_at": MADE,
    "joined_at": STARTED,
    "sent_at": STEPPED,
    "num_sent": 12,
}
INVITATION: Mapping[str, Any] = {"client": 0, "token": "dray-join-(a secret)"}

ARRAY: Mapping[str, Any] = {
    "id": ARRAY_ID,
    "name": "repeats",
    "owner": "ann",
    "project": "default",
    "queue": "default",
    "size": 100,
    "max_running": 4,
    "counts": {"QUEUED": 90, "RUNNING": 4, "SUCCEEDED": 6},
    "is_sweep": False,
    "stopped_early": 0,
    "created_at": MADE,
}

BULK_PROBLEM: Mapping[str, Any] = {
    "code": "job_finished",
    "count": 1,
    "message": f"the job {OTHER_ID} is SUCCEEDED: it has ended",
    "jobs": [OTHER_ID],
}
