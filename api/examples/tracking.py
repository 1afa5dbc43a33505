"""Examples of responses about metrics, logs, experiments and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.examples.parts import COST, JOB, JOB_ID, OTHER_ID, REPORT_TEXT, SHA256, STEPPED

EXPERIMENT: Mapping[str, Any] = {
    "name": "digits",
    "num_jobs": 2,
    "newest_job": JOB_ID,
    "newest_name": "digits",
    "newest_at": STEPPED,
    "baseline": OTHER_ID,
    "states": {"RUNNING": 1, "SUCCEEDED": 1},
}


SAVED_VIEW: Mapping[str, Any] = {
    "name": "best",
    "owner": "ann",
    "project": "vision",
    "query": {
        "label": ["experiment=digits"],
        "sort": "-best:val/accuracy",
        "columns": "name,lr,best:val/accuracy",
    },
    "updated_at": STEPPED,
}


JOB_TABLE = f"job,name,best:val/accuracy,values_as_of\r\n{JOB_ID},digits,0.93,\r\n"
REPORT: Mapping[str, Any] = {
    "id": "report-06f2k9z3qw8m5x1yv7t4b0n2ra",
    "title": "Rates",
    "owner": "ann",
    "project": "vision",
    "version": 3,
    "created_at": STEPPED,
    "updated_at": STEPPED,
    "updated_by": "ann",
}
REPORT_PARTS: Sequence[Mapping[str, Any]] = (
    {"kind": "text", "line": 1, "text": "Low rates are better.", "block": None, "query": None},
    {
        "kind": "chart",
        "line": 3,
        "text": "",
        "block": {
            "title": "",
            "runs": [],
            "where": 'experiment = "digits"',
            "sweep": None,
            "sort": "-best:val/accuracy",
            "limit": 5,
            "metrics": ["val/loss"],
            "x": "step",
            "scale": "log",
            "smoothing": 0.0,
            "y_min": None,
            "y_max": None,
        },
        "query": {"where": 'experiment = "digits"', "sort": "-best:val/accuracy", "limit": 5},
    },
)


def compared(job_id: str) -> Mapping[str, Any]:
    return {
        **{name: JOB[name] for name in ("name", "owner", "world_size", "created_at", "goodput")},
        "id": job_id,
        "variant": None,
        "colour": None,
        "array_id": None,
        "labels": {"team": "vision", "experiment": "digits"},
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


JOB_DIFF: Mapping[str, Any] = {
    "jobs": [compared(OTHER_ID), compared(JOB_ID)],
    "document": COMPARISON["differences"],
    "git": [{"commit": "1a" * 20, "dirty": False, "branch": "main"}, None],
    "data": [{"sources": ["sklearn://digits"], "sha256": None}] * 2,
    "packages": {
        "is_known": [True, True],
        "differences": [{"name": "numpy", "versions": ["2.3.0", "2.3.1"]}],
    },
    "code": {
        "ids": [f"code-{'1a' * 16}", f"code-{'2b' * 16}"],
        "notes": [],
        "num_files": 1,
        "files": [
            {
                "path": "train.py",
                "change": "changed",
                "old_bytes": 9,
                "new_bytes": 10,
                "is_executable": [False, False],
                "num_added": 1,
                "num_removed": 1,
                "text": "@@ -1,1 +1,1 @@\n-lr = 0.1\n+lr = 0.01\n",
                "left_out": None,
            }
        ],
    },
}
LINEAGE: Mapping[str, Any] = {
    "job_id": JOB_ID,
    "array_id": None,
    "is_sweep": False,
    "jobs": [
        {
            "id": job_id,
            "name": "digits",
            "variant": None,
            "state": "SUCCEEDED",
            "owner": "ann",
            "attempts": 1,
        }
        for job_id in (JOB_ID, OTHER_ID)
    ],
    "links": [
        {"parent": OTHER_ID, "child": JOB_ID, "kind": "init_from", "step": 60, "model": None},
        {
            "parent": JOB_ID,
            "child": "model://digits@3",
            "kind": "registered",
            "step": None,
            "model": None,
        },
    ],
    "is_complete": True,
}


MODEL: Mapping[str, Any] = {
    "name": "digits",
    "owner": "ann",
    "num_versions": 2,
    "latest_version": 3,
    "aliases": {"production": 3},
    "created_at": STEPPED,
}
VERSION: Mapping[str, Any] = {
    "model": "digits",
    "version": 3,
    "reference": "model://digits@3",
    "job_id": OTHER_ID,
    "step": None,
    "aliases": ["production"],
    "created_at": STEPPED,
    "created_by": "ann",
}


VIEWS: Mapping[str, Mapping[str, Any]] = {
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
        "items": [
            {
                "attempt": 1,
                "rank": 0,
                "number": 12,
                "time": STEPPED,
                "text": "epoch 1: loss 1.87",
            }
        ],
        "next_cursor": "b7Qp2c1feJyrVkpUsjLUUUpSsjKoBQAVYQMb",
        "complete": False,
    },
    "Comparison": COMPARISON,
    "JobDiff": JOB_DIFF,
    "Lineage": LINEAGE,
    "JobGroupPage": {
        "items": [
            {
                "key": "digits",
                "name": None,
                "num_jobs": 3,
                "num_values": 2,
                "best": 0.93,
                "best_job": JOB_ID,
                "mean": 0.92,
                "std": 0.0141,
                "min": 0.91,
                "max": 0.93,
                "as_of": STEPPED,
            }
        ],
        "next_cursor": None,
    },
    "Importance": {
        "metric": "best:val/accuracy",
        "num_runs": 46,
        "num_sampled_from": 46,
        "left_out": {"failed": 2, "stopped_early": 12},
        "method": "permutation importance of a random forest",
        "explained": 0.83,
        "reason": None,
        "parameters": [
            {
                "name": "train.optimizer.lr",
                "num_values": 46,
                "importance": 0.71,
                "low": 0.6,
                "high": 0.82,
                "same_as": [],
            }
        ],
        "constant": ["train.schedule.name"],
    },
    "SavedView": SAVED_VIEW,
    "SavedViewPage": {"items": [SAVED_VIEW], "next_cursor": None},
    "ReportPage": {"items": [REPORT], "next_cursor": None},
    "ReportDocument": {**REPORT, "text": REPORT_TEXT, "parts": REPORT_PARTS, "problem": None},
    "ReportPreview": {"parts": REPORT_PARTS},
    "ExperimentPage": {"items": [EXPERIMENT], "next_cursor": None},
    "ExperimentSummary": {
        **EXPERIMENT,
        "notes": "Lower rates **diverge** less.",
        "pinned": [JOB_ID],
        "layout": {"charts": [{"metrics": ["val/accuracy"]}]},
        "revision": 2,
        "updated_at": STEPPED,
        "updated_by": "ann",
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
    "RegisteredModel": MODEL,
    "RegisteredModelPage": {"items": [MODEL], "next_cursor": None},
    "ModelVersionPage": {"items": [VERSION], "next_cursor": None},
    "ModelVersion": {
        **VERSION,
        "card": "Recognizes handwritten digits.",
        "lineage": {
            "job_name": "digits",
            "owner": "ann",
            "recipe": "image_classification",
            "base": None,
            "data": ["sklearn://digits"],
            "data_sha256": None,
            "document_sha256": SHA256,
            "parents": [
                {"job_id": JOB_ID, "step": 60, "model": "model://digits@1", "exists": True}
            ],
        },
        "files": [
            {
                "path": "model.safetensors",
                "size_bytes": 116_948,
                "sha256": SHA256,
                "missing": False,
            }
        ],
    },
    "AliasMovePage": {
        "items": [
            {
                "alias": "production",
                "from_version": 1,
                "to_version": 3,
                "moved_at": STEPPED,
                "moved_by": "ann",
            }
        ],
        "next_cursor": None,
    },
    "Annotations": {
        "tags": ["good"],
        "notes": "Best so far.",
        "colour": 4,
        "revision": 3,
        "updated_at": STEPPED,
        "updated_by": "ann",
    },
    "SignedIn": {
        "user": "ann",
        "write_key": "3wYtR6uJ5eFgA0pLsVxNo8cZq4hS1l0dQm2bX7vT9nK",
        "expires_at": "2026-12-21T08:45:00Z",
    },
}
"""Response bodies, keyed by schema name."""
