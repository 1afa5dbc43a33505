"""One example of every request and answer, for the description of the API."""

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

_COST: Mapping[str, Any] = {
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
    "spec": {"version": 1, **DOCUMENT},
    "array_id": None,
    "array_index": None,
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
    "cost": _COST,
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

_EVENT: Mapping[str, Any] = {
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

_OTHER_JOB: dict[str, Any] = {
    "id": OTHER_ID,
    "name": "nightly",
    "state": "RUNNING",
    "priority": 50,
    "world_size": 4,
}

_NODE: Mapping[str, Any] = {
    "node_id": "3f6c1e0a",
    "hostname": "gpu-7",
    "alive": True,
    "resources": {"CPU": 16.0, "GPU": 4.0},
    "held": {"CPU": 2.0, "GPU": 2.0},
    "accepted": True,
    "reason": None,
    "jobs": [JOB_ID],
}

_STACK = 'File "train.py", line 12 in forward\nFile "loop.py", line 80 in run_step'

_HANG: Mapping[str, Any] = {
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
            "stack": _STACK,
        }
        for rank, phase in enumerate(("all_reduce", "forward"))
    ],
}

_EXPERIMENT: Mapping[str, Any] = {
    "name": "digits",
    "num_jobs": 2,
    "newest_job": JOB_ID,
    "baseline": OTHER_ID,
}


def _compared(job_id: str) -> Mapping[str, Any]:
    return {
        **{name: JOB[name] for name in ("name", "owner", "world_size", "created_at", "goodput")},
        "id": job_id,
        "state": "SUCCEEDED",
        "experiment": "digits",
        "tags": ["good"] if job_id == JOB_ID else [],
        "waited_s": 1.0,
        "ran_s": 24.0,
        "cost": _COST,
    }


def _final(last: float) -> Mapping[str, Any]:
    return {"last": last, "last_step": 60, "min": 0.35, "min_step": 6, "max": last, "max_step": 60}


def _kept_in_step(topology: str, sent_bytes: float, staleness: float) -> Mapping[str, Any]:
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


_SYNC_PLAN: Mapping[str, Any] = {
    "chosen": "all-reduce",
    "options": [
        {
            "name": "all-reduce",
            "sync": {"kind": "all_reduce"},
            "sent_bytes": 233_896,
            "step_time_s": 0.062,
            "staleness_steps": 0,
            "why": "takes 62 ms a step, and no way that the document takes is known to be 1.5 "
            "times as fast",
        }
    ],
    "facts": ["1 node holds all 2 workers"],
}

_COMPARISON: Mapping[str, Any] = {
    "jobs": [_compared(OTHER_ID), _compared(JOB_ID)],
    "baseline": OTHER_ID,
    "differences": [{"pointer": "/train/optimizer/lr", "values": [0.01, 0.001]}],
    "sync": [
        _kept_in_step("all-reduce", 233_896.0, 0.0),
        _kept_in_step("gossip, ad_psgd, ring", 116_948.0, 0.5),
    ],
    "metrics": [
        {"key": "val/accuracy", "values": [_final(0.91), _final(0.93)], "changes": [0.0, 0.02]}
    ],
}

