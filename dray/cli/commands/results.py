"""Commands that read the checkpoints and results of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, JobId, app, connect, interruptible
from dray.cli.choosing import read_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dray._http.downloads import OnProgress
    from dray.views import Checkpoint


@app.command()
def checkpoints(
    job_id: JobId,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to download to.")] = Path(),
    step: Annotated[
        int | None,
        typer.Option(
            "--download", metavar="STEP", help="Download the checkpoint at this step.", min=0
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List a job's checkpoints, or download one."""
    from dray.cli.display.output import size
    from dray.cli.display.tables import listing

    with connect() as client:
        job_id = read_job(client, job_id)
        if step is not None:
            with download_progress() as report:
                paths = client.download_checkpoint(job_id, step, dest, on_progress=report)
            write_paths(paths, as_json)
            return
        found = client.checkpoints(job_id)
    listing(
        found,
        as_json,
        ("STEP", "ATTEMPT", "SIZE", "METRIC", "IS", "CREATED"),
        lambda c: (c.step, c.attempt, size(c.size_bytes), c.metric, _marks(c), c.created_at),
        optional=("ATTEMPT", "CREATED"),
    )


def _marks(checkpoint: Checkpoint) -> str | None:
    marks = [("latest", checkpoint.is_latest), ("best", checkpoint.is_best)]
    return ", ".join(name for name, holds in marks if holds) or None


@app.command()
def artifacts(job_id: JobId, as_json: AsJson = False) -> None:
    """List a job's results."""
    from dray.cli.display.output import size
    from dray.cli.display.tables import listing

    with connect() as client:
        found = client.artifacts(read_job(client, job_id))
    listing(
        found,
        as_json,
        ("ID", "SIZE", "SHA256", "PATH"),
        lambda a: (a.id, size(a.size_bytes), a.sha256[:12], a.path),
        optional=("SHA256", "ID"),
    )


@app.command()
def download(
    job_id: JobId,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to download to.")] = Path(),
    artifact: Annotated[
        str | None, typer.Option(help="Only the artifact with this path or id.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a job's results, and verify their hashes. Continues an interrupted download."""
    from dray.cli.display.output import warn

    with connect() as client, download_progress() as report:
        paths = client.download(read_job(client, job_id), dest, artifact, on_progress=report)
    if not paths:
        warn(f"{job_id} has no artifacts")
    write_paths(paths, as_json)


class Exported(StrEnum):
    """Formats of a fine-tuned model."""

    SAFETENSORS = "safetensors"
    ADAPTER = "adapter"


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A job, or a folder with a job's results.")
    ],
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write, ending in .onnx or .pt2.")
    ] = Path("model.onnx"),
    form: Annotated[
        Exported | None,
        typer.Option(
            "--format",
            help="Write the files of a fine-tuned model instead: the complete model, or its "
            "adapter.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="DIR", help="Folder for --format (default: a folder named MODEL)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a trained model to ONNX or torch.export format, which requires dray[onnx]; or export
    the files of a fine-tuned model."""
    from tempfile import TemporaryDirectory

    if form is not None:
        write_paths(_files_of_model(model, form, to), as_json)
        return
    if to is not None:
        raise typer.BadParameter("requires --format; without it, specify FILE", param_hint="--to")
    if Path(model).is_dir():
        written = _export(Path(model), path)
    else:
        with TemporaryDirectory() as folder:
            with connect() as client, download_progress() as report:
                client.download(read_job(client, model), folder, on_progress=report)
            written = _export(Path(folder), path)
    write_paths([written], as_json)


def _files_of_model(model: str, form: Exported, to: Path | None) -> Sequence[Path]:
    """Write the files of a fine-tuned model to a folder, and return their paths."""
    from shutil import copyfile

    from dray._http.exports import exported

    folder = Path(model)
    if not folder.is_dir():
        with connect() as client, download_progress() as report:
            job_id = read_job(client, model)
            return client.export(job_id, to or Path(job_id), form.value, on_progress=report)
    if to is None:
        raise typer.BadParameter("is required if MODEL is a folder", param_hint="--to")
    files = [path for path in folder.rglob("*") if path.is_file()]
    chosen = exported([path.relative_to(folder).as_posix() for path in files], form.value)
    written = []
    for path, name in sorted(chosen.items()):
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copyfile(folder / path, target)
        written.append(target)
    return written


def _export(folder: Path, path: Path) -> Path:
    import dray

    try:
        written: Path = dray.load(folder).export(path)
    except ImportError as error:
        raise ValueError(str(error)) from error  # shown as a message, without a traceback
    return written


def write_paths(paths: Sequence[Path], as_json: bool) -> None:
    """Write the paths of downloaded files."""
    from dray.cli.display.output import write, write_data

    if as_json:
        write_data({"paths": [str(path) for path in paths]})
        return
    for path in paths:
        write(str(path))


@contextmanager
def download_progress() -> Iterator[OnProgress | None]:
    """Show a progress bar for each file on standard error, if it is a terminal."""
    import sys

    with interruptible("the partial download is kept; repeat the command to continue the download"):
        if not sys.stderr.isatty():
            yield None
            return
        from dray.cli.display.bars import download_bars

        with download_bars() as report:
            yield report


@app.command("code")
def code_command(
    job_id: JobId,
    dest: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder to write the files to.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the files of a job's uploaded code, or download them to a folder."""
    from dray.cli.display.output import size, write
    from dray.cli.display.tables import listing

    with connect() as client:
        job_id = read_job(client, job_id)
        if dest is not None:
            for path in client.download_code(job_id, dest):
                write(str(path))
            return
        files = client.job_code(job_id)
    listing(
        files,
        as_json,
        ("PATH", "SIZE", "EXECUTABLE"),
        lambda file: (file.path, size(file.size_bytes), "yes" if file.is_executable else None),
        optional=("EXECUTABLE",),
    )
