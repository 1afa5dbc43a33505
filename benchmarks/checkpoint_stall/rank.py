"""One rank of the measurement, started by torchrun: one loop, saved in turn by each contender.

A turn is some steps without a save, a save with the steps after it until it is on the disk, and
some steps without a save again. Its stall is how much longer the middle part took than as many
of the steps around it.
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
"""Steps without a save before and after each."""
AT_LEAST = 2
"""Steps after a save that are counted, also if it was done sooner."""
WARMUP_TURNS = 1


class Loop:
    """A plain DDP loop with a place to save from."""

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
        """One step."""
        self.step += 1
        loss = self._module(self._inputs).square().mean()
        loss.backward()
        saver.before_update()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def turn(self, saver: Saver) -> float:
        """Seconds of stall of one save."""
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
    """Whether it is so on any rank; part of every timed step alike."""
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
    for saver in loop.savers.values():  # memory, plans and threads that stay are made here
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
    os._exit(0)  # gloo's threads and the interpreter's own end do not get on


if __name__ == "__main__":
    main()
