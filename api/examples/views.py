"""An example of every response, for the description of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.examples.parts import (
    ARRAY,
    ARRAY_ID,
    BULK_PROBLEM,
    CODE_ID,
    COMPARISON,
    COST,
    DECIDED,
    DELIVERY,
    DRILL,
    EVENT,
    EXPERIMENT,
    FEDERATED_CLIENT,
    HANG,
    INVITATION,
    JOB,
    JOB_ID,
    MADE,
    NEXT_ID,
    NODE,
    OTHER_ID,
    OTHER_JOB,
    QUEUE,
    REFUSED_RUN,
    RESERVATION,
    ROUND,
    SCHEDULE,
    SCHEDULE_RUN,
    SHA256,
    STARTED,
    STARTS,
    STEPPED,
    SWEEP,
    SYNC_PLAN,
    TRIAL,
    WEBHOOK,
)

VIEWS: Mapping[str, Mapping[str, Any]] = {
    "InvitationPage": {"items": [INVITATION]},
    "FederatedClientPage": {
        "items": [FEDERATED_CLIENT],
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
    "Webhook": {**WEBHOOK, "secret": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"},
    "WebhookPage": {"items": [WEBHOOK]},
    "WebhookDelivery": DELIVERY,
    "WebhookDeliveryPage": {"items": [DELIVERY], "next_cursor": "n1K9sWvxeJyrVspMUbJSqgUADKkC0Q"},
    "JobSchedule": SCHEDULE,
    "SchedulePage": {"items": [SCHEDULE], "next_cursor": "n1K9sWvxeJyrVspMUbJSqgUADKkC0Q"},
    "ScheduleRunPage": {"items": [SCHEDULE_RUN, REFUSED_RUN]},
    "Job": JOB,
    "JobPage": {"items": [JOB], "next_cursor": "n1K9sWvxeJyrVspMUbJSqgUADKkC0Q"},
    "JobArray": ARRAY,
    "BulkProblem": BULK_PROBLEM,
    "BulkChange": {
        "dry_run": True,
        "matched": 12,
        "other_owners": 3,
        "changed": 7,
        "unchanged": 1,
        "refused": 1,
        "problems": [BULK_PROBLEM],
        "jobs": [JOB_ID],
    },
    "ArrayChange": {
        "array": ARRAY,
        "changed": 90,
        "unchanged": 0,
        "skipped": {"job_finished": 6, "job_not_waiting": 4},
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
    "EventPage": {"items": [EVENT], "next_seq": 2},
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
                "cost": COST,
                "created_at": MADE,
                "started_at": STARTED,
                "finished_at": None,
            }
        ]
    },
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
    "HangPage": {"items": [HANG]},
    "Drill": DRILL,
    "DrillPage": {"items": [DRILL]},
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
                "message": "its queue is not ahead of its share",
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
    "Comparison": COMPARISON,
    "ExperimentPage": {"items": [EXPERIMENT], "next_cursor": None},
    "ExperimentSummary": {
        **EXPERIMENT,
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
    "DecisionPage": {"items": [ROUND], "next_before": None},
    "ReplayedDecision": {
        **ROUND,
        "nodes": {"a1": {"CPU": 8.0, "GPU": 4.0}},
        "is_same": True,
        "decided": [DECIDED],
        "replayed": [DECIDED],
    },
    "ForecastErrors": {"starts": STARTS, "ends": {**STARTS, "count": 90, "median_s": 31.0}},
    "Cluster": {
        "connected": True,
        "reason": None,
        "ray_address": "10.0.0.7:6379",
        "ray_dashboard": "http://10.0.0.7:8265",
        "nodes": [NODE],
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
                "why": "fits and takes 62 ms per step",
            }
        ],
        "memory_bytes_per_rank": 67_108_864,
        "memory_source": "given in the request",
        "change": None,
        "calibration": {
            "flops_per_s": 2e10,
            "bandwidth_bytes_per_s": 1e9,
            "latency_s": 1e-4,
            "source": "default for a CPU core, not measured on this cluster",
        },
        "assumed": [],
        "sync": SYNC_PLAN,
    },
    "Liveness": {"status": "ok"},
    "Readiness": {"status": "ok", "checks": {"database": "ok", "cluster": "ok", "loops": "ok"}},
}
"""Response bodies, keyed by schema name."""

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
