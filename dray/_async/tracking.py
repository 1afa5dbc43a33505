"""Compare jobs, and manage experiments, tags and notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dray import frames, views
from dray._async.reports import ReportCalls
from dray._http import downloads, references
from dray._http.transport import Call, params, present, segment
from dray.filters import (
    ImportanceFilter,
    JobGroups,
    JobTableFile,
    States,
    label_texts,
    states_of,
)

if TYPE_CHECKING:
    import pandas


TableFormat: TypeAlias = Literal["parquet", "csv"]
EXPORT_S = 300.0
"""Seconds for which the server may write a table before it begins to send it."""
Jobs: TypeAlias = (
    "Iterable[views.Job | str]"
    " | AsyncIterable[views.Job]"  # asynchronous only
)
"""Jobs, for example as yielded by `jobs`, or their ids."""


async def _listed(jobs: Jobs) -> list[views.Job | str]:
    if isinstance(jobs, AsyncIterable):  # asynchronous only
        return [job async for job in jobs]  # asynchronous only
    return list(jobs)


class TrackingCalls(ReportCalls):
    async def compare(self, jobs: Jobs) -> views.Comparison:
        """Compare up to 50 jobs: the fields in which their documents differ, and their metrics,
        times and costs. The pinned baseline of the jobs' experiment comes first. Raises
        NotComparable for a single job without a baseline."""
        ids = [
            job.id if isinstance(job, views.Job) else segment(job) for job in await _listed(jobs)
        ]
        call = Call("GET", "/v1/compare", params(jobs=",".join(ids)))
        return await self._read(views.Comparison, call)

    async def diff(self, old: str, new: str) -> views.JobDiff:
        """Return what changed from the job `old` to the job `new`: the document, the commit, the
        data, the packages of the ranks, and the uploaded code, file by file. Raises NotComparable
        if both are the same job."""
        call = Call("GET", "/v1/diff", params(jobs=f"{segment(old)},{segment(new)}"))
        return await self._read(views.JobDiff, call)

    async def lineage(self, job_id: str) -> views.Lineage:
        """Return the jobs from which a job was made, and the jobs and versions of models that were
        made from it."""
        return await self._read(views.Lineage, Call("GET", f"/v1/jobs/{segment(job_id)}/lineage"))

    async def frame(self, jobs: Jobs) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per job, indexed by id. The columns are the
        outcome, the fields in which the documents differ, and the latest value of each metric; or
        the columns with which the jobs were listed, as in
        `frame(jobs(columns=["lr", "best:val/accuracy"]))`. Raises ImportError if pandas is not
        installed (`pip install 'dray[frames]'`); each job's `values` has the same values as a
        dictionary."""
        frames.require_pandas()
        found = []
        for job in await _listed(jobs):
            found.append(await self.get(job) if isinstance(job, str) else job)
        return frames.of_jobs(found)

    async def series_frame(
        self,
        jobs: Jobs,
        keys: Sequence[str] | None = None,
        *,
        max_points: int | None = None,
    ) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per point of all series of the jobs, or only of
        `keys`. The columns are job, key, step and value. max_points: maximum number of points per
        series, as for `metrics`."""
        frames.require_pandas()
        found = []
        for job in await _listed(jobs):
            job_id = job if isinstance(job, str) else job.id
            found.append((job_id, await self.metrics(job_id, keys, max_points=max_points)))
        return frames.of_series(found)

    def groups(
        self,
        by: str,
        *,
        sort: str | None = None,
        state: States | None = None,
        queue: str | None = None,
        label: Mapping[str, str] | None = None,
        owner: str | None = None,
        project: str | None = None,
        name: str | None = None,
        name_glob: str | None = None,
        text: str | None = None,
        array: str | None = None,
        array_index: int | None = None,
        schedule: str | None = None,
        reservation: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        where: str | None = None,
        page_size: int = 100,
    ) -> AsyncGenerator[views.JobGroup, None]:
        """Yield groups of the jobs that match all arguments, each with its best value, mean and
        standard deviation, in the order of the best values.

        by: `sweep`, `experiment`, `user`, or `label:KEY`. sort: the column that is compared, such
        as `val/loss`, or `-val/accuracy` if larger values are better; without it, the groups are in
        the order of their keys. The other arguments are the same as in `jobs`. Raises
        InvalidSearch if the column is not a number.
        """
        chosen = JobGroups.model_construct(
            by=by,
            sort=sort,
            state=states_of(state),
            queue=queue,
            label=label_texts(label),
            owner=owner,
            project=project,
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            schedule=schedule,
            reservation=reservation,
            created_after=created_after,
            created_before=created_before,
            where=where,
        )
        query = references.query_of(chosen)
        return self._items(views.JobGroupPage, "/v1/job-groups", query, page_size=page_size)

    async def save_table(
        self,
        path: str | PathLike[str],
        columns: Sequence[str],
        *,
        file_format: TableFormat = "parquet",
        sort: str | None = None,
        state: States | None = None,
        queue: str | None = None,
        label: Mapping[str, str] | None = None,
        owner: str | None = None,
        project: str | None = None,
        name: str | None = None,
        name_glob: str | None = None,
        text: str | None = None,
        array: str | None = None,
        array_index: int | None = None,
        schedule: str | None = None,
        reservation: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        where: str | None = None,
    ) -> int:
        """Write the jobs that match all arguments, at most 100,000, to a Parquet or CSV file with a
        row for each job. Returns the size of the file in bytes.

        The server writes the file. Its columns are `job` (the id), `columns`, and `values_as_of`,
        the time up to which the metrics of a running job cover its points. In Parquet, a field
        whose values have different types is a string. The other arguments are the same as in
        `jobs`. An existing file is replaced once the new file is complete. Raises InvalidSearch.
        """
        chosen = JobTableFile.model_construct(
            columns=",".join(columns),
            format=file_format,
            sort=sort,
            state=states_of(state),
            queue=queue,
            label=label_texts(label),
            owner=owner,
            project=project,
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            schedule=schedule,
            reservation=reservation,
            created_after=created_after,
            created_before=created_before,
            where=where,
        )
        headers = {"Accept": "*/*"}
        query = references.query_of(chosen)
        call = Call("GET", "/v1/job-table", query, headers, wait_s=EXPORT_S)
        response = await self._send(call)
        return await asyncio.to_thread(downloads.write_whole, Path(path), response.content)

    async def importance(
        self,
        metric: str,
        *,
        include_stopped: bool = False,
        state: States | None = None,
        queue: str | None = None,
        label: Mapping[str, str] | None = None,
        owner: str | None = None,
        project: str | None = None,
        name: str | None = None,
        name_glob: str | None = None,
        text: str | None = None,
        array: str | None = None,
        array_index: int | None = None,
        schedule: str | None = None,
        reservation: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        where: str | None = None,
    ) -> views.Importance:
        """Return how much a metric depends on each field in which the documents of the jobs differ,
        estimated from the jobs that match all arguments and succeeded.

        metric: such as `val/loss` or `best:val/loss`. include_stopped: whether trials that were
        stopped early count. The other arguments are the same as in `jobs`. If there are fewer than
        20 jobs, the result has a `reason` instead of importances. Raises InvalidSearch.
        """
        chosen = ImportanceFilter.model_construct(
            metric=metric,
            include_stopped=include_stopped,
            state=states_of(state),
            queue=queue,
            label=label_texts(label),
            owner=owner,
            project=project,
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            schedule=schedule,
            reservation=reservation,
            created_after=created_after,
            created_before=created_before,
            where=where,
        )
        call = Call("GET", "/v1/importance", references.query_of(chosen))
        return await self._read(views.Importance, call)

    async def save_view(
        self, name: str, /, *, view_project: str | None = None, **query: Any
    ) -> views.SavedView:
        """Save a list of jobs under a name, or replace your view with this name.

        `query` has the arguments of `jobs`, and `group`, which has the values of `by` in `groups`.
        view_project: the project that the view is for. Raises InvalidSearch or TooManyViews.
        """
        if "label" in query:
            query["label"] = label_texts(query["label"])
        if "state" in query:
            query["state"] = states_of(query["state"])
        if not isinstance(query.get("columns", ""), str):
            query["columns"] = ",".join(query["columns"])
        body = {"query": query, "project": view_project}
        return await self._read(views.SavedView, Call.with_json("PUT", _view_path(name), body))

    async def saved_view(self, name: str, *, owner: str | None = None) -> views.SavedView:
        """Return your saved view, or the view of `owner`. Raises ViewNotFound."""
        call = Call("GET", _view_path(name), params(owner=owner))
        return await self._read(views.SavedView, call)

    def saved_views(
        self, *, owner: str | None = None, project: str | None = None, page_size: int = 100
    ) -> AsyncGenerator[views.SavedView, None]:
        """Yield the saved views of all users, or only of `owner` (`@me` for the caller) and
        `project`, sorted by name and owner."""
        query = params(owner=owner, project=project)
        return self._items(views.SavedViewPage, "/v1/views", query, page_size=page_size)

    async def delete_view(self, name: str, *, owner: str | None = None) -> None:
        """Delete your saved view; admins can also delete the view of another `owner`. Raises
        ViewNotFound or Forbidden."""
        await self._send(Call("DELETE", _view_path(name), params(owner=owner)))

    def experiments(self, *, page_size: int = 100) -> AsyncGenerator[views.Experiment, None]:
        """Yield the experiments, which are the values of the label `experiment`, sorted by name."""
        return self._items(views.ExperimentPage, "/v1/experiments", page_size=page_size)

    async def experiment(self, name: str) -> views.ExperimentSummary:
        """Return the experiment: its notes, baseline, pinned jobs and layout, the states of its
        jobs and the range of each metric. Raises ExperimentNotFound if the experiment has no
        jobs."""
        return await self._read(views.ExperimentSummary, Call("GET", _path(name)))

    async def pin_baseline(self, name: str, job_id: str | None) -> views.ExperimentSummary:
        """Pin a job as the baseline of an experiment; None removes the baseline. Raises
        NotComparable if the job belongs to another experiment."""
        call = Call.with_json("PATCH", _path(name), {"baseline": job_id})
        return await self._read(views.ExperimentSummary, call)

    async def change_experiment(
        self,
        name: str,
        *,
        notes: str | None = None,
        pinned: Sequence[str] | None = None,
        layout: Mapping[str, Any] | None = None,
        revision: int | None = None,
    ) -> views.ExperimentSummary:
        """Replace the notes (Markdown), the pinned jobs (at most 20 ids) or the layout of an
        experiment's charts (at most 64 KiB of JSON). Arguments that are None change nothing.

        If `revision` is given, as returned by `experiment`, raises ExperimentChanged if the
        experiment has changed since that revision. Raises NotComparable if a pinned job belongs to
        another experiment.
        """
        changes = present(notes=notes, pinned=None if pinned is None else list(pinned))
        changes |= present(layout=None if layout is None else dict(layout))
        headers = None if revision is None else {"If-Match": f'"{revision}"'}
        call = Call.with_json("PATCH", _path(name), changes, headers=headers)
        return await self._read(views.ExperimentSummary, call)

    async def annotations(self, job_id: str) -> views.Annotations:
        """Return the tags and notes of a job."""
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/annotations")
        return await self._read(views.Annotations, call)

    async def annotate(
        self,
        job_id: str,
        *,
        add_tags: Sequence[str] | None = None,
        remove_tags: Sequence[str] | None = None,
        notes: str | None = None,
        colour: int | Literal["auto"] | None = None,
        revision: int | None = None,
    ) -> views.Annotations:
        """Add or remove tags of a job in any state, or replace its notes (Markdown) or the colour
        (0 to 19) of its curves on the web page. With the colour `auto`, the page chooses. If
        `revision` is given, as returned by `annotations`, raises AnnotationsChanged if the tags,
        the notes or the colour have changed since that revision."""
        changes = present(
            add_tags=add_tags and list(add_tags),
            remove_tags=remove_tags and list(remove_tags),
            notes=notes,
            colour=colour,
        )
        headers = None if revision is None else {"If-Match": f'"{revision}"'}
        path = f"/v1/jobs/{segment(job_id)}/annotations"
        call = Call.with_json("PATCH", path, changes, headers=headers)
        return await self._read(views.Annotations, call)


def _view_path(name: str) -> str:
    return f"/v1/views/{segment(name)}"


def _path(experiment: str) -> str:
    return f"/v1/experiments/{segment(experiment)}"
