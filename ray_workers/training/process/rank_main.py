"""The main function of a training process."""

from __future__ import annotations

import faulthandler
import ipaddress
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from dray import train
from dray.spec import Imported, JobSpec, ParameterServer, Script
from dray.spec.trial_values import as_text, variable
from dray.train.seeding import seed_from
from ray_workers.recipes import RECIPES
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import LEFT_EXIT_CODE, RankTask
from ray_workers.shared.folders.work_dir import checkpoint_dir, output_dir
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.processes.stack_writer import dump_on
from ray_workers.training.clients.silo_ranks import is_silo, run_silo
from ray_workers.training.core import compat_torch, elastic_error, gpu_memory_cap
from ray_workers.training.core.device_faults import as_lost
from ray_workers.training.core.errors import Preempted, cause_of
from ray_workers.training.core.exits import children_leave
from ray_workers.training.devices import is_gpu, module_of
from ray_workers.training.elastic import process_group
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from ray_workers.training.loop.run import run
from ray_workers.training.parallel.parameter_server import server
from ray_workers.training.process import job_environment
from ray_workers.training.process.ending import RankEnd, flush_output
from ray_workers.training.process.installed import report_packages
from ray_workers.training.scripts import frameworks
from ray_workers.training.scripts.script import Program, run_script

MAX_RESUME_REFS = 20
"""Maximum number of checkpoints passed to a script. Older checkpoints are used if newer ones are
damaged."""


def main(task: RankTask) -> int:
    """Train as one rank, and return the process's exit code. Must be called in a newly forked
    process, because it changes the environment, the seeds, and, for a script, `sys.argv` and
    `sys.path`.

    The exit code is 0 only after all reports of the rank have been written to the node's disk.
    Errors are printed to standard error and written to the spool as an ERROR frame.
    """
    end = RankEnd(task, cause_of, job_environment.masked, _has_code(task))
    try:
        page = _begin_page(task)
    except BaseException as error:
        return end.after_error(error)
    return _code_of(lambda: _train(task, page, end), page, end)


def _code_of(work: Callable[[], None], page: HeartbeatPage, end: RankEnd) -> int:
    try:
        code = _finished(work, end)
        if code == 0:
            train.wait_until_written(page.move)
        return code
    except BaseException as error:
        is_broken = process_group.is_broken()
        return end.after_error(as_lost(error, has_undefined_results=is_broken))
    finally:
        flush_output()


def _finished(work: Callable[[], None], end: RankEnd) -> int:
    try:
        work()
    except Preempted:
        return LEFT_EXIT_CODE
    except SystemExit as leaving:
        return end.after_exit(leaving)
    return 0


def _train(task: RankTask, page: HeartbeatPage, end: RankEnd) -> None:
    spec = JobSpec.model_validate(task.spec)
    _enter(task, spec)
    program = None if spec.script is None else _program(spec.script.for_rank(task.rank))
    job_environment.enter(task, spec.environment, program)
    report_packages(task)
    if program is not None:
        if 0 < (share := spec.resources.gpus_per_worker) < 1:
            compat_torch.cap_memory_when_used(share)
        # Seed the random generators, because all processes inherit the same state from the
        # forkserver. A process that replaces this rank generates the same numbers.
        seed_from("rank", task.job_id, task.attempt, task.rank)
        run_script(program, task, page, end.after_error)
    else:
        with children_leave():  # a model from the job's code can fork
            run_recipe(task, spec, page, lambda work: os._exit(_code_of(work, page, end)))


def _program(script: Script) -> Program:
    has_code = script.code is not None
    return Program(script.entrypoint, script.module, tuple(script.args), has_code)


