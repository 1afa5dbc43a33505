"""Checks of a base model whose files the server can read. The nodes repeat the checks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dray.spec import JobSpec, Pretrained
from dray.spec.program import base_files
from ray_workers.shared.node_needs import DataPolicy
from service.domain.errors import InvalidDocument

MAX_CONFIG_BYTES = 1 << 20
AT_BASE = "/model/base"


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
        text = b"" if fault or config.is_symlink() else config.read_bytes()[:MAX_CONFIG_BYTES]
    except (OSError, RuntimeError, ValueError):
        return
    if fault is not None:
        raise InvalidDocument(f"{folder} {fault}", pointer=AT_BASE)
    if config.is_symlink():
        return  # it may lead outside of the allowed folders
    try:
        fault = base_files.fault_of_config(json.loads(text), max_length)
    except (ValueError, RecursionError) as error:
        fault = f"is not a JSON document: {error}"
    if fault is not None:
        raise InvalidDocument(f"{config} {fault}", pointer=AT_BASE)
