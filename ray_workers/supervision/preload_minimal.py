"""Prepares the embedded Ray's idle worker processes (`RAY_preload_python_modules`).

The processes import the code of the actors in advance, and prevent Ray from registering serializers
that dray's actors do not need. Normally, when a worker unpacks its first argument, Ray registers
serializers, for which it imports numpy, pyarrow, pydantic and starlette if they are installed.
These imports would take a quarter of a second of CPU time and 50 MB for each actor of a job. On a
shared cluster, the actors of other programs might need the serializers, so
`ray_workers.supervision.preload` is used instead.

Each process also starts its own session. Linux may divide CPU time among sessions
(sched_autogroup). In a single session, all of Ray's processes together would get only as much of an
overloaded CPU as any other program, and a supervisor would have to share that time with a dozen
processes of Ray's dashboard.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ray.util import serialization_addons

import ray_workers.node.agent  # Ray loads the class of an actor when the actor is looked up
import ray_workers.supervision.supervisor  # noqa: F401 (also imports the rank actor)


def _register_nothing(context: Any) -> None:
    """Do nothing. This function replaces Ray's own function, which Ray looks up by name in each
    call."""


serialization_addons.apply = _register_nothing
with contextlib.suppress(PermissionError):  # the process already leads a process group
    os.setsid()
