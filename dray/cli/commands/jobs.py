"""Commands that watch, wait for, show, cancel and delete jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import completion
from dray.cli.base import AsJson, AsJsonLines, Failures, JobId, app, connect, interruptible, seconds
from dray.cli.bulk import DryRun, Expect, Where, change_searched
from dray.cli.choosing import (
    FINISHED,
    LIVE,
    Choice,
    Everything,
    Labels,
    Owner,
    References,
    States,
    Yes,
    ask,
    choose,
    is_array,
    read_job,
    state_names,
)
from dray.cli.exits import Exit

if TYPE_CHECKING:
    from dray.client import Client
    from dray.views import Job, JobArray


@app.command("watch")
def watch_command(job_id: JobId, as_json: AsJson = False) -> None:
    """Show a job's progress until it ends."""
    with connect() as client:
        watch_job(client, read_job(client, job_id), as_json)


def watch_job(client: Client, job_id: str, as_json: bool) -> None:
    from dray.cli.display.output import write_json
    from dray.cli.display.watch import watch

    with interruptible(f"the job continues; watch it again with: dray watch {job_id}"):
        if as_json:
            job = client.wait(job_id)
            write_json(job)
        else:
            job = watch(client, job_id)
    _exit_as(job)


def _exit_as(*done: Job | JobArray) -> None:
    from dray.views import JobArray, JobState

    bad = (JobState.FAILED, JobState.CANCELLED)
    for one in done:
        if one.has_bad_ends if isinstance(one, JobArray) else one.state in bad:
            raise typer.Exit(Exit.JOB_ENDED_BADLY)


@app.command()
def wait(
    jobs: References = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Maximum time to wait, such as 90 (seconds) or 2h.",
            parser=seconds,
        ),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="Wait only until the job is in this state.", autocompletion=completion.states
        ),
    ] = None,
    label: Labels = None,
    everything: Everything = False,
    owner: Owner = "@me",
    as_json: AsJsonLines = False,
) -> None:
    """Wait until jobs have ended, or are in a given state.

    --all selects only jobs that have not ended; --label also selects jobs that have ended. Exits
    with 1 if a job failed or was cancelled, with 3 if no job has the label, and with 5 after the
    timeout.
    """
    import time

    from dray.cli.display.output import flush, write_json_line
    from dray.errors import ArrayWaitTimeout, WaitTimeout

    states = state_names(state)
    choice = Choice(jobs or (), label or (), (), everything, owner)
    choice.check()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    done: list[Job | JobArray] = []
    failures = Failures()
    with connect() as client, interruptible("the jobs continue"):
        # Include finished jobs, so that a job that failed before this command began isn't missed.
        chosen = (*LIVE, *FINISHED) if choice.labels else LIVE
        found = choose(client, choice, failures, default_states=chosen, is_reading=True)
        if choice.labels and not found:
            raise typer.Exit(Exit.REFUSED)
        for job_id in found:
            with failures.noted():
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    wait_for = client.wait_array if is_array(job_id) else client.wait
                    job = wait_for(job_id, left_s, states)
                except (
                    WaitTimeout
                ) as late:  # report the whole timeout instead of the remaining part
                    raise WaitTimeout(late.job, timeout_s or 0.0) from None
                except ArrayWaitTimeout as late:
                    raise ArrayWaitTimeout(late.array, timeout_s or 0.0) from None
                done.append(job)
                write_json_line(job) if as_json else report(job)
                flush()
    failures.end()
    _exit_as(*done)


def report(job: Job | JobArray) -> None:
    from dray.cli.display.output import write_text
    from dray.views import JobArray

    if isinstance(job, JobArray):
        early = f" ({job.stopped_early} stopped early)" if job.stopped_early else ""
        write_text(
            f"{job.id} {job.size} {'trials' if job.is_sweep else 'jobs'}: {job.state}{early}"
        )
    else:
        write_text(f"{job.id} {job.state}: {job.reason.message}")


@app.command()
def get(
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a job, or the number of an array's jobs in each state.

    Exits with 0 even if the job failed. To get the outcome as an exit code, use `dray wait`.
    """
    from dray.cli.display.output import show_array, show_job, write_json

    with connect() as client, interruptible("the job continues"):
        job_id = read_job(client, job_id, arrays=True)
        if is_array(job_id):
            array = client.wait_array(job_id) if wait else client.array(job_id)
            write_json(array) if as_json else show_array(array)
            return
        job = client.wait(job_id) if wait else client.get(job_id)
    write_json(job) if as_json else show_job(job)


@app.command()
def cancel(
    jobs: References = None,
    label: Labels = None,
    state: States = None,
    everything: Everything = False,
    owner: Owner = "@me",
    where: Where = None,
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJsonLines = False,
) -> None:
    """Stop jobs in any state.

    Asks for confirmation if the jobs are selected by label, state or --all.
    """
    from dray.cli.display.output import write_json_line

    choice = Choice(jobs or (), label or (), state or (), everything, owner)
    if change_searched("cancel", choice, LIVE, where, dry_run, expect, yes, as_json):
        return
    choice.check()
    failures = Failures()
    with connect() as client:
        found = choose(client, choice, failures, default_states=LIVE)
        ask("Stop {jobs}?", list(found.values()), yes=yes or not choice.is_by_rule)
        for job_id in found:
            with failures.noted():
                job = (client.cancel_array if is_array(job_id) else client.cancel)(job_id)
                write_json_line(job) if as_json else report(job)
    failures.end()


@app.command()
def delete(
    jobs: References = None,
    label: Labels = None,
    state: States = None,
    everything: Everything = False,
    owner: Owner = "@me",
    where: Where = None,
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJsonLines = False,
) -> None:
    """Delete finished jobs with their logs, metrics, checkpoints and artifacts.

    Asks for confirmation.
    """
    import json

    from dray.cli.display.output import write

    choice = Choice(jobs or (), label or (), state or (), everything, owner)
    if change_searched("delete", choice, FINISHED, where, dry_run, expect, yes, as_json):
        return
    choice.check()
    failures = Failures()
    with connect() as client:
        found = choose(client, choice, failures, default_states=FINISHED)
        what = "Delete {jobs}, including logs, metrics, checkpoints and artifacts?"
        ask(what, list(found.values()), yes=yes)
        for job_id in found:
            with failures.noted():
                (client.delete_array if is_array(job_id) else client.delete)(job_id)
                write(json.dumps({"deleted": job_id}) if as_json else f"{job_id} deleted")
    failures.end()
