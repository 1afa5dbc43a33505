"""The private API of torch that prepared training and divided tensors need. See also
`ray_workers.training.core`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
"""FSDP's placement of a dimension that is already split along the tensor axis. The class is not a
subclass of `Shard`, and has no public name."""


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass, in the thread that runs the pass.
    Must be called from a hook.

    No public hook runs at the end of a pass. DDP and FSDP use this function too. Works with torch
    2.13.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
