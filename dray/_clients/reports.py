"""Read what jobs report and leave: events, metrics, logs, checkpoints and results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from os import PathLike
from pathlib import Path

from dray import views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http.downloads import OnProgress


class ReportCalls(BlockingCalls):
    def follow(self, job_id: str, *, after_seq: int = 0) -> Generator[views.Event, None, None]:
        """Yield each event after `after_seq` when it happens, up to the one that ends the job.

        Events come over one stream (SSE), which is resumed after a broken connection or a restart
        of the server: no event is missed or repeated.
        """
        return self._driver.iterate(self._flows.follow(job_id, after_seq))

    def events(self, job_id: str, *, after_seq: int = 0) -> Generator[views.Event, None, None]:
        """Yield the events so far after `after_seq`."""
        return self._driver.iterate(self._flows.events(job_id, after_seq))

    def metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_step: int | None = None,
        until_step: int | None = None,
        max_points: int | None = None,
        in_order: bool = False,
        times: bool = False,
    ) -> views.Metrics:
        """Series of rank 0 (or `rank`), all or those of `keys`, with at most `max_points` each:
        thinned out, or with `in_order` the first ones after `after_step`, and with `times` when
        each point was reported. after_step, until_step: a part of them in more detail."""
        return self._driver.run(
            self._flows.metrics(
                job_id,
                keys,
                rank,
                after_step,
                max_points,
                until_step=until_step,
                in_order=in_order,
                times=times,
            )
        )

    def follow_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Generator[views.Point, None, None]:
        """Yield each point when it is reported, of all series or of `keys`, until the job is over.

        No point is left out. A step that a later attempt trains again is yielded once. after: the
        last step that the caller has of each series, to go on from there.
        """
        return self._driver.iterate(self._flows.follow_metrics(job_id, keys, rank, after))

    def system_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_time: int | None = None,
        max_points: int | None = None,
    ) -> views.SystemMetrics:
        """System metrics of rank 0 (or `rank`) over time, and of its node if it is the lowest rank
        there: all series or those of `keys`, with at most `max_points` points each."""
        return self._driver.run(
            self._flows.system_metrics(job_id, keys, rank, after_time, max_points)
        )

    def newest_system_metrics(self, job_id: str) -> views.SystemSample:
        """The newest sample of what each rank uses."""
        return self._driver.run(self._flows.newest_system_metrics(job_id))

    def logs(
        self,
        job_id: str,
        rank: int | None = None,
        *,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Generator[views.LogLine, None, None]:
        """Yield lines of every rank and attempt, or of one; with `follow` until the job is over."""
        return self._driver.iterate(self._flows.logs(job_id, rank, attempt, follow))

    def attempts(self, job_id: str) -> list[views.Attempt]:
        return self._driver.run(self._flows.attempts(job_id))

    def checkpoints(self, job_id: str) -> list[views.Checkpoint]:
        return self._driver.run(self._flows.checkpoints(job_id))

    def artifacts(self, job_id: str) -> list[views.Artifact]:
        return self._driver.run(self._flows.artifacts(job_id))

    def download(
        self,
        job_id: str,
        dest: str | PathLike[str],
        artifact: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download all artifacts, or one by its id or path, into the folder `dest`.

        An interrupted download continues where it stopped; a file gets its name only once its
        sha256 is right. `on_progress(path, bytes downloaded, bytes of the file)` is called during
        the download. Returns the files' paths. Raises IntegrityError.
        """
        return self._driver.run(self._flows.download(job_id, dest, artifact, on_progress))

    def checkpoint_files(self, job_id: str, step: int) -> list[views.CheckpointFile]:
        """The files of the checkpoint at `step`; raises CheckpointNotFound if there is none."""
        return self._driver.run(self._flows.checkpoint_files(job_id, step))

    def download_checkpoint(
        self,
        job_id: str,
        step: int,
        dest: str | PathLike[str],
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download the checkpoint at `step` into the folder `dest`, as `download` does."""
        return self._driver.run(self._flows.download_checkpoint(job_id, step, dest, on_progress))


class AsyncReportCalls(AsyncCalls):
    """See `ReportCalls`, which has the same arguments, answers and errors."""

    def follow(self, job_id: str, *, after_seq: int = 0) -> AsyncGenerator[views.Event, None]:
        return self._driver.iterate(self._flows.follow(job_id, after_seq))

    def events(self, job_id: str, *, after_seq: int = 0) -> AsyncGenerator[views.Event, None]:
        return self._driver.iterate(self._flows.events(job_id, after_seq))

    async def metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_step: int | None = None,
        until_step: int | None = None,
        max_points: int | None = None,
        in_order: bool = False,
        times: bool = False,
    ) -> views.Metrics:
        return await self._driver.run(
            self._flows.metrics(
                job_id,
                keys,
                rank,
                after_step,
                max_points,
                until_step=until_step,
                in_order=in_order,
                times=times,
            )
        )

    def follow_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after: Mapping[str, int] | None = None,
    ) -> AsyncGenerator[views.Point, None]:
        return self._driver.iterate(self._flows.follow_metrics(job_id, keys, rank, after))

    async def system_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_time: int | None = None,
        max_points: int | None = None,
    ) -> views.SystemMetrics:
        return await self._driver.run(
            self._flows.system_metrics(job_id, keys, rank, after_time, max_points)
        )

    async def newest_system_metrics(self, job_id: str) -> views.SystemSample:
        return await self._driver.run(self._flows.newest_system_metrics(job_id))

    def logs(
        self,
        job_id: str,
        rank: int | None = None,
        *,
        attempt: int | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[views.LogLine, None]:
        return self._driver.iterate(self._flows.logs(job_id, rank, attempt, follow))

    async def attempts(self, job_id: str) -> list[views.Attempt]:
        return await self._driver.run(self._flows.attempts(job_id))

    async def checkpoints(self, job_id: str) -> list[views.Checkpoint]:
        return await self._driver.run(self._flows.checkpoints(job_id))

    async def artifacts(self, job_id: str) -> list[views.Artifact]:
        return await self._driver.run(self._flows.artifacts(job_id))

    async def download(
        self,
        job_id: str,
        dest: str | PathLike[str],
        artifact: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        return await self._driver.run(self._flows.download(job_id, dest, artifact, on_progress))

    async def checkpoint_files(self, job_id: str, step: int) -> list[views.CheckpointFile]:
        return await self._driver.run(self._flows.checkpoint_files(job_id, step))

    async def download_checkpoint(
        self,
        job_id: str,
        step: int,
        dest: str | PathLike[str],
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        return await self._driver.run(
            self._flows.download_checkpoint(job_id, step, dest, on_progress)
        )
