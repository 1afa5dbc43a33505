"""Prepares the embedded Ray's idle worker processes (`RAY_preload_python_modules`).

The processes import the code of the actors, and omit what no actor of dray needs. When a worker
unpacks its first argument, Ray registers serializers and, for these, imports numpy, pyarrow,
pydantic and starlette if they are installed. This takes a quarter of a second of a core and 50 MB
for each actor of a job. On a shared cluster, whose other objects may need the serializers,
`ray_workers.supervision.preload` is used instead.

Each process also leads its own session. If Linux groups processes by session (sched_autogroup), all
of Ray gets only as much of an overloaded CPU as any other program, and a supervisor would share
this with a dozen processes of Ray's dashboard.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ray.util import serialization_addons

import ray_workers.node.agent  # Ray loads the class of each actor that one looks up
import ray_workers.supervision.supervisor  # noqa: F401  (and with it the rank actor)


def _register_nothing(context: Any) -> None:
    """Replace Ray's function, which Ray looks up by name at each call."""


serialization_addons.apply = _register_nothing
with contextlib.suppress(PermissionError):  # it leads a process group already
    os.setsid()
