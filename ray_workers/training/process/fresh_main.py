"""Runs a rank of a script in a new interpreter, for example because its environment has a different
version of torch from the one imported by the forkserver.

This module imports only the standard library and modules of dray that don't import other packages,
so that the script uses only the packages in its environment.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from importlib import metadata
from typing import Any

from dray import train
from dray.train.storage_faults import StorageError, is_storage_fault
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import Cause, RankTask
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.processes.stack_writer import dump_on
from ray_workers.shared.secret_files import Masker, SecretUnavailable, read_secrets
from ray_workers.training.core import gpu_memory_cap
from ray_workers.training.core.device_faults import DeviceLostError, as_lost
from ray_workers.training.core.error_chain import PEER_IS_GONE, is_deterministic
from ray_workers.training.process.ending import RankEnd, flush_output
from ray_workers.training.process.installed import report_packages
from ray_workers.training.scripts.script import Program, run_script

TASK_FD = "DRAY_FRESH_TASK_FD"
"""Environment variable with the file descriptor from which this interpreter reads its program and
task."""


def main() -> int:
    """Run the script to completion, and return the process's exit code."""
    with open(int(os.environ.pop(TASK_FD)), "rb") as file:
        given: dict[str, Any] = json.load(file)
    program, task = Program(**given["program"]), RankTask.from_json(given["task"])
    masker = Masker({})
    end = RankEnd(task, _cause_of, lambda text: masker.text(text), program.has_code)
    try:
        page = _begin_page(task.page_prefix)
        secrets = _secrets(task, given["secrets"])
        masker = Masker(secrets)
        os.environ.update(secrets)
        os.environ.update(gpu_memory_cap.for_torch(_torch_version(), os.environ))
        report_packages(task)
        run_script(program, task, page, end.after_error)
        train.wait_until_written(page.move)
        return 0
    except SystemExit as leaving:
        code = end.after_exit(leaving)
        if code == 0:
            train.wait_until_written(page.move)
        return code
    except BaseException as error:
        return end.after_error(as_lost(error))
    finally:
        flush_output()


def _begin_page(prefix: str) -> HeartbeatPage:
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    if not prefix:
        return HeartbeatPage(None)
    page = HeartbeatPage(heartbeat.page_path(prefix), goes_on=True)
    dump_on(signal.SIGUSR2, heartbeat.stack_path(prefix))
    return page


def _torch_version() -> str | None:
    """Return the version of torch in the environment, without importing it; None if torch is not
    installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _secrets(task: RankTask, names: list[str]) -> dict[str, str]:
    try:
        policy = task.environment_policy
        return read_secrets(policy.secrets_dir, names, policy.owner)
    except SecretUnavailable as error:
        raise StorageError(str(error)) from None


def _cause_of(error: BaseException) -> Cause:
    if "torch" in sys.modules:
        # The module imported below recognises torch's errors. The import fails if the installed
        # version of torch lacks a name that the module needs.
        try:
            from ray_workers.training.core.errors import cause_of

            return cause_of(error)
        except (ImportError, AttributeError):
            pass
    if is_storage_fault(error):
        return Cause.INFRASTRUCTURE
    if isinstance(error, DeviceLostError):
        return Cause.WORKER_LOST
    if type(error) is RuntimeError and PEER_IS_GONE.search(str(error)):
        return Cause.WORKER_LOST
    return Cause.CANNOT_RUN if is_deterministic(error) else Cause.USER_ERROR


if __name__ == "__main__":
    code = main()
    sys.exit(code)
