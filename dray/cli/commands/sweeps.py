"""Commands for sweeps: submit a sweep, show its trials, cancel it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, AsJsonLines, Failures, app, connect
from dray.cli.choosing import read_job
from dray.cli.code_upload import packed_folder
from dray.cli.commands.jobs import report
from dray.cli.commands.submit import send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dray.views import JobSweep, Trial

group = typer.Typer(
    name="sweep", help="Search for the best parameters: submit, show and cancel sweeps."
)
app.add_typer(group)

SweepId = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP", help="The sweep's id, a prefix of the id, or the name of its jobs."
    ),
]
BEST = "best"
"""The word that marks the best trial."""


@group.command("submit")
def submit_sweep(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Job document with `sweep` (- for stdin).")
    ],
    code: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder to upload.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: sweep.trials=20."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key", help="Submitting twice with the same key creates only one sweep."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a document with `sweep`, and print the sweep's id.

    `dray submit` also accepts such a document, and has more options.
    """
    from dray.cli.display.output import write_json
    from dray.documents import apply_settings, load_document
    from dray.errors import SpecError

    document = apply_settings(load_document(file), settings or [])
    if not document.get("sweep"):
        raise SpecError(
            f"{file} has no sweep",
            pointer="/sweep",
            hint="specify a metric, parameters and a number of trials; see docs/guides/sweeps.md",
        )
    packed = packed_folder(document, file, code, [])
    with connect() as client:
        job = send(client, document, packed, key)
        sweep = client.sweep(job.array_id or "")
    write_json(sweep) if as_json else report(sweep)


@group.command("show")
def show_sweep(
    sweep_id: SweepId,
    by_index: Annotated[
        bool,
        typer.Option("--by-index", help="Sort trials by index, instead of listing the best first."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the trials with their parameters and values, best first."""
    from dray.cli.display.output import write_data

    with connect() as client:
        sweep_id = read_job(client, sweep_id, arrays=True)
        sweep = client.sweep(sweep_id)
        trials = list(client.trials(sweep_id, page_size=500))
    if not by_index:
        trials.sort(key=lambda trial: _rank(sweep, trial))
    if as_json:
        listed = [trial.model_dump(mode="json") for trial in trials]
        write_data({**sweep.model_dump(mode="json"), "trials": listed})
    else:
        _show(sweep, trials)


def _rank(sweep: JobSweep, trial: Trial) -> tuple[bool, float, int]:
    """Return a sort key: the best trial comes first, then trials in order of their values, then
    trials without a value."""
    if trial.value is None:
        return False, math.inf, trial.index
    value = trial.value if sweep.mode == "min" else -trial.value
    return not trial.is_best, value, trial.index


def _show(sweep: JobSweep, trials: Sequence[Trial]) -> None:
    from dray.cli.display.output import number, write_text
    from dray.cli.display.tables import table

    report(sweep)
    better = "lower" if sweep.mode == "min" else "higher"
    write_text(
        f"compared by the {sweep.by} {sweep.metric} ({better} is better); sampler: {sweep.sampler}"
    )
    names = list(sweep.sweep["parameters"])

    def row(trial: Trial) -> tuple[object, ...]:
        values = (trial.parameters or {}).get
        reported = None if trial.value is None else number(trial.value)
        mark = BEST if trial.is_best else None
        about = (trial.index, mark, trial.state, reported, trial.step)
        return (*about, *(_cell(values(name)) for name in names), trial.job_id, _why(trial))

    table(
        ("TRIAL", "BEST", "STATE", "VALUE", "STEP", *names, "JOB", "REASON"),
        map(row, trials),
        flexible=("REASON",),
        optional=("JOB", "REASON", "STEP"),
    )


def _cell(value: object) -> str | None:
    from dray.cli.display.output import number

    if value is None or isinstance(value, str):
        return value
    return number(value) if isinstance(value, float) else json.dumps(value)


def _why(trial: Trial) -> str | None:
    """Return the reason why the trial ended without success, or None."""
    is_bad = trial.state.is_terminal and trial.reason.code != "succeeded"
    return trial.reason.message if is_bad else None


@group.command("cancel")
def cancel_sweep(
    sweeps: Annotated[
        list[str], typer.Argument(metavar="SWEEP", help="Sweeps: ids, prefixes of ids, or names.")
    ],
    as_json: AsJsonLines = False,
) -> None:
    """Stop all unfinished trials of sweeps."""
    from dray.cli.display.output import write_json_line

    failures = Failures()
    with connect() as client:
        for reference in sweeps:
            with failures.noted():
                sweep = client.sweep(client.resolve(reference, arrays=True))
                array = client.cancel_array(sweep.id)
                write_json_line(array) if as_json else report(array)
    failures.end()
