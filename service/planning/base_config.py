"""Reads the `config.json` of a base model in a folder on the server's machine."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dray.spec import JobSpec, Pretrained
from dray.spec.program import base_files
from ray_workers.shared.node_needs import DataPolicy

MAX_CONFIG_BYTES = 1 << 20


def read(spec: JobSpec, policy: DataPolicy) -> Mapping[str, Any] | None:
    """Return the configuration of the job's base; None if the job has no base, or if this machine
    can't read its configuration."""
    try:
        folder = folder_of(spec, policy)
        text = None if folder is None else content(folder / base_files.CONFIG)
        config = None if text is None else json.loads(text)
    except (OSError, RuntimeError, ValueError):  # RecursionError is a RuntimeError
        return None
    return config if isinstance(config, Mapping) else None


def folder_of(spec: JobSpec, policy: DataPolicy) -> Path | None:
    """Return the folder of the job's base; None if it isn't on this machine's disk, or if it is
    outside the allowed folders. Raises OSError, RuntimeError or ValueError for paths that can't be
    resolved."""
    if not isinstance(spec.model, Pretrained):
        return None
    url = urlsplit(spec.model.base)
    if url.scheme != "file":
        return None
    folder = Path(unquote(url.path)).resolve()
    roots = policy.file_roots
    if roots is not None and not any(folder.is_relative_to(Path(r).resolve()) for r in roots):
        return None
    return folder


def content(path: Path) -> bytes | None:
    """Return the content of a file. Returns None for a link, which may lead outside of the allowed
    folders, for a pipe, which would block, and for a file of more than MAX_CONFIG_BYTES."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = file.read(MAX_CONFIG_BYTES + 1)
    return text if len(text) <= MAX_CONFIG_BYTES else None
