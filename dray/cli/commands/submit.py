"""The command that submits a job, from a document or from a training program and its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli.base import AsJson, app, connect, future
from dray.cli.code_upload import name_code, upload
from dray.cli.commands.jobs import report, watch_job
from dray.cli.completion import job_ids
from dray.cli.document_options import with_environment, with_metrics
from dray.cli.job_documents import named_document, with_code, with_git

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dray.client import Client
    from dray.code.packing import PackedCode
    from dray.views import Job


@app.command()
def submit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | -- PROGRAM [ARGUMENT]... | --like JOB [-- ARGUMENT...]",
            help="Job document in YAML or JSON (- for stdin); or, after --, a Python file or -m "
            "MODULE with its arguments.",
            show_default=False,
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Resubmit this job's document; arguments after -- replace the document's "
            "arguments of the same name.",
            autocompletion=job_ids,
        ),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder to upload (default for a program: the current folder)."
        ),
    ] = None,
    git: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Run a commit of this repository instead of uploading code."
        ),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="HASH", help="Full hash of the commit to run with --git.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Upload this path even if a rule excludes it."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of workers.")] = None,
    gpus: Annotated[
        float | None, typer.Option(help="GPUs per worker: 0, 1, or 0.5 to share a GPU.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="Start once this job or array has succeeded."),
    ] = None,
    after_any: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB", help="Start once this job or array has ended, successfully or not."
        ),
    ] = None,
    after_failure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB", help="Start once this job or array has failed or was cancelled."
        ),
    ] = None,
    after_each: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARRAY",
            help="Start each job of the new array once the job with the same index in this array "
            "has succeeded.",
        ),
    ] = None,
    reservation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run the job on the nodes of this reservation."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Don't start before this time, such as 'tomorrow 08:00' or now+2hours.",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Cancel the job if it has not ended by this time, given in the same form as "
            "--begin.",
        ),
    ] = None,
    singleton: Annotated[
        bool,
        typer.Option(
            "--singleton", help="Start once your earlier jobs with the same name have ended."
        ),
    ] = False,
    array: Annotated[
        int | None,
        typer.Option(min=1, help="Submit an array of this many jobs."),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of the array's jobs that run at the same time."),
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Install the packages from this requirements file."),
    ] = None,
    no_packages: Annotated[
        bool,
        typer.Option(
            "--no-packages",
            help="Install no packages, even if the program's folder has a requirements.txt, "
            "uv.lock or pyproject.toml.",
        ),
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set an environment variable for every worker."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATTERN",
            help=(
                "Read this metric from the output with a regular expression whose only group "
                "matches the number."
            ),
        ),
    ] = None,
    no_guesses: Annotated[
        bool,
        typer.Option("--no-guesses", help="Don't guess metrics from the program's output."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: train.epochs=3."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the job's progress until it ends.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the document and show when the job would start, without submitting it.",
        ),
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key", help="Submitting twice with the same key creates only one job."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job.

    Examples: dray submit job.yaml; dray submit --workers 4 -- train.py --lr 0.1; again with
    different arguments: dray submit --like JOB -- --lr 0.01
    """
    from dray.cli.display.output import write_json
    from dray.documents import apply_settings, with_fields

    document, source = named_document(words or [], like)
    shortcuts = {
        "name": name,
        "resources.num_workers": workers,
        "resources.gpus_per_worker": gpus,
        "resources.share_gpus": True if gpus is not None and 0 < gpus < 1 else None,
        "script.guesses": False if no_guesses else None,
        "array.size": array,
        "array.max_running": max_running,
        "singleton": True if singleton else None,
        "reservation": reservation,
        "begin_at": future(begin, "--begin"),
        "deadline": future(deadline, "--deadline"),
    }
    given = [(field, value) for field, value in shortcuts.items() if value is not None]
    document = apply_settings(with_fields(document, given), settings or [])
    document = with_environment(document, requirements, env or [])
    document = with_metrics(document, metric or [])
    if git is None and commit is None:
        document, packed = with_code(
            document, source, code, include or [], finds_packages=not no_packages
        )
    else:
        packed = None
        document = with_git(document, git, commit, uploads=bool(code or include))
    if watch and (document.get("array") or document.get("sweep")):
        raise typer.BadParameter("--watch shows only a single job: use dray wait ARRAY")
    others: list[tuple[str, Mapping[str, Any]]] = [
        *((one, {"on": "success"}) for one in after or ()),
        *((one, {"on": "end"}) for one in after_any or ()),
        *((one, {"on": "failure"}) for one in after_failure or ()),
        *((one, {"each": True}) for one in after_each or ()),
    ]
    if dry_run:
        _check(document, source, packed, as_json)
        if not as_json:
            _forecast(document, packed, others)
        return
    with connect() as client:
        _name_others(client, document, others)
        job = send(client, document, packed, key)
        if watch:
            watch_job(client, job.id, as_json)
        else:
            write_json(job) if as_json else _report(client, job)


def send(
    client: Client, document: dict[str, Any], packed: PackedCode | None, key: str | None
) -> Job:
    """Upload the folder, if any, and submit the document."""
    if packed is not None:
        upload(client, document, packed)
    return client.submit(document, idempotency_key=key)


def _name_others(
    client: Client, document: dict[str, Any], others: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """Add `others`, the jobs that this job waits for, to `after` in the document. Each job keeps
    the other fields of its entry. References to jobs are resolved as in other commands."""
    if others:
        found = [
            {"job": client.resolve(reference, arrays=True), **how} for reference, how in others
        ]
        document["after"] = [*(document.get("after") or []), *found]


def _report(client: Client, job: Job) -> None:
    report(job if job.array_id is None else client.array(job.array_id))


def _check(document: dict[str, Any], source: str, packed: PackedCode | None, as_json: bool) -> None:
    from dray.cli.display.output import size, warn, write_json, write_text
    from dray.documents import check

    if packed is not None:
        name_code(document, packed)
        for note in packed.notes:
            warn(note)
    spec = check(document, source=source)
    if as_json:
        write_json(spec)
        return
    what = spec.recipe or (spec.script.command if spec.script else "")
    workers = spec.resources.num_workers
    on = f"{workers} worker" if workers == 1 else f"{workers} workers"
    kind = "a job" if spec.array is None else f"an array of {spec.array.size}"
    kind = kind if spec.sweep is None else f"a sweep of {spec.num_jobs} trials"
    write_text(f"{source} describes {kind}: {what} on {on}. Nothing was submitted.")
    if packed is not None:
        for file in packed.files:
            write_text(f"  {size(file.size_bytes):>9}  {file.path}")
        for entry in packed.left_out:
            write_text(f"  excluded: {entry.path} {entry.why}")


def _forecast(
    document: dict[str, Any],
    packed: PackedCode | None,
    others: Sequence[tuple[str, Mapping[str, Any]]],
) -> None:
    """If a server responds, write whether and when that server would start the job."""
    from dray._http.transport import Retry
    from dray.cli.commands.reports import write_explanation
    from dray.cli.display.output import warn, write_text
    from dray.errors import TransportError

    if packed is not None:  # the code is not uploaded yet
        part = "script" if "script" in document else "model"
        document = {**document, part: {**document[part], "code": None}}
    try:
        with connect(Retry(patience_s=0.0)) as client:
            _name_others(client, document, others)
            explanation = client.dry_run(document)
    except TransportError as error:
        warn(f"no start forecast, because no server responded: {error}")
        return
    write_text("If it were submitted now:")
    write_explanation(explanation)
