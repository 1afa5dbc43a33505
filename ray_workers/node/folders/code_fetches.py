"""Fetches code to this node before a job starts, and puts it into the job's directory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from ray_workers.node.folders.code_cache import CodeCache
from ray_workers.node.folders.git_commit import CodeRefused, CodeUnreachable
from ray_workers.node.shared_work import Abandoned, NotDone, Owner, SharedWork, WantedWork
from ray_workers.shared.node_needs import (
    BuildState,
    CodeRef,
    JobNeed,
    NodeEnvironment,
    RemoteCodeRef,
)
from ray_workers.shared.paths import code_dir

AT_A_TIME = 8
FROM_ONE_HOST = 2
"""Maximum number of concurrent fetches from one host, so that a hanging host doesn't delay other
code."""


class CodeFetches:
    """The code that this node fetches itself. Use each instance in only one event loop."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._fetches = SharedWork()
        self._wanted = WantedWork()
        self._fetching = asyncio.Semaphore(AT_A_TIME)
        self._hosts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._running: set[str] = set()
        """Digests of the code that is being fetched, except for fetches that wait for their
        turn."""
        # Use a separate thread pool, so that slow servers or storage block only these threads. The
        # pool is not a global variable, because Ray pickles the agent's class with the globals that
        # its methods use.
        self._threads = ThreadPoolExecutor(2 * AT_A_TIME, thread_name_prefix="code")

    async def prepare(self, code: RemoteCodeRef, owner: Owner = None) -> NodeEnvironment:
        """Return the state of this code on the node. Start fetching the code if necessary.
        Idempotent.

        owner: the owner of the job that needs the code.
        """
        cache = self._cache
        if cache.has(code.digest):
            return _answer(BuildState.READY, "")
        self._wanted.want(code.digest, owner)
        standing = await self._fetches.standing(code.digest, partial(self._fetch, cache, code))
        does = "fetches it" if code.digest in self._running else "is about to fetch it"
        return _answer(standing.state, standing.message or f"{does} from {_host_of(code)}")

    def forget(self, code: RemoteCodeRef, owner: Owner) -> None:
        """Record that none of the owner's jobs needs this code any longer. If no job of another
        owner needs the code, the fetch is stopped. Idempotent."""
        self._wanted.forget(code.digest, owner)

    async def put_into(
        self, code: CodeRef | RemoteCodeRef, storage_url: str, directory: Path
    ) -> None:
        """Call `CodeCache.put_into`, or `put_remote_into` for remote code, in a thread."""
        if isinstance(code, RemoteCodeRef):
            await self._apart(partial(self._cache.put_remote_into, code, directory))
        else:
            await self._apart(partial(self._cache.put_into, code, storage_url, directory))

    async def _fetch(self, cache: CodeCache, code: RemoteCodeRef) -> None:
        is_wanted = partial(self._wanted.is_wanted, code.digest)
        async with self._limited(code):
            if not is_wanted():
                raise Abandoned
            try:
                await self._apart(partial(cache.fetch_remote, code, is_wanted))
            except CodeRefused as error:
                raise NotDone(str(error)) from None
            except CodeUnreachable as error:
                raise NotDone(str(error), BuildState.UNREACHABLE) from None

    @contextlib.asynccontextmanager
    async def _limited(self, code: RemoteCodeRef) -> AsyncIterator[None]:
        host = _host_of(code)
        of_host = self._hosts.get(host) or asyncio.Semaphore(FROM_ONE_HOST)
        self._hosts[host] = of_host
        async with of_host, self._fetching:
            self._running.add(code.digest)
            try:
                yield
            finally:
                self._running.discard(code.digest)

    async def _apart(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def _cache(self) -> CodeCache:
        return CodeCache(self._root or code_dir())


def _host_of(code: RemoteCodeRef) -> str:
    return urlsplit(code.git or code.url or "").hostname or ""


def _answer(state: BuildState, message: str) -> NodeEnvironment:
    return NodeEnvironment(JobNeed.CODE, state, message, packages=(), replaced=(), log="")
