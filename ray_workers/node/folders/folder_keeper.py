"""Copies scripts' folders on a node to the storage, for the node's agent."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from dray.train import files
from ray_workers.node.folders import job_folders
from ray_workers.node.folders.folder_mirror import PERIOD_S, FolderMirror
from ray_workers.node.folders.job_folders import FilesKept, FolderPlan
from ray_workers.shared import paths
from ray_workers.shared.folders.work_dir import checkpoint_dir

T = TypeVar("T")

Key = tuple[str, int]
AT_A_TIME = 8
"""Maximum number of concurrent accesses to the storage."""
ANSWER_S = 0.5
"""Number of seconds for which a response is delayed so that copying can finish, which usually takes
less time."""


class FolderKeeper:
    """Keeps the folders of attempts, each identified by job and attempt number. Use each instance
    in only one event loop."""

    def __init__(self, deployment_id: str, node_id: str) -> None:
        self._node = (deployment_id, node_id)
        self._mirrors: dict[Key, tuple[FolderMirror, asyncio.Task[None]]] = {}
        self._sizes: dict[Key, asyncio.Task[dict[str, int]]] = {}
        self._ends: dict[Key, asyncio.Task[FilesKept]] = {}
        self._waits: dict[Key, str] = {}
        """The reason why copying had to wait, keyed by attempt."""
        # Use a separate thread pool, so that unresponsive storage blocks only these threads.
        self._threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="folders")

    def _folder(self, key: Key) -> Path:
        return paths.folders_dir(*self._node, *key)

    async def begin(self, key: Key, plan: FolderPlan) -> str | None:
        """Create the folders of an attempt, and restore the files of earlier attempts in the
        checkpoint folder. Returns the reason if this fails, else None."""
        try:
            await asyncio.to_thread(job_folders.begin, self._folder(key), plan)
            if files.local_path(plan.folder_url) is None and key not in self._mirrors:
                mirror = self._mirror_of(key, plan)
                await self._apart(mirror.restore)
                if job_folders.plan_in(self._folder(key)) is None:  # just dropped
                    await asyncio.to_thread(job_folders.remove, self._folder(key))
                    return "the attempt is over"
                task = asyncio.ensure_future(self._copy_periodically(mirror))
                self._mirrors[key] = mirror, task
        except Exception as error:  # storage clients can raise any exception
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return None

    def _mirror_of(self, key: Key, plan: FolderPlan) -> FolderMirror:
        return FolderMirror(checkpoint_dir(self._folder(key), plan.folder_url), plan.folder_url)

    async def _copy_periodically(self, mirror: FolderMirror) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self._apart(partial(mirror.copy, everything=False))
            except Exception:  # the storage may respond next time
                traceback.print_exc()

    async def _apart(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def sizes(self, key: Key) -> dict[str, int] | None:
        """Return the files of an ended attempt's output folder, with their sizes in bytes. Returns
        None while the files are being listed; call again in this case."""
        if key not in self._sizes:
            self._sizes[key] = asyncio.ensure_future(self._list(key))
        task = self._sizes[key]
        await asyncio.wait({task}, timeout=ANSWER_S)
        return task.result() if task.done() else None

    async def _list(self, key: Key) -> dict[str, int]:
        """List the files. If the files can't be listed, returns an empty dictionary, and `keep`
        returns the reason."""
        try:
            return await asyncio.to_thread(job_folders.sizes_in, self._folder(key))
        except Exception:  # an error of the node's disk
            traceback.print_exc()
            return {}

    async def keep(self, key: Key, taken: Collection[str], num_bytes: int = 0) -> FilesKept | str:
        """Copy the files of an ended attempt to the storage. If copying is not finished in time,
        returns the reason as a sentence, or an empty string if no reason is known; in both cases,
        call again. num_bytes: total size of the files on the nodes that come before this node;
        these files use up the limit first."""
        if key not in self._ends:
            self._ends[key] = asyncio.ensure_future(self._end(key, taken, num_bytes))
        task = self._ends[key]
        await asyncio.wait({task}, timeout=ANSWER_S)
        return task.result() if task.done() else self._waits.get(key, "")

    async def _end(self, key: Key, taken: Collection[str], num_bytes: int) -> FilesKept:
        problem = await self._end_mirror(key)
        node = (*self._node, *key)
        where = (self._folder(key), paths.spool_dir(*node))
        work = paths.work_root(self._node[0]) / key[0]
        on_wait = partial(self._waits.__setitem__, key)
        try:
            kept = await self._apart(
                partial(job_folders.keep_output, *where, taken, num_bytes, work, on_wait)
            )
        except Exception as error:  # an error of the node's disk
            traceback.print_exc()
            kept = FilesKept(0, f"{type(error).__name__}: {error}", "", "")
        return kept if problem is None else replace(kept, problem=problem)

    async def _end_mirror(self, key: Key) -> str | None:
        """Copy the rest of the checkpoint folder. If the agent was restarted in the meantime, it
        doesn't know which files were copied, and copies everything."""
        plan = job_folders.plan_in(self._folder(key))
        if plan is None or files.local_path(plan.folder_url) is not None:
            return None
        mirror = self._mirror_of(key, plan)
        if key in self._mirrors:
            mirror, task = self._mirrors.pop(key)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        try:
            await self._apart(partial(mirror.copy, everything=True))
        except Exception as error:
            traceback.print_exc()
            return f"the checkpoint folder: {type(error).__name__}: {error}"
        return None

    async def drop(self, key: Key) -> None:
        """Delete the folders of an attempt on this node. Files to keep must already be stored."""
        if key in self._mirrors:
            mirror, task = self._mirrors.pop(key)
            task.cancel()
            mirror.end()
        self._sizes.pop(key, None)
        self._ends.pop(key, None)
        self._waits.pop(key, None)
        await asyncio.to_thread(job_folders.remove, self._folder(key))
