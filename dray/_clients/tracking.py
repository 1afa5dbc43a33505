"""Compare jobs, and keep experiments, tags and notes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from dray import frames, views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http import tracking

if TYPE_CHECKING:
    import pandas


Jobs: TypeAlias = "Iterable[views.Job | str] | AsyncIterable[views.Job]"
"""Jobs or their ids; `jobs` yields the former."""


async def _listed(jobs: Jobs) -> list[views.Job | str]:
    if isinstance(jobs, AsyncIterable):
        return [job async for job in jobs]
    return list(jobs)


class TrackingCalls(BlockingCalls):
    def compare(self, jobs: Iterable[views.Job | str]) -> views.Comparison:
        """Up to 50 jobs side by side: the fields in which their documents differ, their metrics,
        times and costs. The pinned baseline of their experiment comes first. Raises NotComparable
        for one job without a baseline."""
        return self._driver.run(tracking.compare(self._flows, list(jobs)))

    def frame(self, jobs: Iterable[views.Job | str]) -> pandas.DataFrame:
        """A pandas frame with a row for each job, by its id: how it did, the fields of the
        documents that differ, and the newest value of each metric. Raises ImportError without
        pandas (`pip install 'dray[frames]'`)."""
        frames.require_pandas()
        return frames.of_jobs(self._driver.run(tracking.jobs_of(self._flows, list(jobs))))

    def series_frame(
        self,
        jobs: Iterable[views.Job | str],
        keys: Sequence[str] | None = None,
        *,
        max_points: int | None = None,
    ) -> pandas.DataFrame:
        """A pandas frame with a row for each point of all series of the jobs, or of those of
        `keys`: columns job, key, step and value. `max_points` of each series, as of `metrics`."""
        frames.require_pandas()
        flow = tracking.series_of(self._flows, list(jobs), keys, max_points)
        return frames.of_series(self._driver.run(flow))

    def experiments(self, *, page_size: int = 100) -> Generator[views.Experiment, None, None]:
        """Yield the experiments by name: the values of the label `experiment`."""
        return self._driver.iterate(tracking.experiments(self._flows, page_size))

    def experiment(self, name: str) -> views.ExperimentSummary:
        """The experiment, with the states of its jobs and the range of each metric. Raises
        ExperimentNotFound if no job is in it."""
        return self._driver.run(tracking.experiment(self._flows, name))

    def pin_baseline(self, name: str, job_id: str | None) -> views.ExperimentSummary:
        """Have the jobs of an experiment compared with this one, or with none. Raises
        NotComparable for a job of another experiment."""
        return self._driver.run(tracking.pin_baseline(self._flows, name, job_id))

    def annotations(self, job_id: str) -> views.Annotations:
        """The tags and notes of a job."""
        return self._driver.run(tracking.get_annotations(self._flows, job_id))

    def annotate(
        self,
        job_id: str,
        *,
        add_tags: Sequence[str] | None = None,
        remove_tags: Sequence[str] | None = None,
        notes: str | None = None,
        revision: int | None = None,
    ) -> views.Annotations:
        """Add or remove tags of a job in any state, or replace its notes (Markdown). With
        `revision`, that of `annotations`, raises AnnotationsChanged if somebody changed them
        since."""
        flow = tracking.annotate(
            *(self._flows, job_id, revision),
            add_tags=add_tags and list(add_tags),
            remove_tags=remove_tags and list(remove_tags),
            notes=notes,
        )
        return self._driver.run(flow)


class AsyncTrackingCalls(AsyncCalls):
    """See `TrackingCalls`, which has the same arguments, answers and errors."""

    async def compare(self, jobs: Jobs) -> views.Comparison:
        return await self._driver.run(tracking.compare(self._flows, await _listed(jobs)))

    async def frame(self, jobs: Jobs) -> pandas.DataFrame:
        frames.require_pandas()
        return frames.of_jobs(
            await self._driver.run(tracking.jobs_of(self._flows, await _listed(jobs)))
        )

    async def series_frame(
        self,
        jobs: Jobs,
        keys: Sequence[str] | None = None,
        *,
        max_points: int | None = None,
    ) -> pandas.DataFrame:
        frames.require_pandas()
        flow = tracking.series_of(self._flows, await _listed(jobs), keys, max_points)
        return frames.of_series(await self._driver.run(flow))

    def experiments(self, *, page_size: int = 100) -> AsyncGenerator[views.Experiment, None]:
        return self._driver.iterate(tracking.experiments(self._flows, page_size))

    async def experiment(self, name: str) -> views.ExperimentSummary:
        return await self._driver.run(tracking.experiment(self._flows, name))

    async def pin_baseline(self, name: str, job_id: str | None) -> views.ExperimentSummary:
        return await self._driver.run(tracking.pin_baseline(self._flows, name, job_id))

    async def annotations(self, job_id: str) -> views.Annotations:
        return await self._driver.run(tracking.get_annotations(self._flows, job_id))

    async def annotate(
        self,
        job_id: str,
        *,
        add_tags: Sequence[str] | None = None,
        remove_tags: Sequence[str] | None = None,
        notes: str | None = None,
        revision: int | None = None,
    ) -> views.Annotations:
        flow = tracking.annotate(
            *(self._flows, job_id, revision),
            add_tags=add_tags and list(add_tags),
            remove_tags=remove_tags and list(remove_tags),
            notes=notes,
        )
        return await self._driver.run(flow)
