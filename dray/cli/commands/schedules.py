"""Commands that create, list, show, change, pause, resume, run and delete schedules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli.base import AsJson, app, connect
from dray.cli.code_upload import upload
from dray.cli.completion import job_ids
from dray.cli.document_options import with_environment
from dray.cli.job_documents import named_document, with_code

if TYPE_CHECKING:
    from datetime import datetime

    from dray.client import Client
    from dray.views import JobSchedule, ScheduleRun

group = typer.Typer(name="schedule", help="Submit a job on a schedule, like cron.")
app.add_typer(group)

ScheduleName = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="The schedule's name, or its id.")
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE | -- PROGRAM [ARGUMENT]...",
        help="Job document in YAML or JSON; or, after --, a Python file or -m MODULE with its "
        "arguments.",
        show_default=False,
    ),
]
Zone = Annotated[
    str | None,
    typer.Option(metavar="ZONE", help="Time zone of the scheduled times, such as Europe/Berlin."),
]
OverlapRule = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="If the previous run has not ended: skip the run, queue it, or replace the previous "
        "run.",
    ),
]
MissedRule = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="If the service was not running at the scheduled times: skip the missed runs, submit "
        "the last missed run, or submit all.",
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="Don't submit a run that is delayed by more than this time, such as 30m.",
    ),
]
Like = Annotated[
    str | None,
    typer.Option(metavar="JOB", help="Use the document of this job.", autocompletion=job_ids),
]
Code = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder to upload (default for a program: the current folder)."
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Upload this path even if a rule excludes it."),
]
Requirements = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Install the packages from this requirements file."),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Set an environment variable for every worker."),
]
Fields = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: train.epochs=3."),
]


@group.command("create")
def create_schedule(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the schedule: a-z, 0-9, - and _.")
    ],
    cron: Annotated[
        str,
        typer.Argument(
            metavar="CRON",
            help="Minute, hour, day of the month, month, day of the week: '30 2 * * MON-FRI'; or "
            "@hourly, @daily, @weekly, @monthly.",
        ),
    ],
    words: Words = None,
    time_zone: Zone = None,
    overlap: OverlapRule = None,
    missed: MissedRule = None,
    deadline: Deadline = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Submit no runs until the schedule is resumed.")
    ] = False,
    like: Like = None,
    code: Code = None,
    include: Include = None,
    requirements: Requirements = None,
    env: Variables = None,
    settings: Fields = None,
    as_json: AsJson = False,
) -> None:
    """Create a schedule.

    Example: dray schedule create nightly '30 2 * * *' --time-zone Europe/Berlin job.yaml
    """
    with connect() as client:
        document = _document(client, words, like, code, include, requirements, env, settings)
        made = client.create_schedule(
            name,
            cron,
            document,
            time_zone=time_zone or "UTC",
            overlap=_rule(overlap, "Overlap", "--overlap") or "skip",
            missed=_rule(missed, "MissedRuns", "--missed") or "last",
            deadline_s=_seconds(deadline),
            paused=paused,
        )
    _write(made, as_json)


@group.command("ls")
def list_schedules(as_json: AsJson = False) -> None:
    """List your schedules, or all users' schedules if you are an admin."""
    from dray.cli.display.tables import listing

    with connect() as client:
        found = list(client.schedules())
    listing(
        found,
        as_json,
        ("NAME", "OWNER", "CRON", "TIME ZONE", "NEXT", "LAST", "ID"),
        lambda one: (
            *(one.name, one.owner, one.cron, one.time_zone),
            _time(one.next_times[0]) if one.next_times else "paused",
            None if one.last_run is None else one.last_run.outcome,
            one.id,
        ),
        flexible=("CRON",),
        optional=("ID", "OWNER", "TIME ZONE", "LAST"),
    )


@group.command("show")
def show_schedule(schedule: ScheduleName, as_json: AsJson = False) -> None:
    """Show a schedule, its next times and its latest runs."""
    from dray.cli.display.output import write_text

    with connect() as client:
        found = client.schedule(schedule)
        runs = [] if as_json else client.schedule_runs(found.id)[:10]
    _write(found, as_json)
    if runs:
        write_text("")
        _list(runs)


@group.command("runs")
def list_runs(schedule: ScheduleName, as_json: AsJson = False) -> None:
    """List the latest 100 runs of a schedule, including skipped, missed and refused runs."""
    from dray.cli.display.output import write_json

    with connect() as client:
        found = client.schedule_runs(schedule)
    write_json(found) if as_json else _list(found)


@group.command("change")
def change_schedule(
    schedule: ScheduleName,
    words: Words = None,
    cron: Annotated[
        str | None, typer.Option(metavar="CRON", help="New times, as in `dray schedule create`.")
    ] = None,
    time_zone: Zone = None,
    overlap: OverlapRule = None,
    missed: MissedRule = None,
    deadline: Deadline = None,
    no_deadline: Annotated[
        bool, typer.Option("--no-deadline", help="Remove the deadline.")
    ] = False,
    like: Like = None,
    code: Code = None,
    include: Include = None,
    requirements: Requirements = None,
    env: Variables = None,
    settings: Fields = None,
    as_json: AsJson = False,
) -> None:
    """Change the times, the rules or the job of a schedule, from the next run on.

    A file or a program replaces the entire job document. With only --set or --env, the current
    document is changed.
    """
    if deadline is not None and no_deadline:
        raise typer.BadParameter("--deadline and --no-deadline can't be combined")
    names_a_job = bool(words) or like is not None
    if not names_a_job and (code or include or requirements):
        raise typer.BadParameter("--code, --include and --requirements need a file or a program")
    with connect() as client:
        document = None
        if names_a_job:
            document = _document(client, words, like, code, include, requirements, env, settings)
        elif settings or env:
            document = client.schedule(schedule).job
            if (document.get("federated") or {}).get("silos"):
                raise typer.BadParameter(
                    "the server does not show the URLs of silos' data: specify the job document, "
                    "followed by --set"
                )
            document = _with_fields(document, settings, None, env)
        changed = client.change_schedule(
            schedule,
            cron=cron,
            spec=document,
            time_zone=time_zone,
            overlap=_rule(overlap, "Overlap", "--overlap"),
            missed=_rule(missed, "MissedRuns", "--missed"),
            deadline_s=_seconds(deadline),
            no_deadline=no_deadline,
        )
    _write(changed, as_json)


