"""The command for the media of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJsonLines, JobId, app, connect
from dray.cli.choosing import read_job
from dray.cli.commands.results import download_progress, write_paths
from dray.media.kinds import MediaKind

if TYPE_CHECKING:
    from dray.views import MediaOverview


@app.command("media")
def media_command(
    job_id: JobId,
    kind: Annotated[MediaKind | None, typer.Option(help="Only media of this kind.")] = None,
    key: Annotated[str | None, typer.Option(help="Only media with this key.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only media of this rank.", min=0)] = None,
    step: Annotated[int | None, typer.Option(help="Only media of this step.", min=0)] = None,
    dest: Annotated[
        Path | None,
        typer.Option(
            "--download", metavar="FOLDER", help="Write the media to files in this folder."
        ),
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """List what a job reported in addition to numbers, such as pictures and histograms, or download
    it."""
    from dray.cli.display.output import warn, write_json_line

    with connect() as client:
        job_id = read_job(client, job_id)
        if dest is not None:
            with download_progress() as report:
                paths = client.download_media(
                    *(job_id, dest, kind, key), rank=rank, step=step, on_progress=report
                )
            write_paths(paths, as_json)
            return
        if as_json:
            for record in client.media_records(job_id, kind, key, rank=rank, step=step):
                write_json_line(record)
            return
        overview = client.media(job_id)
        if step is not None:
            raise typer.BadParameter("is only for --download and --json", param_hint="--step")
    items = [
        one
        for one in overview.items
        if kind in (None, one.kind) and key in (None, one.key) and rank in (None, one.rank)
    ]
    if not items:
        warn(f"{job_id} has reported no {'such ' if overview.items else ''}media")
    _show(overview.model_copy(update={"items": items}))
    if overview.num_left_out:
        warn(
            f"{overview.num_left_out:,} values were left out; the log and the events of the job "
            "state the reasons"
        )


def _show(overview: MediaOverview) -> None:
    from dray.cli.display.tables import table

    if overview.items:
        table(
            ("KIND", "KEY", "RANK", "RECORDS", "FIRST STEP", "LAST STEP"),
            [
                (one.kind, one.key, one.rank, len(one.steps), one.steps[0], one.steps[-1])
                for one in overview.items
            ],
            flexible=("KEY",),
            optional=("FIRST STEP",),
        )
