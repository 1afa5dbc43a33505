"""Runs a user's training program in the job's directory, in the same way as `python` would run it.

Does not import torch, so that it also works for ranks whose environment has a different version of
torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray import train
from ray_workers.shared.contracts import AWAITING, NOT_PREPARED, RankTask
from ray_workers.shared.folders import work_dir
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.job_log import log
from ray_workers.training.core.error_chain import EntrypointError, NotPreparedError
from ray_workers.training.core.exits import Left, children_leave, status_of
from ray_workers.training.core.script_time import ScriptTime
from ray_workers.training.elastic.kept_groups import keep_groups

if TYPE_CHECKING:
    from dray.train.prepared.group import Group


Report = Callable[[BaseException], int]


@dataclass(frozen=True)
class Program:
    """The program of one rank: a file or a module."""

    entrypoint: str | None
    module: str | None
    args: tuple[str, ...]
    has_code: bool
    """Whether the program is among the uploaded files, which are already in the job's directory."""


def run_script(program: Program, task: RankTask, page: HeartbeatPage, report: Report) -> None:
    """Run the program in the job's directory. Raises EntrypointError if the program's file is
    missing.

    report: reports an error of the script, and returns the exit code of the process.
    """
    path = _enter(program, Path(task.work_dir))
    # Set sys.path[0] as `python file` and `python -m module` do.
    sys.path.insert(0, str(Path.cwd() if path is None else path.resolve().parent))
    refuse_mpi4py(task.world_size)
    keep_groups()
    script_time = ScriptTime(page, task.furthest_step)
    with following(task, page, report):
        train.observe(script_time)
        with script_time.running(), children_leave():
            if path is not None:
                runpy.run_path(str(path), run_name="__main__")
            else:
                runpy.run_module(str(program.module), run_name="__main__", alter_sys=True)


def _enter(program: Program, directory: Path) -> Path | None:
    """Change to the job's directory, set `sys.argv`, and return the program's file."""
    if program.entrypoint is not None and not program.has_code:
        path = _program_of_the_node(program.entrypoint)
        work_dir.enter(directory, path.resolve().parent)
        sys.argv = [str(path), *program.args]
        return path
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chdir(directory)
    sys.argv = [program.entrypoint or str(program.module), *program.args]
    if program.entrypoint is None:
        return None
    path = Path(program.entrypoint).absolute()
    if not path.is_file():  # the server could only check uploaded files
        raise EntrypointError(f"{program.entrypoint} does not exist in the job's code")
    return path


def _program_of_the_node(entrypoint: str) -> Path:
    path = Path(entrypoint).absolute()
    if not path.is_file():
        raise EntrypointError(
            f"script.entrypoint is {entrypoint}, but this file does not exist in {Path.cwd()} on "
            "this worker; use `dray submit --code` to upload it"
        )
    return path


@contextmanager
def following(task: RankTask, page: HeartbeatPage, report: Report) -> Iterator[None]:
    """Context manager in which a script that calls `train.prepare` joins new groups in later
    rounds.

    Raises Left if the script has left on request, and NotPreparedError if an elastic script ends
    without having called `train.prepare`.
    """

    def new_group() -> Group:
        try:
            from ray_workers.training.scripts.prepared_script import RankGroup
        except (ImportError, AttributeError):  # another version of torch can't follow rounds
            from dray.train.prepared.group import group_of_environment

            return group_of_environment()
        group = RankGroup(task, page, report)
        ending.callback(group.close)
        return group

    train.drive(new_group, task.spec.get("parallel"))
    with ExitStack() as ending:
        yield from _finishing(task)


def _finishing(task: RankTask) -> Iterator[None]:
    try:
        yield
    except Left:
        raise
    except SystemExit as leaving:
        if status_of(leaving) == 0:
            _finish(task)
        raise
    _finish(task)


def _finish(task: RankTask) -> None:
    train.finish()
    if train.is_prepared():
        return
    if task.generation == AWAITING:
        raise RuntimeError(
            "the script ended without calling train.prepare(), but the other ranks are waiting "
            "for this rank in train.prepare()"
        )
    parallel = task.spec.get("parallel") or {}
    if max(parallel.get("shard", 1), parallel.get("tensor", 1)) > 1:
        raise RuntimeError(
            "parallel.shard or parallel.tensor is greater than 1, but the script ended without "
            "calling train.prepare(), which divides the model"
        )
    if task.spec.get("elastic"):
        raise NotPreparedError(NOT_PREPARED)
    if task.spec.get("check") and task.rank == 0:
        log(
            "check.replicas_every had no effect, because the script did not call train.prepare(), "
            "which compares the ranks' copies of the model"
        )


WHY_NO_MPI4PY = (
    "mpi4py is not supported: its ranks find each other through mpirun's daemons, which dray does "
    "not run, so each rank would be rank 0 of 1. Use torch.distributed, whose gloo backend "
    "provides MPI's collective operations, or dray.train.hvd"
)


class _Mpi4pyRefused:
    """A module finder that raises an error for mpi4py, and precedes all finders that would find
    mpi4py."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "mpi4py":
            raise ModuleNotFoundError(WHY_NO_MPI4PY, name=name)
        return None


def refuse_mpi4py(world_size: int) -> None:
    """Make imports of mpi4py fail in this process, unless it is the job's only rank."""
    if world_size > 1:
        sys.meta_path.insert(0, _Mpi4pyRefused())
