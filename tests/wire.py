"""Factories with defaults for the types sent to workers; the types themselves have no defaults."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dray.spec import JobSpec
from ray_workers.shared.contracts import WORKER_MTBF_S, AttemptSpec, RankTask
from ray_workers.shared.frames import RoundReport
from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.node_needs import DataPolicy, EnvironmentPolicy
from ray_workers.shared.slices import Slice
from service.cluster.port import ClusterNode
from service.domain.attempts.group_traits import traits_of
from service.domain.documents import CheckedDocument


def traits(document: Mapping[str, Any], **fields: Any) -> GroupTraits:
    """Build the traits of a job on CPUs as the service does, except for the given fields. A
    document that contains only the fields under test stands for a recipe with one rank."""
    is_whole = "recipe" in document or "script" in document
    spec = JobSpec.model_validate(document if is_whole else {"recipe": "image_classification"})
    return replace(traits_of(CheckedDocument.of(spec), has_gpus=False), **fields)


def attempt_spec(**fields: Any) -> AttemptSpec:
    """Build the spec of a job's first attempt, on one node, except for the given fields."""
    plain: dict[str, Any] = {
        "deployment_id": "d",
        "job_id": "job",
        "attempt": 1,
        "spec": {},
        "traits": fields.get("traits") or traits(fields.get("spec", {})),
        "slices": (Slice("node", 1),),
        "bundle": {"CPU": 1.0},
        "roles": (),
        "storage_url": "file:///nowhere",
        "resume_from": (),
        "init_from": None,
        "older_than_init_from": (),
        "code": None,
        "data_policy": DataPolicy.open(),
        "environment_policy": EnvironmentPolicy.open(),
        "start_timeout_s": 60.0,
        "max_runtime_s": None,
        "spool_limit_bytes": 64 << 20,
        "output_limit_bytes": 100 << 30,
        "furthest_step": 0,
        "min_workers": None,
        "worker_mtbf_s": WORKER_MTBF_S,
        "silence_limit_s": 60.0,
        "system_metrics_s": None,
        "array_index": None,
        "scheduled_at": None,
        "parameters": {},
        "silo_sources": (),
    }
    return AttemptSpec(**{**plain, **fields})


def rank_task(**fields: Any) -> RankTask:
    """Build the task of the only rank of such an attempt, without monitoring, except for the given
    fields."""
    plain: dict[str, Any] = {
        "job_id": "job",
        "attempt": 1,
        "rank": 0,
        "incarnation": 0,
        "world_size": 1,
        "num_nodes": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": 0,
        "spec": {},
        "spool_dir": "/nowhere/spool",
        "temp_dir": tempfile.gettempdir(),
        "work_dir": "/nowhere/work",
        "folders_dir": "/nowhere/folders",
        "checkpoint_url": "file:///nowhere/checkpoints",
        "artifact_url": "file:///nowhere/artifacts",
        "folder_url": "file:///nowhere/checkpoint-folder",
        "resume_from": (),
        "init_from": None,
        "older_than_init_from": (),
        "data_policy": DataPolicy.open(),
        "environment_policy": EnvironmentPolicy.open(),
        "spool_limit_bytes": 64 << 20,
        "output_limit_bytes": 100 << 30,
        "worker_mtbf_s": WORKER_MTBF_S,
        "device": "cpu",
        "env": {},
        "page_prefix": "",
        "generation": 0,
        "peers": (),
        "furthest_step": 0,
        "array_index": None,
        "scheduled_at": None,
        "parameters": {},
        "silo_source": None,
    }
    return RankTask(**{**plain, **fields})


def round_report(name: str, **fields: Any) -> RoundReport:
    """Build a report that opens the first round for all clients of a model with one parameter,
    except for the given fields."""
    plain: dict[str, Any] = {
        "number": 1,
        "is_open": True,
        "clients": None,
        "quorum": 2,
        "deadline_s": 60.0,
        "num_elements": 1,
        "model_sha256": "0" * 64,
        "model_size_bytes": 1,
        "form_sha256": "0" * 64,
        "form_size_bytes": 1,
        "received": [],
        "awaits": "update",
        "update_bytes": 4,
    }
    return RoundReport(name=name, **{**plain, **fields})


def cluster_node(node_id: str, resources: Mapping[str, float], **fields: Any) -> ClusterNode:
    """Build an accepted node with all resources free, except for the given fields."""
    plain: dict[str, Any] = {
        "hostname": "host",
        "alive": True,
        "available": resources,
        "accepted": True,
        "problem": None,
        "full": None,
        "quarantined": (),
        "gpu_faults": (),
        "memory_bytes": None,
        "drained_by": None,
        "labels": {},
        "is_starting": False,
        "is_released": False,
        "is_never_released": False,
    }
    return ClusterNode(node_id, resources=resources, **{**plain, **fields})
