"""What the embedded Ray's idle worker processes do before they are needed
(`RAY_preload_python_modules`).

They import the code of the actors. And they spare themselves what no actor of dray needs: the first
argument that a worker unpacks makes Ray register serializers, and for these import numpy, pyarrow,
pydantic and starlette where they are installed: a quarter of a second of a core and 50 MB, for each
actor of a job. Not for a cluster that others use as well, whose objects may need them: there it is
`ray_workers.warm`.
"""

from __future__ import annotations

from typing import Any

from ray.util import serialization_addons

import ray_workers.supervisor  # noqa: F401  (and with it the rank actor)


def _register_nothing(context: Any) -> None:
    """Instead of Ray's own, which looks it up by its name each time."""


serialization_addons.apply = _register_nothing
