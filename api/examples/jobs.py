"""Examples of responses about jobs, arrays and sweeps, and of their attempts, files and clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.examples.parts import ARRAY_ID, COST, JOB, JOB_ID, MADE, OTHER_ID, SHA256, STARTED, STEPPED

CODE_ID = "code-3f1c0a5d9b7e42868c1d2e3f4a5b6c7d"

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
    "variant": "#3 lr 0.00316, name adamw",
    "colour": None,
    "state": "SUCCEEDED",
    "reason": {"code": "succeeded", "message": "trained to its end"},
    "parameters": {"train.optimizer.lr": 0.00316, "train.optimizer.name": "adamw"},
    "value": 0.981,
    "step": 60,
    "last_step": 60,
    "is_best": True,
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
    "SampledTextsPage": {
        "prompts": ["The capital of France is"],
        "items": [
            {"step": 100, "attempt": 1, "time": STEPPED, "texts": [" Paris, which is in the north"]}
        ],
        "next_cursor": None,
    },
    "MediaOverview": {
        "items": [
            {
                "kind": "image",
                "key": "val/sample",
                "rank": 0,
                "steps": [100, 200, 300],
            }
        ],
        "num_records": 3,
        "num_bytes": 21_604,
        "num_left_out": 0,
        "max_records": 10_000,
        "max_bytes": 268_435_456,
    },
    "MediaPage": {
        "items": [
            {
                "key": "val/sample",
                "rank": 0,
                "step": 100,
                "attempt": 1,
                "time": STEPPED,
                "value": {
                    "kind": "image",
                    "file": {"sha256": SHA256, "size_bytes": 7_200, "media_type": "image/png"},
                    "width": 64,
                    "height": 64,
                },
            }
        ],
        "next_cursor": None,
    },
}
"""Response bodies, keyed by schema name."""

EVENT_STREAM = (
    "retry: 1000\n\n"
    "event: state\nid: 2\n"
    'data: {"seq":2,"time":"2026-11-21T08:45:01Z","type":"state","from_state":"QUEUED",'
    '"to_state":"STARTING","attempt":1,"code":"placed","message":"2 slots on node-a","data":{}}'
    "\n\n"
)
