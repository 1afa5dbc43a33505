"""A job that a program follows: `with client.attach(job) as run: ...`"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dray import functions, views
from dray.errors import JobFailed
from dray.views import JobState

if TYPE_CHECKING:
    from dray.aio import AsyncClient
    from dray.client import Client


class JobRun:
    """One job. Iterating yields its events as they happen, up to the one that ends it.

    At the end of a `with` block the job is waited for; JobFailed is raised unless it succeeded. If
    the block itself raises, the job goes on and is not waited for.
    """

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()

    def __iter__(self) -> Generator[views.Event, None, None]:
        return self._client.follow(self.id)

    def job(self) -> views.Job:
        """The job as it is now."""
        return self._client.get(self.id)

    def logs(self, rank: int | None = None) -> Generator[views.LogLine, None, None]:
        """Yield the lines of every rank, or of one, until the job is over."""
        return self._client.logs(self.id, rank, follow=True)

    def metrics(self, keys: Sequence[str] | None = None) -> Generator[views.Point, None, None]:
        """Yield the points of rank 0, of all keys or of these, until the job is over."""
        return self._client.follow_metrics(self.id, keys)

    def wait(self, timeout_s: float | None = None) -> views.Job:
        """The job once it has succeeded. JobFailed if it ended otherwise, WaitTimeout."""
        return _succeeded(self._client.wait(self.id, timeout_s))

    def cancel(self) -> views.Job:
        return self._client.cancel(self.id)

    def result(self) -> Any:
        """Wait for a job of `submit_function`, and load what the function returned on rank 0.

        Loading runs code that is in the file, so do this with your own jobs alone. JobFailed;
        ArtifactNotFound for another kind of job.
        """
        self.wait()
        with tempfile.TemporaryDirectory() as folder:
            (path,) = self._client.download(self.id, folder, functions.RESULT)
            return functions.load_result(path)


class AsyncJobRun:
    """See `JobRun`: `async with`, `async for`, and methods to be awaited."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self._client = client
        self.id = job_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.wait()

    def __aiter__(self) -> AsyncGenerator[views.Event, None]:
        return self._client.follow(self.id)

    async def job(self) -> views.Job:
        return await self._client.get(self.id)

    def logs(self, rank: int | None = None) -> AsyncGenerator[views.LogLine, None]:
        return self._client.logs(self.id, rank, follow=True)

    def metrics(self, keys: Sequence[str] | None = None) -> AsyncGenerator[views.Point, None]:
        return self._client.follow_metrics(self.id, keys)

    async def wait(self, timeout_s: float | None = None) -> views.Job:
        return _succeeded(await self._client.wait(self.id, timeout_s))

    async def cancel(self) -> views.Job:
        return await self._client.cancel(self.id)

    async def result(self) -> Any:
        await self.wait()
        import asyncio  # the command line, which loads this module, does without it

        folder = await asyncio.to_thread(tempfile.TemporaryDirectory)
        with folder as name:
            (path,) = await self._client.download(self.id, name, functions.RESULT)
            return await asyncio.to_thread(functions.load_result, Path(path))


def _succeeded(job: views.Job) -> views.Job:
    if job.state is not JobState.SUCCEEDED:
        raise JobFailed(job)
    return job
