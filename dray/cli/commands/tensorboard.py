"""The command that shows metrics in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import JobIds, app, connect, interruptible, server_url
from dray.cli.choosing import read_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_INSTALLED = (
    "TensorBoard is not installed, so only the files are written. To view them: pip install "
    "tensorboard, then tensorboard --logdir {logdir}"
)


@app.command()
def tensorboard(
    jobs: JobIds,
    logdir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the event files (default: a temporary folder).", file_okay=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="TensorBoard's port.", min=0, max=65535)] = 6006,
    serve: Annotated[
        bool,
        typer.Option(
            help="Start TensorBoard. With --no-serve, only write event files until the jobs end."
        ),
    ] = True,
) -> None:
    """Write the metrics of jobs to event files while the jobs run, and show them in TensorBoard.

    If the command is run again with the same folder, it continues where it stopped.
    """
    import asyncio
    import importlib.util
    import tempfile

    from dray.cli.display.output import flush, warn, write

    with connect() as client:
        job_ids = read_jobs(client, jobs)
    folder = Path(tempfile.mkdtemp(prefix="dray-tensorboard-")) if logdir is None else logdir
    write(f"event files are in {folder}")
    flush()
    if serve and importlib.util.find_spec("tensorboard") is None:
        warn(NOT_INSTALLED.format(logdir=folder))
        serve = False
    with interruptible(
        f"the jobs continue; resume with: dray tensorboard --logdir {folder} JOB..."
    ):
        asyncio.run(_run(job_ids, folder, port if serve else None))


async def _run(job_ids: Sequence[str], logdir: Path, port: int | None) -> None:
    """Write event files until the jobs have ended. With a port, also run TensorBoard until it exits
    or is interrupted.

    Exits with TensorBoard's exit code if it is not 0.
    """
    import asyncio
    import sys

    from dray.aio import AsyncClient
    from dray.tensorboard.writer import write_jobs

    async with AsyncClient(server_url()) as client:
        if port is None:
            await write_jobs(client, job_ids, logdir)
            return
        arguments = ("-m", "tensorboard.main", "--logdir", str(logdir), "--port", str(port))
        server = await asyncio.create_subprocess_exec(sys.executable, *arguments)
        writing = asyncio.create_task(write_jobs(client, job_ids, logdir))
        serving = asyncio.create_task(server.wait())
        try:
            await asyncio.wait({writing, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await writing  # raises the error if writing failed
            if code := await serving:
                raise typer.Exit(code)
        finally:
            writing.cancel()
            if server.returncode is None:
                server.terminate()
            await asyncio.gather(writing, serving, return_exceptions=True)
