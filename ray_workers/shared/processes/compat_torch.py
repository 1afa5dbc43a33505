"""The private names of torch that show the collectives of a process in its groups.

Torch is not imported here: a process that has not loaded it has no groups. Tested with torch 2.13;
tests/unit/workers/shared/test_collectives.py fails if torch has changed the names.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def flight_records() -> list[bytes]:
    """The records of torch's flight recorder as JSON: NCCL's, if torch has one, and the record of
    the other backends. Empty if torch records nothing, or is too old to record by default.

    The public reader (`torch.distributed.flight_recorder`) reads files that a process writes after
    a collective has timed out. JSON omits the stacks of entries, which need the interpreter's lock,
    so a thread may read while another is in a collective.
    """
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if any(os.environ.get(name) == "0" for name in _SIZES):
        return []
    if not hasattr(c10d, "_dump_fr_trace_json"):
        return []
    dumps = [getattr(c10d, "_dump_nccl_trace_json", None), c10d._dump_fr_trace_json]
    return [dump() for dump in dumps if dump is not None]


def group_names() -> list[str]:
    """Names of the groups that this process is in, equal on all their ranks. A public function
    gives a group's name, but none lists the groups."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return []
    world = distributed._world
    return [world.pg_names[group] for group in list(world.pg_map)]
