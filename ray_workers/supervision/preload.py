"""Imports of Ray's idle worker processes before they are needed (`RAY_preload_python_modules`).

The first argument that a worker unpacks makes Ray register serializers, and for these import
numpy, pyarrow, pydantic and starlette where they are installed: 0.15 s of a core, for each actor of
a job that starts. Here they are imported while the process waits for work.
"""

from __future__ import annotations

import contextlib
import importlib

import ray_workers.node.agent  # Ray loads the class of each actor that one looks up
import ray_workers.supervision.supervisor  # noqa: F401  (and with it the rank actor)

for _name in ("numpy", "pyarrow.json", "pydantic.v1.fields", "starlette.datastructures"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
