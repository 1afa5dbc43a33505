"""Runs a user's training program in its job's own directory, as `python` itself would run it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from dray import train
from dray.spec import Script
from ray_workers.shared.folders import work_dir
from ray_workers.training.core.errors import EntrypointError
from ray_workers.training.core.script_time import ScriptTime
from ray_workers.training.elastic import process_group


def run_script(script: Script, directory: Path, script_time: ScriptTime) -> None:
    """Run the program to its end.

    directory: the job's own on this node. Uploaded code is in it already; what the node has itself
    is linked there. EntrypointError if there is no such file.
    """
    program = None
    if script.entrypoint is not None and script.code is None:
        program = _program_of_the_node(script.entrypoint)
        work_dir.enter(directory, program.resolve().parent)
        sys.argv = [str(program), *script.args]
    else:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chdir(directory)
        sys.argv = [script.entrypoint or str(script.module), *script.args]
        if script.entrypoint is not None:
            program = Path(script.entrypoint).absolute()
    # As `python file` and `python -m module` have it.
    sys.path.insert(0, str(Path.cwd() if program is None else program.resolve().parent))
    process_group.keep_groups()
    train.observe(script_time)
    with script_time.running():
        if program is not None:
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(str(script.module), run_name="__main__", alter_sys=True)


def _program_of_the_node(entrypoint: str) -> Path:
    path = Path(entrypoint).absolute()
    if not path.is_file():
        raise EntrypointError(
            f"script.entrypoint is {entrypoint}, but there is no such file on this worker (looked "
            f"from {Path.cwd()}); `dray submit --code` brings it along"
        )
    return path