def environment(task: RankTask, spec: JobSpec) -> dict[str, str]:
    """Return the variables of a rank: the variables that torchrun sets, so that scripts for
    torchrun work unchanged, followed by dray's own variables and the variables of the task.

    As with torchrun, the rendezvous store runs outside the ranks. Because of
    TORCHELASTIC_USE_AGENT_STORE, `init_process_group` connects to this store, and no rank starts
    its own. If each process sees one GPU, LOCAL_RANK is 0, the index of this GPU, as with
    torchrun's `--virtual-local-rank`.
    """
    virtual = is_gpu(torch.device(task.device))
    variables = {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_RANK": "0" if virtual else str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.local_world_size),
        "GROUP_RANK": str(task.node_rank),
        "GROUP_WORLD_SIZE": str(task.num_nodes),
        "ROLE_RANK": str(task.rank),
        "ROLE_WORLD_SIZE": str(task.world_size),
        "ROLE_NAME": "worker",
        "MASTER_ADDR": task.master_addr,
        "MASTER_PORT": str(task.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(elastic_error.path_of(task)),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "TORCHELASTIC_RESTART_COUNT": str(task.incarnation),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"{task.job_id}-{task.attempt}",
        "OMP_NUM_THREADS": str(spec.num_cpus_of(task.rank)),
        "TMPDIR": task.temp_dir,
        "DRAY_JOB_ID": task.job_id,
        "DRAY_ATTEMPT": str(task.attempt),
        "DRAY_LOCAL_RANK": str(task.local_rank),
        "DRAY_SPOOL_DIR": task.spool_dir,
        "DRAY_SPOOL_LIMIT_BYTES": str(task.spool_limit_bytes),
        "DRAY_OUTPUT_LIMIT_BYTES": str(task.output_limit_bytes),
        "DRAY_CHECKPOINT_URL": task.checkpoint_url,
        "DRAY_ARTIFACT_URL": task.artifact_url,
    }
    if task.resume_from:
        variables["DRAY_RESUME_URL"] = task.resume_from[0].url
        refs = [asdict(ref) for ref in task.resume_from[:MAX_RESUME_REFS]]
        variables["DRAY_RESUME_FROM"] = json.dumps(refs)
    if task.device == "cpu" and _is_loopback(task.master_addr):
        # All ranks are on this node, so prevent gloo from looking up its interface by host name.
        variables["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if task.array_index is not None:
        variables["DRAY_ARRAY_INDEX"] = str(task.array_index)
    if task.scheduled_at is not None:
        variables["DRAY_SCHEDULED_AT"] = task.scheduled_at
    if spec.array is not None:
        variables["DRAY_ARRAY_SIZE"] = str(spec.array.size)
    variables |= {variable(name): as_text(value) for name, value in task.parameters.items()}
    if spec.script is not None:
        folders = Path(task.folders_dir)
        variables["DRAY_OUTPUT_DIR"] = str(output_dir(folders))
        variables["DRAY_CHECKPOINT_DIR"] = str(checkpoint_dir(folders, task.folder_url))
        variables = frameworks.adapted(variables, task, spec.script)
    if 0 < (share := spec.resources.gpus_per_worker) < 1:
        variables |= gpu_memory_cap.variables(share)
    own = spec.environment.env if spec.environment is not None else {}
    return variables | own | dict(task.env)


def _enter(task: RankTask, spec: JobSpec) -> None:
    faulthandler.enable()  # write the stacks to the rank's log on a segfault
    variables = environment(task, spec)
    os.environ.update(variables)
    Path(variables["TMPDIR"]).mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in ("DRAY_OUTPUT_DIR", "DRAY_CHECKPOINT_DIR"):
        if name in variables:
            Path(variables[name]).mkdir(parents=True, exist_ok=True, mode=0o700)
    tempfile.tempdir = None  # the parent may have cached it
    os.environ["DRAY_SPOOL_PID"] = str(os.getpid())
    # The inherited thread pool size does not take this process's environment variables into
    # account.
    torch.set_num_threads(_threads(variables))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # show log lines immediately
            stream.reconfigure(line_buffering=True)


def _threads(variables: Mapping[str, str]) -> int:
    """Return the number of threads. OMP_NUM_THREADS can be a list with one number per nesting
    level."""
    first = variables["OMP_NUM_THREADS"].split(",")[0].strip()
    return max(1, int(first)) if first.isdigit() else 1


def _has_code(task: RankTask) -> bool:
    program = task.spec.get("script") or task.spec.get("model") or {}
    return program.get("code") is not None


def _begin_page(task: RankTask) -> HeartbeatPage:
    """Open the heartbeat page, and install the signal handler that writes this process's stacks."""
    if not task.page_prefix:
        return HeartbeatPage(None)
    page = HeartbeatPage(heartbeat.page_path(task.page_prefix))
    dump_on(signal.SIGUSR2, heartbeat.stack_path(task.page_prefix))
    return page


def run_recipe(
    task: RankTask,
    spec: JobSpec,
    page: HeartbeatPage,
    end_with: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Train as this rank, or run a parameter server, until the job ends.

    end_with: see `run`.
    """
    assert spec.recipe is not None
    # An elastic group can have more ranks than `num_workers`, but has no servers.
    has_servers = isinstance(spec.sync, ParameterServer)
    if has_servers and task.rank >= (num_workers := spec.num_ranks_that_train):
        rendezvous = RendezvousHandler(task, page)
        server.serve(spec, task.rank - num_workers, rendezvous, page, task.master_addr)
        return
    if is_silo(task, spec):
        run_silo(task, spec, page)
        return
    if is_gpu(device := torch.device(task.device)):
        module_of(device).set_device(0)
        if 0 < (share := spec.resources.gpus_per_worker) < 1:
            module_of(device).set_per_process_memory_fraction(share, 0)
    if isinstance(spec.model, Imported) or spec.code is not None:
        sys.path.insert(0, task.work_dir)
    run(task, spec, RECIPES[spec.recipe].build(spec, task.data_policy), page, end_with)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
