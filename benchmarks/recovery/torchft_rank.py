"""One replica of torchft's fault-tolerant DDP, with the same model and data.

It trains until it is terminated, or until `is_over` returns true. torchft transfers the survivor's
state to a replacement.
"""

# No postponed annotations, because DDP inspects the annotations of its hook.
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket, TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.first_step.plain import build_model
from benchmarks.recovery.commits import CommitLog
from benchmarks.recovery.plain import Samples, make_optimizer
from benchmarks.recovery.work import NUM_RANKS

TIMEOUT = timedelta(seconds=30)


class Parallel(DistributedDataParallel):  # type: ignore[misc]  # torchft has no types
    """torchft's DDP with a modified hook. In version 0.2, the original hook fails if gloo's `wait`
    raises, which also ends the survivor. This hook leaves the error to the manager, which already
    has it."""

    @staticmethod
    def _comm_hook(state: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main(folder: Path, rank: int, is_over: Callable[[], bool] = lambda: False) -> None:
    model = build_model()
    wrapped = make_optimizer(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        wrapped.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": wrapped.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
    )
    module = Parallel(manager, model, gradient_as_bucket_view=True)
    optimizer = Optimizer(manager, wrapped)
    loss_of = nn.CrossEntropyLoss()
    samples, log = Samples(), CommitLog(folder, rank)
    while not is_over():
        done = manager.current_step()
        inputs, targets = samples.of(done + 1, rank, NUM_RANKS)
        optimizer.zero_grad()
        loss_of(module(inputs), targets).backward()
        optimizer.step()
        if manager.current_step() > done:
            # The group's number, for which torchft has no public name.
            log.committed(manager.current_step(), manager._quorum_id)
    manager.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
