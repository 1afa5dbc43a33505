"""The private names of torch that tell what a process does in its groups.

No torch is imported here: a process that has not loaded it has no groups. Seen to work with torch
2.13; tests/unit/workers/shared/test_collectives.py fails where torch has changed them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def flight_records() -> list[bytes]:
    """The records of torch's flight recorder, as JSON: NCCL's, where torch has it, and that of the
    other backends. Empty where torch records nothing, or is too old to record without being asked.

    Their public reader (`torch.distributed.flight_recorder`) takes files that a process writes when
    a collective has timed out. The stacks of entries, which need the interpreter's lock, are not in
    JSON, so a thread may read while another is in a collective.
    """
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if any(os.environ.get(name) == "0" for name in _SIZES):
        return []
    if not hasattr(c10d, "_dump_fr_trace_json"):
        return []
    dumps = [getattr(c10d, "_dump_nccl_trace_json", None), c10d._dump_fr_trace_json]
    return [dump() for dump in dumps if dump is not None]


def group_names() -> list[str]:
    """Names of the groups that this process is in, the same on all their ranks; a public function
    gives a group's name, and none lists the groups."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return []
    world = distributed._world
    return [world.pg_names[group] for group in list(world.pg_map)]
