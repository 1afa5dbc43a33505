"""Imports modules into Ray's idle worker processes (`RAY_preload_python_modules`).

When a worker unpacks its first argument, Ray registers serializers, for which it imports numpy,
pyarrow, pydantic and starlette if they are installed. These imports take 0.15 s of CPU time for
each actor when a job starts. This module imports these packages in advance, while the process is
idle.
"""

from __future__ import annotations

import contextlib
import importlib

import ray_workers.node.agent  # Ray loads the class of an actor when the actor is looked up
import ray_workers.supervision.supervisor  # noqa: F401 (also imports the rank actor)

for _name in ("numpy", "pyarrow.json", "pydantic.v1.fields", "starlette.datastructures"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
