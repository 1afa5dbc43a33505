"""The command that shows metrics of jobs as a table, a chart, CSV, or a list of points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, Follow, JobIds, Rank, app, connect, interruptible
from dray.cli.choosing import read_job, read_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from dray.cli.display.plot import Curve
    from dray.client import Client
    from dray.views import Metrics, Point, Series, SystemMetrics, SystemSample

_CSV_HEAD = ("key", "step", "value")


@app.command()
def metrics(
    jobs: JobIds,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="Only this series, such as train/loss.")
    ] = None,
    rank: Rank = None,
    plot: Annotated[
        bool,
        typer.Option(
            "--plot", "-p", help="Draw a chart of each series, with the curves of all jobs."
        ),
    ] = False,
    together: Annotated[
        bool, typer.Option("--together", help="Draw all series in one chart.")
    ] = False,
    log: Annotated[bool, typer.Option("--log", help="Draw with a logarithmic axis.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print each point as CSV.")] = False,
    system: Annotated[
        bool,
        typer.Option("--system", help="Show the CPU, memory, disk and GPU use of ranks and nodes."),
    ] = False,
    follow: Follow = False,
    after_step: Annotated[
        int | None, typer.Option(metavar="STEP", help="Only steps after this one.", min=-1)
    ] = None,
    until_step: Annotated[
        int | None, typer.Option(metavar="STEP", help="Only points up to this step.", min=0)
    ] = None,
    max_points: Annotated[
        int | None, typer.Option(help="Maximum number of points per series.", min=2)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show, draw or print the metrics of one or several jobs."""
    draw = plot or together or log
    if sum((as_json, as_csv, draw)) > 1:
        raise typer.BadParameter("--json, --csv and the chart options can't be combined")
    if follow and (draw or max_points):
        raise typer.BadParameter(
            "can't be combined with --max-points or an option that draws charts",
            param_hint="--follow",
        )
    if follow and len(jobs) > 1:
        raise typer.BadParameter("can only be used with a single job", param_hint="--follow")
    is_part = after_step is not None or until_step is not None
    if is_part and (follow or system):
        wrong = "can't be combined with --follow or --system"
        raise typer.BadParameter(wrong, param_hint="--after-step, --until-step")
    if system and (follow or len(jobs) > 1):
        raise typer.BadParameter(
            "can only be used with a single job, and not with --follow", param_hint="--system"
        )
    from dray.filters import MAX_POINTS

    with connect() as client:
        if system:
            from dray.ranks import role_names

            job_id = read_job(client, jobs[0])
            if draw or as_csv:
                answer = client.system_metrics(job_id, key, rank=rank, max_points=max_points)
                if set(key or ()) - answer.series.keys():
                    every = client.system_metrics(job_id, rank=rank, max_points=2)
                    _refuse_unknown(key or (), every.series)
                _show_system_series(answer, together=together, log=log, as_csv=as_csv)
            else:
                sample = client.newest_system_metrics(job_id)
                names = [] if as_json else role_names(client.get(job_id).spec)
                _show_system_sample(sample, rank, names, as_json=as_json)
            return
        ids = read_jobs(client, jobs)
        if follow:
            _follow(client, ids[0], key, rank, as_json=as_json, as_csv=as_csv)
            return
        if as_csv and max_points is None:
            max_points = MAX_POINTS
        answers = {
            one: client.metrics(
                one,
                key,
                rank=rank,
                after_step=after_step,
                until_step=until_step,
                max_points=max_points,
            )
            for one in ids
        }
        _check_keys(client, answers, key or (), rank)
        named = answers if as_json or len(ids) == 1 else _by_name(client, answers)
    if as_json:
        _write_json(answers)
    elif as_csv:
        _write_csv(named)
    elif draw:
        _draw(named, together=together, log=log)
    else:
        _tabulate(named)


def _show_system_series(answer: SystemMetrics, *, together: bool, log: bool, as_csv: bool) -> None:
    from dray.cli.display.output import write_csv_row
    from dray.cli.display.system_metrics import by_seconds

    if not as_csv:
        _draw({"": by_seconds(answer)}, together=together, log=log, axis="second")
        return
    write_csv_row(("key", "time", "value"))
    for key, one in answer.series.items():
        for time, value in zip(one.times, one.values, strict=True):
            write_csv_row((key, time, value))


def _show_system_sample(
    sample: SystemSample, rank: int | None, names: Sequence[str], *, as_json: bool
) -> None:
    from dray.cli.display.output import write_json
    from dray.cli.display.system_metrics import tabulate

    if as_json:
        write_json(sample)
    else:
        tabulate(sample, rank, names)


def _follow(
    client: Client,
    job_id: str,
    keys: Sequence[str] | None,
    rank: int | None,
    *,
    as_json: bool,
    as_csv: bool,
) -> None:
    if client.get(job_id).state.is_terminal:
        answer = client.metrics(job_id, keys, rank=rank, max_points=2)
        _check_keys(client, {job_id: answer}, keys or (), rank)
    with interruptible(f"the job continues; follow it again with: dray metrics -f {job_id}"):
        write_point = _point_writer(as_json=as_json, as_csv=as_csv)
        for point in client.follow_metrics(job_id, keys, rank=rank):
            write_point(point)


