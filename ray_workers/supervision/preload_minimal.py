"""Preparation of the embedded Ray's idle worker processes (`RAY_preload_python_modules`).

The processes import the code of the actors. And they do without what no actor of dray needs: the
first argument that a worker unpacks makes Ray register serializers, and for these import numpy,
pyarrow, pydantic and starlette where they are installed: a quarter of a second of a core and 50 MB,
for each actor of a job. On a cluster that others use as well, whose objects may need the
serializers, `ray_workers.supervision.preload` is used instead.

And each process leads a session of its own. Where Linux groups processes by session
(sched_autogroup), on an overloaded machine all of Ray has only as much of a CPU as any one program
there, and a supervisor would share that with a dozen processes of Ray's dashboard.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ray.util import serialization_addons

import ray_workers.node.agent  # Ray loads the class of each actor that one looks up
import ray_workers.supervision.supervisor  # noqa: F401  (and with it the rank actor)


def _register_nothing(context: Any) -> None:
    """Instead of Ray's own, which looks it up by its name each time."""


serialization_addons.apply = _register_nothing
with contextlib.suppress(PermissionError):  # it leads a process group already
    os.setsid()