DRILL_ID = "drill-01kamq6v3c7y2m5w9r4t8e1x0z"
_DRILL: Mapping[str, Any] = {
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

_RULES: Mapping[str, Any] = {
    "weight": 2.0,
    "user_weights": {"ann": 2.0},
    "quota": {"GPU": 4.0},
    "limit": {"GPU": 8.0, "memory": 68_719_476_736.0},
    "user_limit": {"GPU": 2.0},
    "max_running": None,
    "max_running_per_user": 4,
    "max_queued": 1000,
    "max_queued_per_user": 50,
    "max_priority": 70,
    "budget": None,
    "monthly_budget": 5000.0,
}

_USE: Mapping[str, Any] = {
    "num_waiting": 3,
    "num_held": 1,
    "num_running": 1,
    "holds": {"CPU": 2.0, "GPU": 2.0},
}

_QUEUE: Mapping[str, Any] = {
    "name": "night",
    **_RULES,
    "spent": 12_345.67,
    "spent_this_month": 1234.5,
    "currency": "EUR",
    **_USE,
    "users": [{"owner": "ann", "weight": 2.0, **_USE}],
    "warnings": [
        {"code": "quota_above_cluster", "message": "its quota is 4 GPU, but the cluster has 2 GPU"}
    ],
}

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
    "JobChangeRequest": {"queue": "night", "priority": 70},
    "AnnotationRequest": {"add_tags": ["good"], "notes": "Best so far."},
    "ExperimentRequest": {"baseline": OTHER_ID},
    "QueueRequest": {**_RULES, "limit": {"GPU": 8, "memory": "64GiB"}},
    "QueueChangeRequest": {"limit": {"GPU": 16, "memory": None}, "max_queued": None},
    "PlanRequest": {**DOCUMENT, "memory_bytes_per_rank": 67_108_864},
    "DrillRequest": {"kind": "kill", "rank": 1, "at_step": 50},
    "WebhookRequest": {
        "url": "https://hooks.example.org/dray",
        "states": ["FAILED"],
        "labels": {"team": "vision"},
    },
    "WebhookChangeRequest": {"enabled": True},
    "DownloadRequest": {"checkpoint": {"step": 50, "path": "model.safetensors"}},
    "CodeRequest": {
        "files": [{"path": "train.py", "size_bytes": 4, "is_executable": False, "parts": [SHA256]}]
    },
}
"""Bodies of requests, by the name of their schema."""

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

