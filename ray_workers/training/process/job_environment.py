"""The job's environment in a rank: its packages, variables, and secrets.

A forked rank searches for imports in the environment's folder first. The rank of a script continues
in a new interpreter (`ray_workers.training.process.fresh_main`) in two cases: the forkserver has
already imported a module of the folder from the node's packages, or a variable must be set when the
interpreter starts.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from dray.spec import Environment
from dray.spec.program.environment import is_read_at_start
from dray.train.storage_faults import StorageError
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.folders import environment_overlay as overlay
from ray_workers.shared.secret_files import Masker, SecretUnavailable, read_secrets
from ray_workers.training.process import fresh_main
from ray_workers.training.scripts.script import Program


class EnvironmentMissingError(StorageError):
    """Raised if the environment or a secret is no longer on this node, for example because the
    node's packages have changed. The scheduler prepares the environment again for the next
    attempt."""


@dataclass(frozen=True)
class FreshTask:
    """Everything that a rank in a new interpreter needs besides its environment variables."""

    program: Program
    task: str
    """The `RankTask` as JSON."""
    secrets: tuple[str, ...]


_masker = Masker({})
_held: list[int] = []
"""File descriptors that prevent environments from being removed until this process exits."""


def masked(text: str) -> str:
    """Return the string without the values of this rank's secrets."""
    return _masker.text(text)


def enter(task: RankTask, environment: Environment | None, program: Program | None) -> None:
    """Make the job's packages and secrets available in this process. The variables of
    `environment.env` must already be set. Does not return if the script needs a new interpreter.

    Raises EnvironmentMissingError if the prepared environment or secrets are no longer on the node.
    """
    global _masker
    if environment is None:
        return
    replaced: list[str] = []
    if environment.is_built:
        root = overlay.environments_dir()
        asked, policy = environment.model_dump(mode="json"), task.environment_policy
        key = overlay.key_of(asked, policy, keeps_all=program is None)
        record = _held_record(root, key)
        os.environ.update(overlay.variables(root, record, os.environ))
        replaced = overlay.replaced_in(sys.modules, record)
        if not replaced:
            overlay.enter(root, record)
    early = [name for name in environment.env if is_read_at_start(name)]
    if program is not None and (replaced or early):
        _start_fresh(task, environment, program)
    try:
        policy = task.environment_policy
        secrets = read_secrets(policy.secrets_dir, environment.secrets, policy.owner)
    except SecretUnavailable as error:
        raise EnvironmentMissingError(str(error)) from None
    _masker = Masker(secrets)
    os.environ.update(secrets)


def _held_record(root: Path, key: str) -> overlay.EnvironmentRecord:
    """Find the environment, and prevent it from being removed until this process exits."""
    record = overlay.find(root, key)
    try:
        if record is None:
            raise FileNotFoundError(key)
        _held.append(overlay.hold(root, record))
    except FileNotFoundError:
        raise EnvironmentMissingError("the job's environment is no longer on this node") from None
    return record


def _start_fresh(task: RankTask, environment: Environment, program: Program) -> NoReturn:
    """Replace this process with a new interpreter that has the same output streams and the same
    parent."""
    fresh = FreshTask(program, task.to_json(), tuple(environment.secrets))
    sent = os.memfd_create("task", 0)  # not closed by exec
    with open(sent, "wb", closefd=False) as file:
        file.write(json.dumps(asdict(fresh)).encode())
    os.lseek(sent, 0, os.SEEK_SET)
    for fd in _held:
        os.set_inheritable(fd, True)
    if "DRAY_STORAGE_FD" in os.environ:
        os.set_inheritable(int(os.environ["DRAY_STORAGE_FD"]), True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", fresh_main.__name__],
        {**os.environ, fresh_main.TASK_FD: str(sent)},
    )
