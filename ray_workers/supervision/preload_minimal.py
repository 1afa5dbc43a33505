"""Prepares the embedded Ray's idle worker processes (`RAY_preload_python_modules`).

The processes import the code of the actors in advance, and skip what dray's actors do not need:
when a worker unpacks its first argument, Ray registers serializers, for which it imports numpy,
pyarrow, pydantic and starlette if they are installed. This would take a quarter of a second of CPU
time and 50 MB for each actor of a job. On a shared cluster, where other objects might need the
serializers, `ray_workers.supervision.preload` is used instead.

Each process also starts its own session. If Linux schedules processes in groups by session
(sched_autogroup), all of Ray together gets only as much of an overloaded CPU as any other program,
and a supervisor would have to share this with a dozen processes of Ray's dashboard.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ray.util import serialization_addons

import ray_workers.node.agent  # Ray loads the class of each actor that one looks up
import ray_workers.supervision.supervisor  # noqa: F401  (and with it the rank actor)


def _register_nothing(context: Any) -> None:
    """Do nothing. Replaces Ray's function, which Ray looks up by name for each call."""


serialization_addons.apply = _register_nothing
with contextlib.suppress(PermissionError):  # it is already the leader of a process group
    os.setsid()
