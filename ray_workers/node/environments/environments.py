"""Tracks the environments of a node: finished environments, builds in progress, and failed
builds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ray_workers.node.environments.build import Build, log_of, tail
from ray_workers.node.environments.build_limiter import BUILDS_AT_A_TIME, BuildLimiter
from ray_workers.node.environments.eviction import evict, remove_unfinished
from ray_workers.node.shared_work import SharedWork
from ray_workers.shared.folders.environment_overlay import (
    EnvironmentRecord,
    environments_dir,
    find,
    key_of,
)
from ray_workers.shared.node_needs import BuildState, EnvironmentPolicy, JobNeed, NodeEnvironment
from ray_workers.shared.secret_files import SecretUnavailable, read_secrets


class Environments:
    """The environments of a node. Use this in only one event loop. Builds run in threads."""

    def __init__(self, preloaded: Path, root: Path | None = None) -> None:
        """preloaded: the file in which the forkserver lists the modules that it has imported."""
        self._preloaded = preloaded
        self._root = root
        self._builds = SharedWork()
        self._limiter = BuildLimiter()
        # Use a separate thread pool, so that long builds don't delay the agent's other background
        # work.
        self._threads = ThreadPoolExecutor(BUILDS_AT_A_TIME, thread_name_prefix="build")
        self._clearing: asyncio.Future[None] | None = None

    async def prepare(
        self, environment: Mapping[str, Any], policy: EnvironmentPolicy, *, keeps_all: bool
    ) -> NodeEnvironment:
        """Return the state of this environment on the node. Start building the environment if
        necessary. Idempotent.

        keeps_all: whether the node's packages must not be replaced, as for recipes.
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
        self._limiter.want(key, policy.owner)
        is_wanted = partial(self._limiter.is_wanted, key)
        build = Build(root, key, environment, policy, is_wanted, keeps_all=keeps_all)
        standing = await self._builds.standing(key, partial(self._run, build))
        if standing.state is not BuildState.READY:
            message = standing.message or self._limiter.why_waiting(key, policy.owner)
            message = message or "builds the environment"
            return _answer(standing.state, message, log=log_of(root, key))
        record = await asyncio.to_thread(find, root, key)
        if record is None:
            return _answer(
                BuildState.UNREACHABLE, "the environment was removed right after it was built"
            )
        return self._ready(root, record)

    async def forget(
        self, environment: Mapping[str, Any], policy: EnvironmentPolicy, *, keeps_all: bool
    ) -> None:
        """Record that none of this owner's jobs needs the environment any more. If no job of
        another owner needs the environment, the build and all processes that it has started are
        stopped. Idempotent."""
        key = await asyncio.to_thread(key_of, environment, policy, keeps_all=keeps_all)
        self._limiter.forget(key, policy.owner)

    async def clear_up(self) -> None:
        """End builds that were left behind by a dead agent on this machine."""
        root = self._root or environments_dir()
        await asyncio.to_thread(remove_unfinished, root)

    async def _run(self, build: Build) -> None:
        try:
            async with self._limiter.acquire(build.key):
                await asyncio.get_running_loop().run_in_executor(self._threads, build.run)
        finally:
            self._clearing = asyncio.ensure_future(
                asyncio.to_thread(evict, build.root, build.policy.limit_bytes)
            )

    def _ready(self, root: Path, record: EnvironmentRecord) -> NodeEnvironment:
        try:
            preloaded = set(self._preloaded.read_text().split())
        except OSError:
            preloaded = set()
        return NodeEnvironment(
            JobNeed.ENVIRONMENT,
            BuildState.READY,
            "",
            record.packages,
            replaced=tuple(sorted(preloaded & set(record.modules))),
            log=tail(root / record.folder / "log"),
        )


def is_built(environment: Mapping[str, Any]) -> bool:
    """Like `dray.spec.Environment.is_built`, for a document as JSON data."""
    text = environment.get("requirements") or ""
    return bool(environment.get("python_packages") or text.strip() or environment.get("setup"))


def _check_secrets(environment: Mapping[str, Any], policy: EnvironmentPolicy) -> None:
    names = list(environment.get("secrets") or ())
    index = environment.get("index") or {}
    if index.get("secret"):
        names.append(index["secret"])
    read_secrets(policy.secrets_dir, names, policy.owner)


def _answer(state: BuildState, message: str, log: str = "") -> NodeEnvironment:
    return NodeEnvironment(JobNeed.ENVIRONMENT, state, message, packages=(), replaced=(), log=log)
