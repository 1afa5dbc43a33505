"""Where a node keeps what belongs to one deployment: its forkserver's socket and its spools.

They lie under the system's temporary folder, because the path of a socket has at most 107 bytes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit


def nonce_path(storage_url: str) -> Path | None:
    """Where storage that is a folder holds the service's nonce; None for other storage.

    A node that reads another text there does not see the service's files.
    """
    url = urlsplit(storage_url)
    return Path(url.path, ".dray-nonce") if url.scheme == "file" else None


def entries(folder: Path) -> list[Path]:
    """What lies in a folder; nothing if it is not there, or goes meanwhile (`glob` may raise)."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def machine_root() -> Path:
    """Everything of this user's dray on this machine that does not outlive a boot."""
    return Path(tempfile.gettempdir(), f"dray-{os.getuid()}")


def deployment_root(deployment_id: str) -> Path:
    """Everything of one deployment on this machine."""
    return machine_root() / deployment_id


def runtime_dir(deployment_id: str, node_id: str) -> Path:
    """Everything of one node. Several nodes may share a machine."""
    return deployment_root(deployment_id) / node_id[:16]


def socket_path(deployment_id: str, node_id: str) -> str:
    return str(runtime_dir(deployment_id, node_id) / "fork.sock")


def spool_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """The spools of one attempt on one node."""
    return runtime_dir(deployment_id, node_id) / "spool" / job_id / str(attempt)


def page_dir(deployment_id: str, node_id: str, job_id: str, attempt: int) -> Path:
    """Where the ranks of one attempt on one node say how far they are, and are told to regroup."""
    return runtime_dir(deployment_id, node_id) / "pages" / job_id / str(attempt)
