"""A rank of a script in a fresh interpreter, for environments with another torch, say, than the
forkserver has imported.

Everything that is imported here belongs to the standard library or to dray, and dray's modules
here need nothing else, so the script finds the packages of its environment alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray import train
from dray.train.storage_room import is_storage_fault
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import STORAGE_EXIT_CODE, Cause
from ray_workers.shared.folders import work_dir
from ray_workers.shared.frames import ErrorReport
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.processes.stack_writer import dump_on
from ray_workers.shared.secret_files import Masker, SecretUnavailable, read_secrets
from ray_workers.training.core.script_time import ScriptTime

TASK_FD = "DRAY_FRESH_TASK_FD"
MAX_TRACEBACK_CHARS = 32_000
MAX_REASON_CHARS = 2000
_CANNOT_RUN = (SyntaxError, ModuleNotFoundError)
"""Errors in which the same code ends whenever it runs."""


def main() -> int:
    """Run the script to its end; the process's exit code."""
    with open(int(os.environ.pop(TASK_FD)), "rb") as file:
        task: dict[str, Any] = json.load(file)
    masker = Masker({})
    try:
        page = _begin_page(task["page_prefix"])
        secrets = read_secrets(task["secrets_dir"], task["secrets"])
        masker = Masker(secrets)
        os.environ.update(secrets)
        code = _run(task, page)
        if code == 0:
            train.wait_until_written(page.move)
        return code
    except SystemExit as leaving:
        return _exit_code(leaving, masker)
    except BaseException as error:
        raised_at, text = time.time(), traceback.format_exc()
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        cause, reason = _explained(error, masker)
        _report(cause, error, reason, text, masker, raised_at)
        return STORAGE_EXIT_CODE if is_storage_fault(error) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _begin_page(prefix: str) -> HeartbeatPage:
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    if not prefix:
        return HeartbeatPage(None)
    page = HeartbeatPage(heartbeat.page_path(prefix))
    dump_on(signal.SIGUSR2, heartbeat.stack_path(prefix))
    return page


def _run(task: Mapping[str, Any], page: HeartbeatPage) -> int:
    entrypoint, directory = task["entrypoint"], Path(task["work_dir"])
    program = None if entrypoint is None else Path(entrypoint)
    if program is not None and not task["has_code"]:
        program = program.absolute()
        if not program.is_file():
            raise FileNotFoundError(f"there is no file {entrypoint} on this worker")
        work_dir.enter(directory, program.resolve().parent)
    else:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chdir(directory)
    own = program if program is not None and not task["has_code"] else entrypoint
    sys.argv = [str(own or task["module"]), *task["args"]]
    folder = Path.cwd() if program is None else program.absolute().resolve().parent
    sys.path.insert(0, str(folder))
    script_time = ScriptTime(page, task["furthest_step"])
    train.observe(script_time)
    with script_time.running():
        if program is not None:
            runpy.run_path(str(program.absolute()), run_name="__main__")
        else:
            runpy.run_module(task["module"], run_name="__main__", alter_sys=True)
    return 0


def _exit_code(leaving: SystemExit, masker: Masker) -> int:
    code = leaving.code
    if code is None or code == 0:
        return 0
    if not isinstance(code, int):
        print(code, file=sys.stderr, flush=True)  # noqa: T201
    reason = f"SystemExit: {code}"
    if isinstance(code, int):
        reason = f"SystemExit: the training code exited with code {code}"
    text = traceback.format_exc()
    _report(Cause.USER_ERROR, leaving, reason, text, masker, time.time())
    return code & 0xFF if isinstance(code, int) else 1


def _explained(error: BaseException, masker: Masker) -> tuple[Cause, str]:
    """The cause of an error, and the sentence on it."""
    if "torch" in sys.modules:
        # The words of torch's own errors are known there; another torch may lack what it imports.
        try:
            from ray_workers.training.core.errors import cause_of
            from ray_workers.training.core.failure_reason import reason_of

            return cause_of(error), reason_of(error, masker.text)
        except (ImportError, AttributeError):
            pass
    cause = Cause.CANNOT_RUN if isinstance(error, _CANNOT_RUN) else Cause.USER_ERROR
    if is_storage_fault(error) or isinstance(error, SecretUnavailable):
        cause = Cause.INFRASTRUCTURE
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}, line {where[0].lineno})" if where else ""
    return cause, f"{type(error).__qualname__}: {error}{place}"


def _report(
    cause: Cause,
    error: BaseException,
    reason: str,
    text: str,
    masker: Masker,
    raised_at: float,
) -> None:
    try:
        report = ErrorReport(
            cause=cause,
            type=type(error).__qualname__,
            message=masker.text(reason)[:MAX_REASON_CHARS],
            traceback=masker.text(text)[-MAX_TRACEBACK_CHARS:],
            raised_at=raised_at,
        )
        train.emit(report.KIND, report.body())
    except OSError as failed:
        print(f"dray: the error could not be reported: {failed}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    code = main()
    sys.exit(code)
