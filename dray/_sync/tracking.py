# Written by `make blocking` from dray/_async/tracking.py: change that file instead.
"""Compare jobs, and manage experiments, tags and notes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from dray import frames, views
from dray._http.transport import Call, params, present, segment
from dray._sync.reports import ReportCalls

if TYPE_CHECKING:
    import pandas


Jobs: TypeAlias = "Iterable[views.Job | str]"
"""Jobs, for example as yielded by `jobs`, or their ids."""


def _listed(jobs: Jobs) -> list[views.Job | str]:
    return list(jobs)


class TrackingCalls(ReportCalls):
    def compare(self, jobs: Jobs) -> views.Comparison:
        """Compare up to 50 jobs: the fields in which their documents differ, and their metrics,
        times and costs. The pinned baseline of the jobs' experiment comes first. Raises
        NotComparable for a single job without a baseline."""
        ids = [job.id if isinstance(job, views.Job) else segment(job) for job in _listed(jobs)]
        call = Call("GET", "/v1/compare", params(jobs=",".join(ids)))
        return self._read(views.Comparison, call)

    def frame(self, jobs: Jobs) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per job, indexed by id. The columns are the
        outcome, the fields in which the documents differ, and the latest value of each metric.
        Raises ImportError if pandas is not installed (`pip install 'dray[frames]'`)."""
        frames.require_pandas()
        found = []
        for job in _listed(jobs):
            found.append(self.get(job) if isinstance(job, str) else job)
        return frames.of_jobs(found)

    def series_frame(
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
        for job in _listed(jobs):
            job_id = job if isinstance(job, str) else job.id
            found.append((job_id, self.metrics(job_id, keys, max_points=max_points)))
        return frames.of_series(found)

    def experiments(self, *, page_size: int = 100) -> Generator[views.Experiment, None, None]:
        """Yield the experiments, which are the values of the label `experiment`, sorted by name."""
        return self._items(views.ExperimentPage, "/v1/experiments", page_size=page_size)

    def experiment(self, name: str) -> views.ExperimentSummary:
        """Return the experiment, with the states of its jobs and the range of each metric. Raises
        ExperimentNotFound if the experiment has no jobs."""
        return self._read(views.ExperimentSummary, Call("GET", _path(name)))

    def pin_baseline(self, name: str, job_id: str | None) -> views.ExperimentSummary:
        """Pin a job as the baseline of an experiment; None removes the baseline. Raises
        NotComparable if the job belongs to another experiment."""
        call = Call.with_json("PATCH", _path(name), {"baseline": job_id})
        return self._read(views.ExperimentSummary, call)

    def annotations(self, job_id: str) -> views.Annotations:
        """Return the tags and notes of a job."""
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/annotations")
        return self._read(views.Annotations, call)

    def annotate(
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
        return self._read(views.Annotations, call)


def _path(experiment: str) -> str:
    return f"/v1/experiments/{segment(experiment)}"
