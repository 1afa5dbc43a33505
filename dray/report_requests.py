"""Reports: the request bodies, and the blocks in a report's text that become charts and tables."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from dray.spec.fields import Document, Int, JobId, Number, PlainText

MAX_TITLE = 300
MAX_TEXT = 65_536
"""Maximum number of characters of a report's text."""
MAX_BLOCKS = 20
"""Maximum number of charts and tables of a report."""
MAX_CHARTED = 20
"""Maximum number of runs in a chart."""
MAX_METRICS = 4
"""Maximum number of metrics in a chart."""
MAX_CURVES = 40
"""Maximum number of curves of a chart: its runs times its metrics."""
MAX_LISTED = 100
"""Maximum number of runs in a table."""
MAX_COLUMNS = 20
COLUMNS = "state,duration,cost"
"""The columns of a table that names none."""

Title = Annotated[PlainText, StringConstraints(min_length=1, max_length=MAX_TITLE)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Project = Annotated[PlainText, StringConstraints(min_length=1, max_length=255)]
Metric = Annotated[PlainText, StringConstraints(min_length=1, max_length=512)]


class ReportRequest(Document):
    """Store a report."""

    title: Title
    text: Text = ""
    """Markdown. Blocks of code in the languages `chart` and `table` become charts and tables of
    runs."""
    project: Project | None = None


class ReportChangeRequest(Document):
    """Change a report. Omitted fields remain unchanged."""

    version: Annotated[Int, Field(ge=1, lt=2**53)]
    """The version that was read. The change is refused if the report has a newer version."""
    title: Title | None = None
    text: Text | None = None
    project: Project | None = None
    """Null removes the project."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if (self.title, self.text) == (None, None) and "project" not in self.model_fields_set:
            raise ValueError("specify at least one of title, text and project")
        return self


class RunBlock(Document):
    """Selects the runs of a block: by their ids, or by a sweep and a search."""

    title: Annotated[PlainText, StringConstraints(max_length=MAX_TITLE)] = ""
    runs: tuple[JobId, ...] = ()
    """Ids of jobs, in the order in which they are shown."""
    where: Annotated[str, StringConstraints(min_length=1, max_length=4000)] | None = None
    """A search expression. A report shows the jobs that match when it is read."""
    sweep: Annotated[str, StringConstraints(pattern=r"^array-[0-9a-z]{26}$")] | None = None
    """Id of a sweep or an array, whose jobs are shown."""
    sort: Annotated[str, StringConstraints(min_length=1, max_length=600)] | None = None
    """The column by which the jobs are sorted; with `-` in front, in descending order. The default
    is newest first."""
    limit: Annotated[Int, Field(ge=1)] | None = None
    """Number of jobs to show."""

    @model_validator(mode="after")
    def _selects(self) -> Self:
        searched = (self.where, self.sweep, self.sort, self.limit)
        if self.runs and searched != (None,) * 4:
            raise ValueError("`runs` can't be combined with where, sweep, sort or limit")
        if not self.runs and self.where is None and self.sweep is None:
            raise ValueError("select runs: by `runs`, `where` or `sweep`")
        if len(set(self.runs)) < len(self.runs):
            raise ValueError("`runs` contains a job twice")
        if self.num_runs > self.most_runs:
            raise ValueError(f"{self.num_runs} runs are too many: at most {self.most_runs}")
        return self

    @property
    def most_runs(self) -> int:
        return MAX_LISTED

    @property
    def num_runs(self) -> int:
        """The maximum number of runs that the block shows."""
        return len(self.runs) or self.limit or min(10, self.most_runs)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ChartBlock(RunBlock):
    """A chart with a curve for each run and metric."""

    metrics: Annotated[
        tuple[Metric, ...],
        Field(min_length=1, max_length=MAX_METRICS),
        BeforeValidator(_listed),
    ]
    x: Literal["step", "epoch", "samples", "tokens", "time", "seconds", "bytes"] = "step"
    scale: Literal["linear", "log"] = "linear"
    """Scale of the y axis. On a log scale, values that are not positive are not drawn."""
    smoothing: Annotated[Number, Field(ge=0, le=0.99)] = 0.0
    """Weight of the exponential moving average; 0 draws the values themselves."""
    y_min: Number | None = None
    y_max: Number | None = None

    @property
    def most_runs(self) -> int:
        return MAX_CHARTED

    @model_validator(mode="after")
    def _drawable(self) -> Self:
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError("`metrics` contains a metric twice")
        if (curves := self.num_runs * len(self.metrics)) > MAX_CURVES:
            raise ValueError(
                f"{self.num_runs} runs with {len(self.metrics)} metrics are {curves} curves: at "
                f"most {MAX_CURVES} are allowed; set a smaller `limit`"
            )
        if self.y_min is not None and self.y_max is not None and self.y_min >= self.y_max:
            raise ValueError("`y_min` must be less than `y_max`")
        return self


class TableBlock(RunBlock):
    """A table with a row for each run."""

    columns: Annotated[str, StringConstraints(min_length=1, max_length=4000)] = COLUMNS
    """Comma-separated columns, as for the list of jobs."""
