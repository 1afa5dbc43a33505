"""The private name of torch that prepared training needs: see `ray_workers.training.core`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call it in the thread that runs this backward pass, at the end of the pass. For a hook.

    Public hooks run before a gradient is added up, or know no end of the pass; DDP and FSDP use
    this one. Seen to work with torch 2.13.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
