"""Access to torch's private API for the collectives of a process's groups.

Torch is not imported here, because a process that has not already loaded torch has no groups.
Tested with torch 2.13; tests/unit/workers/shared/test_collectives.py fails if torch changes these
names.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def flight_records() -> list[bytes]:
    """Return the records of torch's flight recorder as JSON: NCCL's record, if torch has NCCL, and
    the record of the other backends. The list is empty if torch records nothing, or is too old to
    record by default.

    The public reader (`torch.distributed.flight_recorder`) only reads files that a process writes
    after a collective has timed out. The JSON omits the entries' stacks, which need the interpreter
    lock, so a thread can read the record while another thread is in a collective.
    """
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if any(os.environ.get(name) == "0" for name in _SIZES):
        return []
    if not hasattr(c10d, "_dump_fr_trace_json"):
        return []
    dumps = [getattr(c10d, "_dump_nccl_trace_json", None), c10d._dump_fr_trace_json]
    return [dump() for dump in dumps if dump is not None]


def group_names() -> list[str]:
    """Return the names of the groups that this process is in. A group has the same name on all
    ranks. There is a public function for a group's name, but none that lists the groups."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return []
    world = distributed._world
    return [world.pg_names[group] for group in list(world.pg_map)]