_STARTS = {"count": 120, "median_s": 42.0, "p90_s": 310.0, "median_ahead_s": 1260.0}
_ROUND = {
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
_DECIDED = {
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


_WEBHOOK: Mapping[str, Any] = {
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
_DELIVERY: Mapping[str, Any] = {
    "id": f"{WEBHOOK_ID}-17",
    "type": "job.failed",
    "job_id": JOB_ID,
    "status": "waiting",
    "tries": 1,
    "created_at": MADE,
    "tried_at": STARTED,
    "next_try_at": "2026-11-21T08:45:06Z",
    "answer": {"status": 503, "body": "busy", "error": "it answered 503", "took_s": 0.2},
}


_FEDERATED_CLIENT: Mapping[str, Any] = {
    "client": 0,
    "invited_by": "ann",
    "created_at": MADE,
    "joined_at": STARTED,
    "sent_at": STEPPED,
    "num_sent": 12,
}
_INVITATION: Mapping[str, Any] = {"client": 0, "token": "dray-join-(a secret)"}

VIEWS: Mapping[str, Mapping[str, Any]] = {
    "InvitationPage": {"items": [_INVITATION]},
    "FederatedClientPage": {
        "items": [_FEDERATED_CLIENT],
        "round": 12,
        "is_open": True,
        "closes_at": STEPPED,
        "quorum": 2,
        "num_sent": 1,
        "missing": [1],
    },
    "FederatedRound": {
        "phase": "open",
        "client": 0,
        "job_state": "RUNNING",
        "number": 12,
        "name": f"000000000012-{SHA256[:16]}",
        "closes_at": STEPPED,
        "quorum": 2,
        "num_elements": 9610,
        "awaits": "update",
        "update_bytes": 38440,
        "part_bytes": 4194304,
        "model_sha256": SHA256,
        "model_size_bytes": 38760,
        "form_sha256": SHA256,
        "form_size_bytes": 1220,
    },
    "UpdateReceipt": {"round": 12, "client": 0},
    "Webhook": {**_WEBHOOK, "secret": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"},
    "WebhookPage": {"items": [_WEBHOOK]},
    "WebhookDelivery": _DELIVERY,
    "WebhookDeliveryPage": {"items": [_DELIVERY], "next_cursor": "n1K9sWvxeJyrVspMUbJSqgUADKkC0Q"},
    "Job": JOB,
    "JobPage": {"items": [JOB], "next_cursor": "n1K9sWvxeJyrVspMUbJSqgUADKkC0Q"},
    "JobArray": {
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
    },
    "JobSweep": {
        "id": ARRAY_ID,
        "name": "rates",
        "owner": "ann",
        "project": "default",
        "queue": "default",
        "size": 20,
        "max_running": 4,
        "counts": {"QUEUED": 10, "RUNNING": 3, "SUCCEEDED": 3, "CANCELLED": 4},
        "is_sweep": True,
        "stopped_early": 4,
        "created_at": MADE,
        "metric": "val/accuracy",
        "mode": "max",
        "by": "best",
        "sampler": "random",
        "sweep": SWEEP,
        "best": TRIAL,
    },
    "TrialPage": {"items": [TRIAL], "next_cursor": None},
    "Metrics": {
        "series": {"train/loss": {"steps": [1, 2, 3], "values": [2.31, 1.87, "NaN"]}},
        "next_step": 3,
    },
    "SystemMetrics": {
        "series": {"system/cpu": {"times": [1769853600, 1769853610], "values": [1.02, 0.98]}},
        "next_time": 1769853610,
    },
    "SystemSample": {
        "time": 1769853610,
        "ranks": [
            {
                "rank": 0,
                "values": {
                    "system/cpu": 0.98,
                    "system/memory_rss": 734110000.0,
                    "system/node/cpu": 2.11,
                },
            },
            {"rank": 1, "values": {"system/cpu": 0.97, "system/memory_rss": 728330000.0}},
        ],
    },
    "LogPage": {
        "items": [{"attempt": 1, "rank": 0, "time": STEPPED, "text": "epoch 1: loss 1.87"}],
        "next_cursor": "b7Qp2c1feJyrVkpUsjLUUUpSsjKoBQAVYQMb",
        "complete": False,
    },
    "EventPage": {"items": [_EVENT], "next_seq": 2},
    "AttemptPage": {
        "items": [
            {
                "attempt": 2,
                "state": "running",
                "world_size": 2,
                "resume_step": 50,
                "receipt": {
                    "step": 50,
                    "url": f"file:///srv/dray/storage/jobs/{JOB_ID}/attempts/1/checkpoints/step-50",
                    "sha256": SHA256,
                    "size_bytes": 412_345,
                    "position": {"epoch": 8, "step_in_epoch": 2, "samples": 512},
                    "world_size": 2,
                    "optimizer_restored": True,
                    "rng": "seeds are derived from (seed, step, rank)",
                    "loss_before": 0.31,
                    "loss_after": 0.3,
                    "passed_over": [{"step": 100, "why": "its manifest does not match its hash"}],
                },
                "reason": None,
                "cost": _COST,
                "created_at": MADE,
                "started_at": STARTED,
                "finished_at": None,
            }
        ]
    },
    "Queue": _QUEUE,
    "QueuePage": {"items": [_QUEUE]},
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
    "HangPage": {"items": [_HANG]},
    "Drill": _DRILL,
    "DrillPage": {"items": [_DRILL]},
    "CheckpointPage": {
        "items": [
            {
                "attempt": 1,
                "step": 50,
                "size_bytes": 412_345,
                "sha256": SHA256,
                "created_at": STEPPED,
                "is_latest": True,
                "is_best": True,
                "metric": 0.93,
                "url": f"file:///srv/dray/storage/jobs/{JOB_ID}/attempts/1/checkpoints/step-50",
            }
        ]
    },
    "CheckpointFilePage": {
        "items": [{"path": "model.safetensors", "size_bytes": 137_168, "sha256": SHA256}]
    },
    "Code": {
        "id": CODE_ID,
        "num_files": 1,
        "size_bytes": 4,
        "is_complete": False,
        "missing": [SHA256],
    },
    "CodeFilePage": {
        "id": CODE_ID,
        "items": [{"path": "train.py", "size_bytes": 4, "is_executable": False}],
    },
    "DownloadLink": {
        "url": "/v1/downloads/8cZq4hS1l0dQm2bX7vT9nK3wYtR6uJ5eFgA0pLsVxNo",
        "expires_at": "2026-11-21T08:46:00Z",
    },
    "ArtifactPage": {
        "items": [
            {
                "id": "artifact-5t8e1x0z3c7y2m5w",
                "path": "model.safetensors",
                "size_bytes": 137_168,
                "sha256": SHA256,
                "created_at": STEPPED,
            }
        ]
    },
    "Explanation": {
        "state": "QUEUED",
        "reason": {"code": "no_slots", "message": "needs 4 GPUs, and 2 are free"},
        "position": 2,
        "queue_length": 9,
        "blocked_by": [OTHER_ID],
        "ahead": [_OTHER_JOB | {"id": NEXT_ID, "name": "wine", "state": "QUEUED"}],
        "running": [_OTHER_JOB],
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
        "forecast_error": _STARTS,
        "sync": None,
        "round": None,
    },
    "Comparison": _COMPARISON,
    "ExperimentPage": {"items": [_EXPERIMENT], "next_cursor": None},
    "ExperimentSummary": {
        **_EXPERIMENT,
        "states": {"RUNNING": 1, "SUCCEEDED": 1},
        "num_summarised": 2,
        "metrics": [
            {
                "key": "val/accuracy",
                "num_jobs": 2,
                "least": 0.91,
                "least_job": OTHER_ID,
                "greatest": 0.93,
                "greatest_job": JOB_ID,
            }
        ],
    },
    "Annotations": {
        "tags": ["good"],
        "notes": "Best so far.",
        "revision": 3,
        "updated_at": STEPPED,
        "updated_by": "ann",
    },
    "DecisionPage": {"items": [_ROUND], "next_before": None},
    "ReplayedDecision": {
        **_ROUND,
        "nodes": {"a1": {"CPU": 8.0, "GPU": 4.0}},
        "is_same": True,
        "decided": [_DECIDED],
        "replayed": [_DECIDED],
    },
    "ForecastErrors": {"starts": _STARTS, "ends": {**_STARTS, "count": 90, "median_s": 31.0}},
    "Cluster": {
        "connected": True,
        "reason": None,
        "ray_address": "10.0.0.7:6379",
        "ray_dashboard": "http://10.0.0.7:8265",
        "nodes": [_NODE],
        "storage": {
            "used_bytes": 7_340_032,
            "quota_bytes": 1_073_741_824,
            "free_bytes": None,
            "min_free_bytes": None,
            "problem": None,
        },
        "autoscaling": {"max_nodes": 8, "num_nodes": 2, "asked_at": STEPPED},
        "updated_at": STEPPED,
    },
    "Plan": {
        "chosen": "shard 2",
        "meshes": [
            {
                "name": "shard 2",
                "parallel": {"shard": 2},
                "micro_batch_size": 128,
                "num_micro_batches": 1,
                "memory": {
                    "parameters_bytes": 116_948,
                    "gradients_bytes": 116_948,
                    "optimizer_bytes": 233_896,
                    "activations_bytes": 10_182_280,
                    "total_bytes": 10_650_072,
                },
                "missing_bytes": 0,
                "step_time_s": 0.062,
                "compute_s": 0.061,
                "send_s": 0.001,
                "idle_s": 0.0,
                "why": "fits and takes 62 ms a step",
            }
        ],
        "memory_bytes_per_rank": 67_108_864,
        "memory_source": "given with the request",
        "change": None,
        "calibration": {
            "flops_per_s": 2e10,
            "bandwidth_bytes_per_s": 1e9,
            "latency_s": 1e-4,
            "source": "default for a core of a CPU: not measured here",
        },
        "assumed": [],
        "sync": _SYNC_PLAN,
    },
    "Liveness": {"status": "ok"},
    "Readiness": {"status": "ok", "checks": {"database": "ok", "cluster": "ok", "loops": "ok"}},
}
"""Bodies of answers, by the name of their schema."""

EVENT_STREAM = (
    "retry: 1000\n\n"
    "event: state\nid: 2\n"
    'data: {"seq":2,"time":"2026-11-21T08:45:01Z","type":"state","from_state":"QUEUED",'
    '"to_state":"STARTING","attempt":1,"code":"placed","message":"2 slots on node-a","data":{}}'
    "\n\n"
)
PROMETHEUS = (
    "# HELP dray_jobs Jobs by state.\n# TYPE dray_jobs gauge\n"
    'dray_jobs{state="QUEUED"} 3.0\ndray_jobs{state="RUNNING"} 1.0\n'
)
