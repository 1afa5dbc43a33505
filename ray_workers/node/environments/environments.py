"""The environments of one node: which there are, which are being built, and what failed."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_workers.node.environments.build import Build
from ray_workers.node.environments.eviction import make_room
from ray_workers.node.environments.layout import log_of, tail
from ray_workers.node.environments.uv import BuildFailed
from ray_workers.shared.contracts import BuildState, EnvironmentPolicy, NodeEnvironment
from ray_workers.shared.folders.environment_overlay import (
    EnvironmentRecord,
    environments_dir,
    find,
    key_of,
)
from ray_workers.shared.secret_files import SecretUnavailable, read_secrets

BUILDS_AT_A_TIME = 2
FIRST_ANSWER_S = 2.0
"""How long a question waits for a build that is under way: most are over by then."""
FAILURE_KEPT_S = 10.0
"""How long a failed build is answered from memory before another try."""
RETRY_PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Between tries of a build that met an index or a disk at fault."""


class Environments:
    """The environments of one node. For one event loop; builds run in threads."""

    def __init__(self, preloaded: Path, root: Path | None = None) -> None:
        """preloaded: the file in which the forkserver names the modules that it has imported."""
        self._preloaded = preloaded
        self._root = root
        self._builds: dict[str, asyncio.Task[BuildFailed | None]] = {}
        self._failed: dict[str, tuple[BuildFailed, float]] = {}
        """The last failure of a key, and when another try may begin, by `time.monotonic`."""
        self._tries: dict[str, int] = {}
        self._clearing: asyncio.Future[None] | None = None
        self._building = asyncio.Semaphore(BUILDS_AT_A_TIME)

    async def prepare(
        self, environment: Mapping[str, Any], policy: EnvironmentPolicy, *, keeps_all: bool
    ) -> NodeEnvironment:
        """How far the node is with this environment; begins to build it if nobody has. Harmless
        to repeat.

        keeps_all: none of the node's packages may be replaced, as for a recipe.
        """
        try:
            await asyncio.to_thread(_check_secrets, environment, policy)
        except SecretUnavailable as error:
            return _answer(BuildState.FAILED, str(error))
        if not is_built(environment):
            return _answer(BuildState.READY, "")
        root = self._root or environments_dir()
        key = key_of(environment, policy, keeps_all=keeps_all)
        record = await asyncio.to_thread(find, root, key)
        if record is not None:
            return self._ready(root, record)
        failure, due = self._failed.get(key, (None, 0.0))
        if failure is not None and time.monotonic() < due:
            return self._failure(root, key, failure)
        if key not in self._builds:
            build = Build(root, key, environment, policy, keeps_all=keeps_all)
            self._builds[key] = asyncio.ensure_future(self._run(build))
        task = self._builds[key]
        await asyncio.wait({task}, timeout=FIRST_ANSWER_S)
        if not task.done():
            return _answer(BuildState.BUILDING, "installs packages", log=log_of(root, key))
        failure = task.result()
        if failure is not None:
            return self._failure(root, key, failure)
        record = await asyncio.to_thread(find, root, key)
        if record is None:
            return _answer(BuildState.UNREACHABLE, "it was removed again at once")
        return self._ready(root, record)

    async def _run(self, build: Build) -> BuildFailed | None:
        try:
            async with self._building:
                await asyncio.to_thread(build.run)
        except BuildFailed as error:
            failure = error
        except Exception as error:  # a full disk, a folder of another user
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            failure = BuildFailed(message, BuildState.UNREACHABLE)
        else:
            self._failed.pop(build.key, None)
            self._tries.pop(build.key, None)
            return None
        finally:
            self._builds.pop(build.key, None)
            self._clearing = asyncio.ensure_future(
                asyncio.to_thread(make_room, build.root, build.policy.limit_bytes)
            )
        tries = self._tries[build.key] = self._tries.get(build.key, 0) + 1
        is_final = failure.state is BuildState.FAILED
        last = len(RETRY_PAUSES_S)
        pause_s = FAILURE_KEPT_S if is_final else RETRY_PAUSES_S[min(tries, last) - 1]
        self._failed[build.key] = (failure, time.monotonic() + pause_s)
        return failure

    def _ready(self, root: Path, record: EnvironmentRecord) -> NodeEnvironment:
        try:
            preloaded = set(self._preloaded.read_text().split())
        except OSError:
            preloaded = set()
        return NodeEnvironment(
            BuildState.READY,
            "",
            record.packages,
            replaced=tuple(sorted(preloaded & set(record.modules))),
            log=tail(root / record.folder / "log"),
        )

    def _failure(self, root: Path, key: str, failure: BuildFailed) -> NodeEnvironment:
        return _answer(failure.state, str(failure), log=log_of(root, key))


def is_built(environment: Mapping[str, Any]) -> bool:
    """`dray.spec.Environment.is_built`, of the document as JSON data."""
    text = environment.get("requirements") or ""
    return bool(environment.get("python_packages") or text.strip() or environment.get("setup"))


def _check_secrets(environment: Mapping[str, Any], policy: EnvironmentPolicy) -> None:
    names = list(environment.get("secrets") or ())
    index = environment.get("index") or {}
    if index.get("secret"):
        names.append(index["secret"])
    read_secrets(policy.secrets_dir, names, policy.owner)


def _answer(state: BuildState, message: str, log: str = "") -> NodeEnvironment:
    return NodeEnvironment(state, message, packages=(), replaced=(), log=log)
