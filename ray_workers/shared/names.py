"""The names of the actors of an attempt in Ray, and of its files in the storage."""

from __future__ import annotations

NAMESPACE_PREFIX = "dray-"


def namespace(deployment_id: str) -> str:
    """The Ray namespace of one dray deployment."""
    return f"{NAMESPACE_PREFIX}{deployment_id}"


def supervisor_name(job_id: str, attempt: int) -> str:
    return f"dray:{job_id}:{attempt}:supervisor"


def rank_name(job_id: str, attempt: int, role: str, rank: int, incarnation: int) -> str:
    return f"dray:{job_id}:{attempt}:{role}:{rank}:{incarnation}"


def repr_name(job_name: str, actor_name: str) -> str:
    """The actor's name with the job's name instead of its id, as Ray shows it to people (`repr`).
    Two jobs may share a name, and a name may contain any character, so nothing parses it."""
    return ":".join([job_name, *actor_name.split(":")[2:]])


def agent_name(node_id: str) -> str:
    return f"dray:node:{node_id}:agent"


def attempt_prefix(job_id: str, attempt: int) -> str:
    """The path of an attempt's files below the storage URL; no other attempt writes there."""
    return f"jobs/{job_id}/attempts/{attempt}"


def folder_url(storage_url: str, job_id: str) -> str:
    """The URL of the files of a script's checkpoint folder, which all attempts share."""
    return f"{storage_url.rstrip('/')}/jobs/{job_id}/checkpoint-folder"
