"""Checks of a base model whose files the server can read. The nodes repeat the checks."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dray.spec import JobSpec, Pretrained
from dray.spec.program import base_files
from ray_workers.shared.node_needs import DataPolicy
from service.checkpoints.base_jobs import AT_BASE
from service.domain.errors import InvalidDocument

MAX_CONFIG_BYTES = 1 << 20


async def refuse_unfit(spec: JobSpec, policy: DataPolicy) -> None:
    """Raise InvalidDocument if the base of a job can't be fine-tuned. A folder that this machine
    can't read, or that is outside the allowed folders, is not checked."""
    if isinstance(spec.model, Pretrained) and spec.method is not None:
        url = urlsplit(spec.model.base)
        if url.scheme == "file":
            folder = Path(unquote(url.path))
            await asyncio.to_thread(_check, folder, spec.method.max_length, policy)


def _check(folder: Path, max_length: int, policy: DataPolicy) -> None:
    try:
        folder = folder.resolve()
        if policy.file_roots is not None and not any(
            folder.is_relative_to(Path(root).resolve()) for root in policy.file_roots
        ):
            return
        names = {path.name for path in folder.iterdir()}
        fault = base_files.fault_of_names(names)
        config = folder / base_files.CONFIG
        text = None if fault else _content(config)
    except (OSError, RuntimeError, ValueError):
        return
    if fault is not None:
        raise InvalidDocument(f"{folder} {fault}", pointer=AT_BASE)
    if text is None:
        return
    try:
        fault = base_files.fault_of_config(json.loads(text), max_length)
    except (ValueError, RecursionError) as error:
        fault = f"is not a JSON document: {error}"
    if fault is not None:
        raise InvalidDocument(f"{config} {fault}", pointer=AT_BASE)


def _content(path: Path) -> bytes | None:
    """Return the content of a file. Returns None for a link, which may lead outside of the allowed
    folders, for a pipe, which would block, and for a file of more than MAX_CONFIG_BYTES."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = file.read(MAX_CONFIG_BYTES + 1)
    return text if len(text) <= MAX_CONFIG_BYTES else None
