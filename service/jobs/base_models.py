"""Checks of a base model whose files the server can read. The nodes repeat the checks."""

from __future__ import annotations

import asyncio
import json

from dray.spec import JobSpec
from dray.spec.program import base_files
from ray_workers.shared.node_needs import DataPolicy
from service.checkpoints.base_jobs import AT_BASE
from service.domain.errors import InvalidDocument
from service.planning import base_config


async def refuse_unfit(spec: JobSpec, policy: DataPolicy) -> None:
    """Raise InvalidDocument if the base of a job can't be fine-tuned. A folder that this machine
    can't read, or that is outside the allowed folders, is not checked."""
    if spec.method is not None:
        await asyncio.to_thread(_check, spec, spec.method.max_length, policy)


def _check(spec: JobSpec, max_length: int, policy: DataPolicy) -> None:
    try:
        folder = base_config.folder_of(spec, policy)
        if folder is None:
            return
        names = {path.name for path in folder.iterdir()}
        fault = base_files.fault_of_names(names)
        config = folder / base_files.CONFIG
        text = None if fault else base_config.content(config)
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
