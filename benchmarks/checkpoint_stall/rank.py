"""One rank of the measurement, started by torchrun: one loop that is saved by each contender in
turn.

A turn consists of some steps without a save, a save with the steps after it until the save is on
disk, and again some steps without a save. Its stall is how much longer the middle part took than
the same number of the surrounding steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.checkpoint_stall.savers import Copy, Dcp, Dray, Nothing, Saver, TorchSave
from benchmarks.checkpoint_stall.work import WORKS, Work

AROUND = 4
"""Number of steps without a save before and after each save."""
AT_LEAST = 2
"""Minimum number of steps after a save that are counted, even if the save completes sooner."""
WARMUP_TURNS = 1


class Loop:
    """A plain DDP loop from which contenders save."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.model = work.model()
        self._module = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        assert isinstance(self._module, DistributedDataParallel)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._inputs = torch.randn(work.batch_size, work.width)
        self.step = 0
        parts = self.model, self._optimizer
        self.savers: dict[str, Saver] = {
            "dray": Dray(*parts, folder / "dray"),
            "dcp": Dcp(*parts, folder / "dcp"),
            "torch.save": TorchSave(*parts, folder / "torch.save"),
            "copy": Copy(*parts),
            "nothing": Nothing(),
        }

    def train(self, saver: Saver) -> None:
        """Run one step."""
        self.step += 1
        loss = self._module(self._inputs).square().mean()
        loss.backward()
        saver.before_update()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def turn(self, saver: Saver) -> float:
        """Return the stall of one save, in seconds."""
        around = self._plain(saver)
        dist.barrier()
        began = time.perf_counter()
        saver.save(self.step)
        num_steps = 0
        while num_steps < AT_LEAST or _anywhere(saver.is_saving()):
            self.train(saver)
            num_steps += 1
        took = time.perf_counter() - began
        around += self._plain(saver)
        saver.tidy()
        return took - num_steps * statistics.fmean(around)

    def _plain(self, saver: Saver) -> list[float]:
        dist.barrier()
        times = []
        for _ in range(AROUND):
            began = time.perf_counter()
            self.train(saver)
            _anywhere(False)
            times.append(time.perf_counter() - began)
        return times


def _anywhere(flag: bool) -> bool:
    """Return whether `flag` is set on any rank. This is part of every timed step."""
    shared = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return bool(shared.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("num_turns", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = Loop(WORKS[options.work], options.folder)
    for saver in loop.savers.values():  # creates the persistent memory, plans and threads
        for _ in range(WARMUP_TURNS):
            loop.turn(saver)
    stalls: dict[str, list[float]] = {name: [] for name in loop.savers}
    for number in range(options.num_turns):
        names = list(loop.savers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            stalls[name].append(loop.turn(loop.savers[name]))
    if dist.get_rank() == 0:
        (options.folder / "stalls.json").write_text(json.dumps(stalls))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort during the interpreter's shutdown


if __name__ == "__main__":
    main()
