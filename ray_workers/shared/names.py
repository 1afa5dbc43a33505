"""The names of an attempt's Ray actors, and of its files in the storage."""

from __future__ import annotations

NAMESPACE_PREFIX = "dray-"


def namespace(deployment_id: str) -> str:
    """Return the Ray namespace of a dray deployment."""
    return f"{NAMESPACE_PREFIX}{deployment_id}"


def supervisor_name(job_id: str, attempt: int) -> str:
    return f"dray:{job_id}:{attempt}:supervisor"


SHARED_PREFIX = "dray:shared-supervisor:"
"""Prefix for the names of supervisors that run short jobs of an array, one after another."""


def rank_name(job_id: str, attempt: int, role: str, rank: int, incarnation: int) -> str:
    return f"dray:{job_id}:{attempt}:{role}:{rank}:{incarnation}"


def repr_name(job_name: str, actor_name: str) -> str:
    """Return the actor's name with the job's name instead of the job's id, for display in Ray
    (`repr`). Job names are not unique and can contain any character, so the result must not be
    parsed."""
    return ":".join([job_name, *actor_name.split(":")[2:]])


def agent_name(node_id: str) -> str:
    return f"dray:node:{node_id}:agent"


def attempt_prefix(job_id: str, attempt: int) -> str:
    """Return the path, below the storage URL, of the folder to which only this attempt writes."""
    return f"jobs/{job_id}/attempts/{attempt}"


def folder_url(storage_url: str, job_id: str) -> str:
    """Return the URL of the files in a script's checkpoint folder, which all attempts share."""
    return f"{storage_url.rstrip('/')}/jobs/{job_id}/checkpoint-folder"


UPLOADS_FOLDER = "uploads"
"""Folder of users' uploaded files, below the storage URL."""


def upload_name(file_id: str) -> str:
    """Return the path of an uploaded file below the folder of uploaded files."""
    return f"{file_id}/data.jsonl"
