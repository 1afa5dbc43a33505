"""Commands that read what jobs leave: metrics, checkpoints, results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, Follow, JobId, Rank, app, connect, interruptible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dray._downloads import OnProgress
    from dray.views import Checkpoint, Metrics, Point

MOST_POINTS = 100_000
_CSV_HEAD = ("key", "step", "value")


@app.command()
def metrics(
    job_id: JobId,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="Only this series, such as train/loss.")
    ] = None,
    rank: Rank = None,
    plot: Annotated[bool, typer.Option("--plot", "-p", help="Draw each series.")] = False,
    together: Annotated[bool, typer.Option("--together", help="Draw all on common axes.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Draw with a logarithmic axis.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print each point as CSV.")] = False,
    follow: Follow = False,
    max_points: Annotated[
        int | None, typer.Option(help="Thin out to so many a series.", min=2, max=MOST_POINTS)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show, draw or print the series of a job."""
    draw = plot or together or log
    if sum((as_json, as_csv, draw)) > 1:
        raise typer.BadParameter("choose one of --json, --csv and drawing")
    if follow and (draw or max_points):
        raise typer.BadParameter("prints each point as it comes", param_hint="--follow")
    with connect() as client:
        if follow:
            with interruptible(f"the job goes on; follow it again with: dray metrics -f {job_id}"):
                write_point = _point_writer(as_json=as_json, as_csv=as_csv)
                for point in client.follow_metrics(job_id, key, rank=rank):
                    write_point(point)
            return
        if as_csv and max_points is None:
            max_points = MOST_POINTS
        answer = client.metrics(job_id, key, rank=rank, max_points=max_points)
    if as_json:
        from dray.cli.output import write_json

        write_json(answer)
    elif as_csv:
        _write_csv(answer)
    elif draw:
        _draw(answer, together=together, log=log)
    else:
        _tabulate(answer)


def _point_writer(*, as_json: bool, as_csv: bool) -> Callable[[Point], None]:
    """Writes each point at once, also into a pipe."""
    from dray.cli.output import flush, number, write, write_json_line

    if as_csv:
        _write_row(_CSV_HEAD)

    def write_point(point: Point) -> None:
        if as_json:
            write_json_line(point)
        elif as_csv:
            _write_row((point.key, point.step, point.value))
        else:
            write(f"step {point.step}  {point.key} {number(point.value)}")
        flush()

    return write_point


def _write_csv(answer: Metrics) -> None:
    _write_row(_CSV_HEAD)
    for name, one in sorted(answer.series.items()):
        for step, value in zip(one.steps, one.values, strict=True):
            _write_row((name, step, value))


def _tabulate(answer: Metrics) -> None:
    from dray.cli.tables import table

    table(
        ("KEY", "POINTS", "LAST STEP", "LAST VALUE", "LOWEST", "HIGHEST"),
        (
            (name, len(one.steps), one.steps[-1], one.values[-1], *_extremes(one.values))
            for name, one in sorted(answer.series.items())
            if one.steps
        ),
    )


def _extremes(values: Sequence[float | str]) -> tuple[float | None, float | None]:
    numbers = [value for value in values if not isinstance(value, str)]
    return (min(numbers), max(numbers)) if numbers else (None, None)


def _write_row(cells: Sequence[object]) -> None:
    import csv
    import io

    from dray.cli.output import write

    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(cells)
    write(row.getvalue())


def _draw(answer: Metrics, *, together: bool, log: bool) -> None:
    from dray.cli import terminal
    from dray.cli.output import write, write_drawn
    from dray.cli.plot import Curve, Style, chart

    style = Style(
        width=terminal.width(),
        log=log,
        colours=terminal.has_colours(),
        unicode=terminal.has_unicode(),
    )
    curves = [
        Curve(terminal.clean(name), one.steps, one.values)
        for name, one in sorted(answer.series.items())
        if one.steps
    ]
    if not curves:
        write("there are no points yet")
    for group in [curves] if together and curves else [[curve] for curve in curves]:
        for line in chart(group, style):
            write_drawn("".join(_span(text, n, style.colours) for text, n in line))


def _span(text: str, curve: int | None, colours: bool) -> str:
    from dray.cli import terminal

    code = terminal.CURVES[curve % len(terminal.CURVES)] if curve is not None and colours else None
    return terminal.styled(text, code)


@app.command()
def checkpoints(
    job_id: JobId,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to download to.")] = Path(),
    step: Annotated[
        int | None, typer.Option("--download", metavar="STEP", help="Fetch this one.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List a job's checkpoints, or download one."""
    from dray.cli.output import size
    from dray.cli.tables import listing

    with connect() as client:
        if step is not None:
            with _progress() as tell:
                paths = client.download_checkpoint(job_id, step, dest, on_progress=tell)
            _write_paths(paths, as_json)
            return
        found = client.checkpoints(job_id)
    listing(
        found,
        as_json,
        ("STEP", "ATTEMPT", "SIZE", "METRIC", "IS", "CREATED"),
        lambda c: (c.step, c.attempt, size(c.size_bytes), c.metric, _marks(c), c.created_at),
    )


def _marks(checkpoint: Checkpoint) -> str | None:
    marks = [("latest", checkpoint.is_latest), ("best", checkpoint.is_best)]
    return ", ".join(name for name, holds in marks if holds) or None


@app.command()
def artifacts(job_id: JobId, as_json: AsJson = False) -> None:
    """List a job's results."""
    from dray.cli.output import size
    from dray.cli.tables import listing

    with connect() as client:
        found = client.artifacts(job_id)
    listing(
        found,
        as_json,
        ("ID", "SIZE", "SHA256", "PATH"),
        lambda a: (a.id, size(a.size_bytes), a.sha256[:12], a.path),
    )


@app.command()
def download(
    job_id: JobId,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to put them in.")] = Path(),
    artifact: Annotated[str | None, typer.Option(help="Only this path or id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a job's results, checked by hash. A download that was broken off goes on."""
    with connect() as client, _progress() as tell:
        paths = client.download(job_id, dest, artifact, on_progress=tell)
    _write_paths(paths, as_json)


def _write_paths(paths: Sequence[Path], as_json: bool) -> None:
    from dray.cli.output import write, write_data

    if as_json:
        write_data({"paths": [str(path) for path in paths]})
        return
    for path in paths:
        write(str(path))


@contextmanager
def _progress() -> Iterator[OnProgress | None]:
    """A bar for each file on standard error, if that is a terminal."""
    import sys

    with interruptible("what has come so far is kept; the same command goes on from there"):
        if not sys.stderr.isatty():
            yield None
            return
        from dray.cli.bars import download_bars

        with download_bars() as tell:
            yield tell
