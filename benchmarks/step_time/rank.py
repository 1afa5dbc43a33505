"""One rank of the measurement, started by torchrun: both loops in one process, in alternating
blocks.

dray's side is the real training loop with the real spool. After every other block, it runs two
blocks of the plain loop (A B B A A B B A ...), so that changes in the machine's speed affect both
equally.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from benchmarks.step_time.plain import PlainLoop
from benchmarks.step_time.work import WORKS
from dray.spec import JobSpec
from ray_workers.recipes import RECIPES
from ray_workers.shared.contracts import WORKER_MTBF_S, RankTask
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.node_needs import DataPolicy, EnvironmentPolicy
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.sampler import steps_per_epoch
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.run import train
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.process import rank_main


class Plain(Protocol):
    """The other loop."""

    def train(self, num_steps: int) -> None: ...


class AlternatingLoop(Trainer):
    """dray's loop, interrupted at the end of blocks for the other loop's turn.

    A block's time is the total time from its start to the end of its last step, including reports
    and the loop itself. Figures of steps that are still pending at the end of a block are written
    in the next block.
    """

    def __init__(
        self,
        task: RankTask,
        spec: JobSpec,
        workload: Workload,
        plain: Callable[[], Plain],
        steps_per_block: int,
    ) -> None:
        """plain: creates the other loop, once the process group exists."""
        super().__init__(task, spec, workload, HeartbeatPage(None))
        self._make_plain = plain
        self.steps_per_block = steps_per_block
        self.dray_s: list[float] = []
        self.plain_s: list[float] = []

    @contextmanager
    def steps_are_timed(
        self, sent_bytes: Callable[[], int | None], num_ranks: int
    ) -> Iterator[None]:
        self._plain = self._make_plain()
        self._meet()
        self._began = time.perf_counter()
        with super().steps_are_timed(sent_bytes, num_ranks):
            yield

    def settle(self) -> None:
        super().settle()
        if self.progress.step % self.steps_per_block != 0:
            return
        self._end_block()

    def finish(self) -> None:
        """Do nothing, because the job's results are not timed."""

    def _end_block(self) -> None:
        self._wait_for_device()
        self.dray_s.append(time.perf_counter() - self._began)
        if len(self.dray_s) % 2 == 1:
            self._time_plain()
            self._time_plain()
        self._meet()
        self.reporter.restart_clock()
        self._began = time.perf_counter()

    def _meet(self) -> None:
        """Synchronize the ranks, with no pending work."""
        self._wait_for_device()
        if dist.is_initialized():
            dist.barrier()

    def _wait_for_device(self) -> None:
        if self.task.device == "cuda":
            torch.cuda.synchronize()

    def _time_plain(self) -> None:
        self._meet()
        began = time.perf_counter()
        self._plain.train(self.steps_per_block)
        self._wait_for_device()
        self.plain_s.append(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    work, folder = WORKS[options.work], options.folder
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    num_samples = len(_build(work.spec(1)).train)
    steps_per_block = work.epochs_per_block * steps_per_epoch(num_samples, work.global_batch_size)
    # One more step than is timed, because the model is evaluated and saved after the last one.
    spec = work.spec(options.num_blocks * steps_per_block + 1)
    task = rank_task(spec, rank, world_size, folder)
    os.environ.update(rank_main.environment(task, spec))
    torch.set_num_threads(spec.resources.cpus_per_worker)
    plain = _build(spec)
    loop = AlternatingLoop(
        task, spec, _build(spec), lambda: PlainLoop(plain, spec.train), steps_per_block
    )
    alternate(loop, folder)


def alternate(loop: AlternatingLoop, folder: Path) -> None:
    """Train to the end, write the times of rank 0 to the folder, and exit the process."""
    train(loop, RendezvousHandler(loop.task, loop.page))
    if loop.rank == 0:
        times = {
            "dray_s": loop.dray_s,
            "plain_s": loop.plain_s,
            "steps_per_block": loop.steps_per_block,
            "num_steps": loop.calendar.total_steps,
        }
        (folder / "times.json").write_text(json.dumps(times))
    # Exit like dray's training processes. The interpreter's shutdown destroys objects that gloo's
    # threads still use, and sometimes aborts.
    sys.stdout.flush()
    os._exit(0)


def _build(spec: JobSpec) -> Workload:
    return RECIPES["image_classification"].build(spec, DataPolicy.open())


def rank_task(
    spec: JobSpec, rank: int, world_size: int, folder: Path, *, device: str = "cpu"
) -> RankTask:
    """Return the task that a rank actor would provide, with spools and storage in the folder."""
    return RankTask(
        job_id="step-time",
        attempt=1,
        rank=rank,
        incarnation=0,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        spec=spec.model_dump(mode="json"),
        spool_dir=str(folder / f"spool-{rank}"),
        temp_dir=str(folder / "tmp"),
        checkpoint_url=(folder / "checkpoints").as_uri(),
        artifact_url=(folder / "artifacts").as_uri(),
        work_dir=str(folder / "work"),
        folders_dir=str(folder / "folders"),
        folder_url=(folder / "checkpoint-folder").as_uri(),
        num_nodes=1,
        resume_from=(),
        init_from=None,
        older_than_init_from=(),
        data_policy=DataPolicy.open(),
        environment_policy=EnvironmentPolicy.open(),
        spool_limit_bytes=64 << 20,
        output_limit_bytes=100 << 30,
        worker_mtbf_s=WORKER_MTBF_S,
        device=device,
        env={},
        page_prefix="",
        generation=0,
        peers=(),
        furthest_step=0,
        array_index=None,
        scheduled_at=None,
        parameters={},
        silo_source=None,
    )


if __name__ == "__main__":
    main()
