"""One example of every request and answer, for the description of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.problems import title

JOB_ID = "job-01kamq6v3c7y2m5w9r4t8e1x0z"
OTHER_ID = "job-01kamq2b8n4f6h0j3k5p7s9v1d"
NEXT_ID = "job-01kamq5x1c3e7g9j2m4p6r8t0w"
ARRAY_ID = "array-01kamq7r5e8g0j2n4q6s8t1v3x"
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
CODE_ID = "code-3f1c0a5d9b7e42868c1d2e3f4a5b6c7d"
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
    "labels": {"team": "vision"},
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
        "eta_s": 2.4,
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
        {
            "code": "quota_above_cluster",
            "message": "its quota is 4 GPU, but the cluster has 2 GPU",
        }
    ],
}

REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "PreemptRequest": {"grace_s": 30},
    "JobChangeRequest": {"queue": "night", "priority": 70},
    "QueueRequest": {**_RULES, "limit": {"GPU": 8, "memory": "64GiB"}},
    "QueueChangeRequest": {"limit": {"GPU": 16, "memory": None}, "max_queued": None},
    "PlanRequest": {**DOCUMENT, "memory_bytes_per_rank": 67_108_864},
    "DrillRequest": {"kind": "kill", "rank": 1, "at_step": 50},
    "CodeRequest": {
        "files": [
            {"path": "train.py", "size_bytes": 4, "is_executable": False, "parts": [SHA256]},
        ]
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


VIEWS: Mapping[str, Mapping[str, Any]] = {
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

_UNIQUE = "take a key of its own for each request, and the same key only to send one again"
PROBLEMS: Mapping[str, Mapping[str, str]] = {
    "malformed_request": {"detail": "the body is JSON, but not an object"},
    "bad_idempotency_key": {
        "detail": "the Idempotency-Key has 300 characters; it may have 1 to 255, printable ASCII",
        "hint": "a random UUID does well",
    },
    "bad_cursor": {
        "detail": "the cursor is not one that this listing gave out",
        "hint": "take next_cursor from the page before, unchanged, or leave it out",
    },
    "unauthorized": {
        "detail": "this server asks for a token",
        "hint": "send `Authorization: Bearer TOKEN`; the SDK and CLI take it from DRAY_TOKEN",
    },
    "forbidden": {
        "detail": "this server does not answer under the name 'evil.example.org'",
        "hint": "call it as localhost or by its IP address, or add the name to DRAY_ALLOWED_HOSTS",
    },
    "data_source_forbidden": {
        "detail": "169.254.169.254 is an address of the cluster's own network",
        "pointer": "/data/source",
    },
    "job_not_found": {
        "detail": f"there is no job {OTHER_ID}",
        "hint": "`dray ls` shows the jobs there are",
    },
    "artifact_not_found": {
        "detail": f"the job {JOB_ID} has no artifact artifact-0",
        "hint": "the job's list of artifacts has their ids",
    },
    "checkpoint_not_found": {"detail": f"the job {JOB_ID} has no checkpoint of step 7"},
    "drill_not_found": {
        "detail": f"the job {JOB_ID} has no drill drill-0",
        "hint": "the job's list of drills has the ids",
    },
    "not_found": {"detail": "there is nothing at /v1/nothing"},
    "method_not_allowed": {
        "detail": "PUT is not allowed on /v1/jobs",
        "hint": "it takes GET, POST",
    },
    "conflict": {"detail": "the job's state does not allow it"},
    "idempotency_in_flight": {
        "detail": "a request with this Idempotency-Key is being worked on",
        "hint": "send it again in a moment: it will then answer as the first did",
    },
    "job_finished": {"detail": f"the job {JOB_ID} has already succeeded"},
    "job_live": {
        "detail": f"the job {JOB_ID} is RUNNING, and only a finished job can be deleted",
        "hint": "cancel it first, and wait until it has ended",
    },
    "job_not_running": {
        "detail": f"the job {JOB_ID} is QUEUED: it holds no slots that it could leave",
        "hint": f"`dray wait {JOB_ID} --state RUNNING` waits until it trains",
    },
    "job_not_waiting": {
        "detail": f"the job {JOB_ID} is RUNNING: only one that waits can be held, released or "
        "moved",
        "hint": f"`dray preempt {JOB_ID}` has it leave its slots and wait again",
    },
    "queue_full": {
        "detail": "5 jobs of ann wait in the queue 'night', as many as a user may have",
        "pointer": "/queue",
        "hint": "submit it when one of them has started, or choose another queue",
    },
    "queue_in_use": {
        "detail": "3 jobs in the queue 'night' have not ended",
        "hint": "move or cancel them first, or wait for their end",
    },
    "queue_not_found": {
        "detail": "there is no queue 'night'",
        "hint": "`dray queue ls` shows the queues there are",
    },
    "decision_not_found": {
        "detail": "no round 17 of the scheduler is kept",
        "hint": "rounds are kept for 6 hours",
    },
    "unknown_queue": {
        "detail": "there is no queue 'nigth'; there are default, night",
        "pointer": "/queue",
        "hint": "did you mean 'night'?",
    },
    "priority_too_high": {
        "detail": "is 90, above 70, the highest of the queue 'night'",
        "pointer": "/priority",
        "hint": "an admin may raise the job above it once it is submitted",
    },
    "invalid_queue": {
        "detail": "is 4 GPU, below the quota of 8 GPU",
        "pointer": "/limit/GPU",
        "hint": "raise the limit or lower the quota",
    },
    "checkpoint_in_use": {"detail": f"the job {OTHER_ID} starts from a checkpoint of this one"},
    "request_too_slow": {"detail": "the body did not arrive within 60 s"},
    "headers_too_large": {"detail": "a request may have 128 headers, of 65536 bytes in all"},
    "body_too_large": {"detail": "the body is larger than 1048576 bytes"},
    "unsupported_media_type": {
        "detail": "the content type is 'text/yaml', not application/json",
        "hint": "a YAML document is turned into JSON by `dray submit`",
    },
    "range_not_satisfiable": {"detail": "the file has 137168 bytes, and none in that range"},
    "invalid_document": {
        "detail": "there is no field 'epocs'",
        "pointer": "/train/epocs",
        "hint": "did you mean 'epochs'?",
    },
    "invalid_parameter": {
        "detail": "the parameter 'limit' must be less than or equal to 500",
    },
    "unsatisfiable": {
        "detail": "this job could never start: it needs 8 GPUs, and the cluster has 4",
        "pointer": "/resources/num_workers",
        "hint": "ask for less, or add nodes to the cluster first; `dray cluster` shows what it has",
    },
    "out_of_memory": {
        "detail": "this job can't fit: each worker needs 96.2 GiB, and has 78.0 GiB: 18.2 GiB "
        "(19542101196 bytes) are missing",
        "pointer": "/parallel",
        "hint": "it fits with train.micro_batch_size 8",
    },
    "not_plannable": {
        "detail": "the size of the images is not known: give data.image_size",
    },
    "drill_impossible": {
        "detail": "there is no rank 2: the job has ranks 0 to 1",
        "pointer": "/rank",
    },
    "idempotency_key_reused": {
        "detail": "this Idempotency-Key was used before, for another request",
        "hint": _UNIQUE,
    },
    "code_not_found": {
        "detail": f"the job {JOB_ID} brought no code: it runs what nodes have",
    },
    "array_not_found": {
        "detail": f"there is no array {ARRAY_ID}",
        "hint": "`dray ls` shows the jobs and arrays there are",
    },
    "array_too_large": {
        "detail": "the array has 10,000,000 jobs, and this server takes 10,000",
        "pointer": "/array/size",
        "hint": "divide it; the operator sets the limit by DRAY_MAX_ARRAY_SIZE",
    },
    "sweep_not_found": {
        "detail": f"there is no sweep {ARRAY_ID}",
        "hint": "`dray ls` shows the jobs and sweeps there are",
    },
    "invalid_trial": {
        "detail": "trial 3 (train.optimizer.name=adamw, train.optimizer.momentum=0.9) is no valid "
        "job: /train/optimizer momentum is an option of sgd, not of adamw",
        "pointer": "/sweep/parameters",
        "hint": "leave out the values that do not go together",
    },
    "sampler_unavailable": {
        "detail": "this server has no Optuna",
        "pointer": "/sweep/sampler",
        "hint": "take random or grid; the operator installs it by pip install 'dray[optuna]'",
    },
    "dependency_not_found": {
        "detail": f"there is no job or array {OTHER_ID}",
        "pointer": "/after/0/job",
        "hint": "`dray ls` shows the jobs there are",
    },
    "dependency_never_satisfied": {
        "detail": "this job could never start: it was to start after the success of "
        f"{OTHER_ID}, which failed",
        "pointer": "/after/0",
        "hint": "let it start after the end of the other, whatever that is: on: end",
    },
    "bad_upload": {
        "detail": "the path '../train.py' has an empty part, `.` or `..`",
        "pointer": "/files/0/path",
    },
    "upload_too_large": {
        "detail": "the files have 600000000 bytes together, more than 536870912",
        "hint": "leave data out by .drayignore, or raise DRAY_CODE_LIMIT_BYTES",
    },
    "code_unfit": {
        "detail": "there is no file 'main.py' in the code",
        "pointer": "/script/entrypoint",
        "hint": "it has train.py, model.py",
    },
    "init_from_not_found": {
        "detail": f"the job {OTHER_ID} has no checkpoint of step 7",
        "pointer": "/init_from/step",
    },
    "init_from_differs": {
        "detail": f"can't go on from all that {OTHER_ID} left: /train/seed is 1, and was 0: "
        "the samples would come in another order",
        "pointer": "/train/seed",
        "hint": "change it, or let init_from.take be weights",
    },
    "internal_error": {
        "detail": "dray failed to answer this request; the server's log says why",
        "hint": "its lines there have the same request_id",
    },
    "unavailable": {"detail": "the service does not answer", "hint": "try again in a moment"},
    "database_unavailable": {
        "detail": "the database does not answer",
        "hint": "try again in a moment",
    },
    "storage_unavailable": {"detail": "the storage can't be read"},
    "quota_exceeded": {"detail": "the storage is full", "hint": "delete jobs that have ended"},
}
"""The fields that differ between the examples of problems, by code."""


def problem(code: str, status: int) -> dict[str, Any]:
    """Example of a problem with this code."""
    return {
        "type": f"urn:dray:problem:{code}",
        "title": title(status),
        "status": status,
        "code": code,
        **PROBLEMS[code],
        "request_id": "5642cea436f4434fed64cbbd",
    }
