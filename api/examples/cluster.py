"""Examples of responses about the cluster, plans for its hardware, and the health of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.examples.parts import JOB_ID, SHA256, STEPPED

CHECK: Mapping[str, Any] = {
    "hostname": "gpu-7",
    "id": "0123456789abcdef",
    "state": "done",
    "cause": "asked",
    "why": "ann asked for it",
    "job_id": None,
    "asked_at": STEPPED,
    "began_at": STEPPED,
    "ended_at": STEPPED,
    "outcome": "passed",
    "message": "GPU 0 passed the self-test",
    "devices": [
        {
            "gpu": "GPU-5f0ad1c2-7b0e-4d0c-9d43-2f6a3b1e8c77",
            "index": 0,
            "model": "NVIDIA H100 80GB HBM3",
            "outcome": "passed",
            "reason": "",
            "values": {"product_s": 0.0031, "to_device_bytes_per_s": 2.6e10},
            "slow": [{"measure": "to_device_bytes_per_s", "factor": 2.1, "num_twins": 7}],
        }
    ],
}

NODE: Mapping[str, Any] = {
    "node_id": "3f6c1e0a",
    "hostname": "gpu-7",
    "alive": True,
    "resources": {"CPU": 16.0, "GPU": 4.0},
    "held": {"CPU": 2.0, "GPU": 2.0},
    "accepted": True,
    "reason": None,
    "withheld": [
        {
            "gpu": "GPU-5f0ad1c2-7b0e-4d0c-9d43-2f6a3b1e8c77",
            "code": "xid_79",
            "reason": "GPU 3: Xid 79: the GPU has fallen off the bus",
            "since": STEPPED,
        }
    ],
    "check": CHECK,
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


MODEL: Mapping[str, Any] = {
    "name": "llama-8b",
    "base": "file:///srv/models/llama-3.1-8b",
    "licence": "Llama 3.1 Community License",
    "licence_text": None,
    "must_accept": True,
    "sha256": SHA256,
    "has_chat_template": False,
}

VIEWS: Mapping[str, Mapping[str, Any]] = {
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
    "NodeCheck": CHECK,
    "NodeCheckList": {"items": [CHECK]},
    "ReleasedNode": {"hostname": "gpu-7", "released": NODE["withheld"]},
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
    "CatalogueEntry": {**MODEL, "licence_text": "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT ..."},
    "CataloguePage": {"items": [MODEL]},
    "CallerInfo": {"name": "ann", "is_admin": False},
    "Liveness": {"status": "ok"},
    "Readiness": {"status": "ok", "checks": {"database": "ok", "cluster": "ok", "loops": "ok"}},
}
"""Response bodies, keyed by schema name."""

PROMETHEUS = (
    "# HELP dray_jobs Jobs by state.\n# TYPE dray_jobs gauge\n"
    'dray_jobs{state="QUEUED"} 3.0\ndray_jobs{state="RUNNING"} 1.0\n'
)
