"""Runs the ranks of a training task as processes on this machine, with the store in the parent.

Like real ranks, the processes are forked from a forkserver that has imported everything.

In about one of ten thousand runs, gloo's own thread corrupts the heap and a rank segfaults (ADR
12). No test deliberately causes this for one of several ranks, so such a run is reported in a
warning and repeated once.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from dray.spec import JobSpec
from dray.train.checkpoints import CheckpointRef
from dray.train.spool import segments
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import AWAITING, RankTask
from ray_workers.shared.heartbeat import RankAssignment, RankPhase, RankStatus
from ray_workers.shared.spool_reader import parse_key, spool_key
from ray_workers.supervision.rules import recovery_rules
from ray_workers.training.elastic.store_server import loopback_store
from ray_workers.training.process import rank_main
from tests.wire import rank_task

DEADLINE_S = 200.0
"""Exceeding this limit indicates a fault, because the longest run takes 20 s on two processors."""
_PY_SPY = Path(sys.executable).with_name("py-spy")  # included in ray[default]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "tests.unit.training.frozen"])


def make_task(
    home: Path,
    spec: dict[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    attempt: int = 1,
    port: int = 0,
    resume_from: Sequence[CheckpointRef] = (),
    init_from: CheckpointRef | None = None,
    older: Sequence[CheckpointRef] = (),
    device: str = "cpu",
    incarnation: int = 0,
    generation: int = 0,
) -> RankTask:
    """Return a task whose spool, checkpoints, and artifacts are in `home`."""
    base = home / f"attempt-{attempt}"
    stream = "metrics" if generation == 0 else "early"
    return rank_task(
        attempt=attempt,
        rank=rank,
        incarnation=incarnation,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_port=port,
        spec=JobSpec.model_validate(spec).model_dump(mode="json"),
        spool_dir=str(base / "spool" / spool_key(rank, incarnation, stream)),
        checkpoint_url=(base / "checkpoints").as_uri(),
        artifact_url=(base / "artifacts").as_uri(),
        work_dir=str(home / "work" / "job"),
        folders_dir=str(base / "folders"),
        folder_url=(home / "checkpoint-folder").as_uri(),
        resume_from=tuple(resume_from),
        init_from=init_from,
        older_than_init_from=tuple(older),
        device=device,
        page_prefix=heartbeat.prefix_of(base / "pages", rank, incarnation),
        generation=generation,
    )


def run_ranks(
    home: Path,
    spec: dict[str, Any],
    *,
    world_size: int,
    attempt: int = 1,
    resume_from: Sequence[CheckpointRef] = (),
    init_from: CheckpointRef | None = None,
    older: Sequence[CheckpointRef] = (),
    device: str = "cpu",
    before: Callable[[RankTask], None] | None = None,
    recovers: bool = False,
    goes_on: bool = False,
    gains: bool = False,
    ends_with_error: bool = False,
    num_spares: int = 0,
) -> list[int | None]:
    """Train to the end, and return the exit code of each rank, negative for a signal. `before` runs
    in each process before training, to prepare a fault. With `recovers`, a rank that is killed or
    can't use its GPU is replaced, as by a supervisor, and its exit code is the one of its last
    process. With `goes_on`, the others immediately continue without it, and its replacement joins
    when it is ready. With `gains`, one more rank joins the group when it is ready; `world_size` is
    the previous number. With `ends_with_error`, all ranks are killed after one has ended with an
    error. With `num_spares`, these processes wait without a rank, and replace ranks that are
    killed."""

    def train() -> list[int | None]:
        store = loopback_store()
        make = functools.partial(
            make_task,
            home,
            spec,
            world_size=world_size,
            attempt=attempt,
            port=store.port,
            resume_from=resume_from,
            init_from=init_from,
            older=older,
            device=device,
        )
        gang = Gang(make, world_size, before)
        try:
            gang.start()
            gang.keep_spares(num_spares)
            if gains:
                gang.gain()
            gang.wait(
                recovers=recovers or goes_on, goes_on=goes_on, ends_with_error=ends_with_error
            )
        finally:
            gang.kill()
        return [process.exitcode for process in gang.processes]

    try:
        return train()
    except Segfault as fault:
        warnings.warn(f"made again: {fault}", stacklevel=2)
        shutil.rmtree(home / f"attempt-{attempt}", ignore_errors=True)  # it might not exist yet
        return train()


def run_in_group(part: Callable[..., None], world_size: int, *given: Any) -> None:
    """Run `part(rank, *given)` in processes that form a gloo group. Raises AssertionError if one
    fails."""

    def run() -> list[int | None]:
        store = loopback_store()
        group = (world_size, store.port)
        ranks = [
            _context.Process(target=_member, args=(part, rank, *group, given), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + DEADLINE_S
        running = {process.sentinel: process for process in ranks}
        try:
            while running and time.monotonic() < deadline:
                for sentinel in connection.wait(list(running), 1.0):
                    _join(running.pop(sentinel))
        finally:
            for process in ranks:
                process.kill()
        return [process.exitcode for process in ranks]

    try:
        codes = run()
    except Segfault as fault:
        warnings.warn(f"made again: {fault}", stacklevel=2)
        codes = run()
    assert codes == [0] * world_size, "what went wrong is on standard error"


class Segfault(Exception):
    """One of several ranks was killed by SIGSEGV, and the others might wait for it forever."""


def _join(process: Any) -> None:
    """Join a process. Raises Segfault if it was killed by SIGSEGV."""
    process.join()
    if process.exitcode == -signal.SIGSEGV:
        raise Segfault(f"process {process.pid} was killed by SIGSEGV")


def _member(
    part: Callable[..., None], rank: int, world_size: int, port: int, given: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    store.set(f"connected/{rank}", "")
    # A `part` can close its connections immediately, which would make a rank that is still
    # connecting fail.
    store.wait([f"connected/{each}" for each in range(world_size)])
    part(rank, *given)
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can crash when the interpreter exits


class Gang:
    """The processes of a group, and the replacements of killed processes."""

    def __init__(
        self,
        make: Callable[..., RankTask],
        world_size: int,
        before: Callable[[RankTask], None] | None,
    ) -> None:
        self._make = make
        self._before = before
        self.round_number = 0
        self.tasks = [make(rank=rank) for rank in range(world_size)]
        self._placed = list(self.tasks)
        """The members of the group by rank, if the group continues without lost ranks."""
        self._coming: list[RankTask] = []
        """Their replacements that are not ready yet."""
        self.processes = [self._process(task) for task in self.tasks]
        self._num_spares = self._num_spares_ever = 0
        self._spares: list[tuple[RankTask, Any]] = []

    def keep_spares(self, number: int) -> None:
        """Keep this number of processes that wait for a rank. Spares that have died or have got a
        rank are replaced."""
        self._num_spares = number
        self._spares = [spare for spare in self._spares if spare[1].is_alive()]
        while len(self._spares) < number:
            index = len(self.tasks) + self._num_spares_ever
            task = self._make(rank=index, incarnation=1, generation=AWAITING)
            self._spares.append((task, self._process(task)))
            self._spares[-1][1].start()
            self._num_spares_ever += 1

    def _standing_spare(self) -> tuple[RankTask, Any] | None:
        for task, process in self._spares:
            seen = heartbeat.read_status(heartbeat.page_path(task.page_prefix))
            if seen and seen.phase is RankPhase.STANDBY and process.is_alive():
                return task, process
        return None

    def _process(self, task: RankTask) -> Any:
        return _context.Process(target=_child, args=(task.to_json(), self._before), daemon=True)

    def start(self) -> None:
        for process in self.processes:
            process.start()

    def wait(self, *, recovers: bool, goes_on: bool = False, ends_with_error: bool = False) -> None:
        """Wait until all have ended. Raises Segfault if one of several was killed by SIGSEGV and
        none are replaced."""
        deadline = time.monotonic() + DEADLINE_S
        running = dict(enumerate(self.processes))
        while running:
            look_s = 0.01 if self._add_workers() else 1.0
            ended = connection.wait([p.sentinel for p in running.values()], look_s)
            if time.monotonic() > deadline:
                raise AssertionError(f"a rank did not end in time\n{self._whereabouts()}")
            lost = []
            for rank, process in list(running.items()):
                if process.sentinel in ended:
                    if recovers or len(self.processes) == 1:
                        process.join()
                    else:
                        _join(process)
                    del running[rank]
                    if recovers and (process.exitcode < 0 or _has_lost_device(self.tasks[rank])):
                        lost.append(rank)
            if ends_with_error and any((each.exitcode or 0) > 0 for each in self.processes):
                self.kill()
                return
            if lost:
                self._replace(lost, goes_on=goes_on)
                running |= {rank: self.processes[rank] for rank in lost}
            if running.keys() == {task.rank for task in self._coming}:
                for process in running.values():  # training has ended without them
                    process.kill()
                    process.join()
                return

    def _whereabouts(self) -> str:
        """Return the exit code of each process, or the stacks of its threads, including C++."""
        found = []
        for rank, process in enumerate(self.processes):
            found.append(f"rank {rank}, process {process.pid}, exit code {process.exitcode}")
            if process.is_alive():
                dump = [str(_PY_SPY), "dump", "--native", "--pid", str(process.pid)]
                seen = subprocess.run(dump, capture_output=True, text=True)
                found.append(seen.stdout or seen.stderr)
        return "\n".join(found)

    def _replace(self, lost: Sequence[int], *, goes_on: bool) -> None:
        gone, number = [self.tasks[rank] for rank in lost], self.round_number + 1
        if goes_on:
            self._coming = [task for task in self._coming if task not in gone]
            self._placed = [task for task in self._placed if task not in gone]
            self.next_generation(self._placed)
        for rank in lost:
            if (spare := self._standing_spare()) is not None:
                self._spares.remove(spare)
                self.tasks[rank], self.processes[rank] = spare
                continue
            self.tasks[rank] = self._make(rank=rank, incarnation=number, generation=AWAITING)
            self.processes[rank] = self._process(self.tasks[rank])
            self.processes[rank].start()
        if goes_on:
            self._coming += [self.tasks[rank] for rank in lost]
        else:
            self.next_generation(self.tasks)
        self.keep_spares(self._num_spares)

    def _add_workers(self) -> bool:
        """Assign ranks to replacements that are ready; return whether some are not ready."""
        if not self._coming:
            return False
        seen = heartbeat.observe_ranks(Path(self._coming[0].page_prefix).parent)
        ready = {(s.rank, s.incarnation) for s in seen if s.status.phase is RankPhase.STANDBY}
        newcomers = [task for task in self._coming if (task.rank, task.incarnation) in ready]
        self._coming = [task for task in self._coming if task not in newcomers]
        if newcomers:
            self._placed += newcomers
            self.next_generation(self._placed)
        return bool(self._coming)

    def add(self, **options: Any) -> RankTask:
        """Start one more process."""
        task = self._make(**options)
        self.tasks.append(task)
        self.processes.append(self._process(task))
        self.processes[-1].start()
        return task

    def gain(self) -> None:
        """Start one more process, which joins the group when it is ready."""
        task = self.add(rank=len(self.tasks), incarnation=1, generation=AWAITING)
        self._coming.append(task)

    def next_generation(self, tasks: Sequence[RankTask], batch_size: int | None = None) -> None:
        """Announce the next generation with these processes, in rank order, and with this global
        batch size."""
        self.round_number += 1
        for rank, task in enumerate(tasks):
            assignment = RankAssignment(self.round_number, rank, len(tasks), batch_size)
            deadline = time.monotonic() + DEADLINE_S
            while True:
                try:
                    heartbeat.announce(task.page_prefix, assignment)
                    break
                except FileNotFoundError:  # it has just started
                    assert time.monotonic() < deadline, "a rank made no page"
                    time.sleep(0.005)

    def kill(self) -> None:
        every = [*self.processes, *(process for _, process in self._spares)]
        for process in every:
            process.kill()
        for process in every:
            process.join()


def _has_lost_device(task: RankTask) -> bool:
    spool = Path(task.spool_dir)
    lines = [line for _, path in segments(spool) for line in path.read_text().splitlines()]
    ends = [frame["body"] for frame in map(json.loads, lines) if frame["kind"] == "error"]
    return any(body["type"] == recovery_rules.DEVICE_LOST for body in ends)


def frames(home: Path, *, rank: int = 0, attempt: int = 1, kind: str | None = None) -> list[Any]:
    """Return the frames from the processes of a rank, in order; if a kind is requested, only their
    bodies."""
    found_spools = (home / f"attempt-{attempt}" / "spool").glob(f"r{rank}.*.metrics")
    spools = sorted(found_spools, key=lambda path: parse_key(path.name))
    paths = [path for spool in spools for _, path in segments(spool)]
    lines = [line for path in paths for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    return found if kind is None else [f["body"] for f in found if f["kind"] == kind]


def replaced(home: Path, *, attempt: int = 1) -> list[int]:
    """Return the ranks whose process was killed and replaced, once for each loss, in order. Each
    process has left its page."""
    seen = heartbeat.observe_ranks(home / f"attempt-{attempt}" / "pages")
    later = [
        (observation.incarnation, observation.rank)
        for observation in seen
        if observation.incarnation
    ]
    return [rank for _, rank in sorted(later)]


def last_status(home: Path, rank: int, *, incarnation: int = 0) -> RankStatus:
    """Return the heartbeat page of a process that has died."""
    seen = heartbeat.observe_ranks(home / "attempt-1" / "pages")
    (page,) = [s.status for s in seen if (s.rank, s.incarnation) == (rank, incarnation)]
    return page


def checkpoint_refs(home: Path, *, attempt: int = 1) -> list[CheckpointRef]:
    """Return the checkpoints that rank 0 reported, from newest to oldest."""
    told = frames(home, attempt=attempt, kind="checkpoint")
    return [CheckpointRef(c["url"], c["step"], c["manifest_sha256"]) for c in reversed(told)]


def _child(task: str, before: Callable[[RankTask], None] | None) -> None:
    decoded = RankTask.from_json(task)
    if before is not None:
        before(decoded)
    sys.exit(rank_main.main(decoded))


importlib.import_module("ray_workers.training.preload").preload()