def _check_keys(
    client: Client, answers: Mapping[str, Metrics], keys: Sequence[str], rank: int | None
) -> None:
    """Raise BadParameter for a key for which no job has a series, but not if the jobs have no
    series at all."""
    found = {key for answer in answers.values() for key, _ in _series(answer)}
    if found.issuperset(keys):
        return
    known = {
        key
        for job_id in answers
        for key, _ in _series(client.metrics(job_id, None, rank=rank, max_points=2))
    }
    _refuse_unknown(keys, known)


def _refuse_unknown(keys: Sequence[str], known: Collection[str]) -> None:
    """Raise BadParameter for a key that is not in `known`, unless `known` is empty."""
    unknown = [key for key in keys if key not in known]
    if known and unknown:
        listed = ", ".join(sorted(known))
        raise typer.BadParameter(
            f"there is no series {unknown[0]!r} yet; existing series: {listed}", param_hint="--key"
        )


def _series(answer: Metrics) -> Iterator[tuple[str, Series]]:
    """Yield the series that have points, sorted by key."""
    return ((key, one) for key, one in sorted(answer.series.items()) if one.steps)


def _by_name(client: Client, answers: Mapping[str, Metrics]) -> dict[str, Metrics]:
    """Return the metrics of each job, keyed by job name. If several jobs have the same name, a
    prefix of the id is appended."""
    from dray.cli.display.tables import shortest_prefixes

    names = [client.get(job_id).name for job_id in answers]
    short = shortest_prefixes(list(answers))
    return {
        name if names.count(name) == 1 else f"{name} {prefix}": answer
        for name, prefix, answer in zip(names, short, answers.values(), strict=True)
    }


def _point_writer(*, as_json: bool, as_csv: bool) -> Callable[[Point], None]:
    """Return a function that writes each point immediately, even to a pipe."""
    from dray.cli.display.output import flush, number, write, write_csv_row, write_json_line

    if as_csv:
        write_csv_row(_CSV_HEAD)

    def write_point(point: Point) -> None:
        if as_json:
            write_json_line(point)
        elif as_csv:
            write_csv_row((point.key, point.step, point.value))
        else:
            write(f"step {point.step}  {point.key} {number(point.value)}")
        flush()

    return write_point


def _write_json(answers: Mapping[str, Metrics]) -> None:
    """Write the metrics of a single job or, for several jobs, an object that maps job ids to
    metrics."""
    from dray.cli.display.output import write_data, write_json

    if len(answers) == 1:
        write_json(*answers.values())
    else:
        write_data({one: answer.model_dump(mode="json") for one, answer in answers.items()})


def _write_csv(answers: Mapping[str, Metrics]) -> None:
    from dray.cli.display.output import write_csv_row

    is_one = len(answers) == 1
    write_csv_row(_CSV_HEAD if is_one else ("job", *_CSV_HEAD))
    for job, answer in answers.items():
        for key, one in _series(answer):
            for step, value in zip(one.steps, one.values, strict=True):
                write_csv_row((key, step, value) if is_one else (job, key, step, value))


def _tabulate(answers: Mapping[str, Metrics]) -> None:
    from dray.cli.display.tables import table

    rows = sorted(
        (key, job, len(one.steps), one.steps[-1], one.values[-1], *_extremes(one.values))
        for job, answer in answers.items()
        for key, one in _series(answer)
    )
    columns = ("KEY", "JOB", "POINTS", "LAST STEP", "LAST VALUE", "LOWEST", "HIGHEST")
    optional = ("JOB", "POINTS", "LAST STEP", "HIGHEST", "LOWEST")
    if len(answers) > 1:
        table(columns, rows, flexible=("JOB",), optional=optional)
    else:
        table(
            (columns[0], *columns[2:]), [(key, *rest) for key, _, *rest in rows], optional=optional
        )


def _extremes(values: Sequence[float | str]) -> tuple[float | None, float | None]:
    numbers = [value for value in values if not isinstance(value, str)]
    return (min(numbers), max(numbers)) if numbers else (None, None)


def _draw(answers: Mapping[str, Metrics], *, together: bool, log: bool, axis: str = "step") -> None:
    from dray.cli.display import terminal
    from dray.cli.display.output import write, write_drawn
    from dray.cli.display.plot import Style, chart

    style = Style(
        width=terminal.width(),
        log=log,
        colours=terminal.has_colours(),
        unicode=terminal.has_unicode(),
        axis=axis,
    )
    charts = _curves(answers)
    if not charts:
        write("no points yet")
    if together and charts:
        charts = [[curve for curves in charts for curve in curves]]
    for curves in charts:
        for line in chart(curves, style):
            write_drawn("".join(_span(text, n, style.colours) for text, n in line))


def _curves(answers: Mapping[str, Metrics]) -> list[list[Curve]]:
    """Return a list for each key, with a curve for each job."""
    from dray.cli.display import terminal
    from dray.cli.display.plot import Curve

    found: dict[str, list[Curve]] = {}
    for job, answer in answers.items():
        for key, one in _series(answer):
            title = key if len(answers) == 1 else f"{key}  {job}"
            found.setdefault(key, []).append(Curve(terminal.clean(title), one.steps, one.values))
    return [found[key] for key in sorted(found)]


def _span(text: str, curve: int | None, colours: bool) -> str:
    from dray.cli.display import terminal

    code = terminal.CURVES[curve % len(terminal.CURVES)] if curve is not None and colours else None
    return terminal.styled(text, code)