@group.command("pause")
def pause_schedule(schedule: ScheduleName, as_json: AsJson = False) -> None:
    """Submit no runs until the schedule is resumed. Submitted jobs continue."""
    with connect() as client:
        changed = client.pause_schedule(schedule)
    _write(changed, as_json)


@group.command("resume")
def resume_schedule(schedule: ScheduleName, as_json: AsJson = False) -> None:
    """Submit runs again. The schedule's rule for missed runs decides what happens to the runs whose
    times passed during the pause."""
    with connect() as client:
        changed = client.resume_schedule(schedule)
    _write(changed, as_json)


@group.command("run-now")
def run_schedule(
    schedule: ScheduleName,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key", help="Running twice with the same key creates only one job."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job of the schedule now, even if the schedule is paused."""
    from dray.cli.commands.jobs import report
    from dray.cli.display.output import write_json

    with connect() as client:
        job = client.run_schedule(schedule, idempotency_key=key)
        if as_json:
            write_json(job)
        else:
            report(job if job.array_id is None else client.array(job.array_id))


@group.command("rm")
def delete_schedule(schedule: ScheduleName, as_json: AsJson = False) -> None:
    """Delete a schedule and the record of its runs. Its jobs remain."""
    import json

    from dray.cli.display.output import write

    with connect() as client:
        client.delete_schedule(schedule)
    write(json.dumps({"deleted": schedule}) if as_json else f"{schedule} deleted")


def _document(
    client: Client,
    words: list[str] | None,
    like: str | None,
    code: Path | None,
    include: list[str] | None,
    requirements: Path | None,
    env: list[str] | None,
    settings: list[str] | None,
) -> dict[str, Any]:
    """Return the document, after uploading its code."""
    document, source = named_document(words or [], like)
    document = _with_fields(document, settings, requirements, env)
    document, packed = with_code(document, source, code, include or [])
    if packed is not None:
        upload(client, document, packed)
    return document


def _with_fields(
    document: dict[str, Any],
    settings: list[str] | None,
    requirements: Path | None,
    env: list[str] | None,
) -> dict[str, Any]:
    from dray.documents import apply_settings

    return with_environment(apply_settings(document, settings or []), requirements, env or [])


def _rule(text: str | None, kind: str, option: str) -> str | None:
    """Refuse a rule that does not exist."""
    from dray import views

    rules = [str(rule) for rule in getattr(views, kind)]
    if text is not None and text not in rules:
        raise typer.BadParameter(f"must be {', '.join(rules)}", param_hint=option)
    return text


def _seconds(text: str | None) -> int | None:
    from dray.input import units

    if text is None:
        return None
    try:
        return int(text) if text.isdecimal() else units.seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--deadline") from None


def _list(runs: list[ScheduleRun]) -> None:
    from dray.cli.display.tables import table

    table(
        ("TIME", "OUTCOME", "JOB", "STATE", "WHY"),
        [
            (_time(run.at), run.outcome, run.array_id or run.job_id, run.job_state, _why(run))
            for run in runs
        ],
        flexible=("WHY",),
        optional=("STATE", "WHY"),
    )


def _time(at: datetime) -> str:
    """Return the time with the schedule's offset from UTC."""
    return at.isoformat(sep=" ", timespec="seconds" if at.second else "minutes")


def _why(run: ScheduleRun) -> str | None:
    if run.problem is None:
        return run.message
    where = f"{run.problem.pointer}: " if run.problem.pointer else ""
    hint = f" ({run.problem.hint})" if run.problem.hint else ""
    return f"{where}{run.problem.detail}{hint}"


def _write(schedule: JobSchedule, as_json: bool) -> None:
    from dray.cli.display.output import write_json

    write_json(schedule) if as_json else _show(schedule)


def _show(one: JobSchedule) -> None:
    from dray.cli.display.output import cell, write_text

    state = ", ".join(_time(at) for at in one.next_times)
    if one.paused:
        state = "never: the schedule is paused"
        state += f", because {one.paused_reason}" if one.paused_reason else ""
    within = "" if one.deadline_s is None else f", within {one.deadline_s} s"
    lines: list[tuple[str, object]] = [
        ("id", one.id),
        ("name", one.name),
        ("owner", one.owner),
        ("times", f"{one.cron} in {one.time_zone}"),
        ("next", state),
        ("job", one.job.get("name")),
        ("overlap", one.overlap),
        ("missed", f"{one.missed}{within}"),
    ]
    for name, value in lines:
        write_text(f"{name:<9} {cell(value)}", indent=" " * 10)
