"""Commands that show a job's logs, events, attempts or explanations."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli.base import (
    AsJson,
    AsJsonLines,
    Follow,
    JobId,
    OnlyAttempt,
    Rank,
    app,
    connect,
    interruptible,
)
from dray.cli.choosing import read_job
from dray.cli.commands.shares import show_factors

if TYPE_CHECKING:
    from dray.views import (
        Attempt,
        Counterfactual,
        Event,
        Explanation,
        Forecast,
        ForecastError,
        OtherJob,
    )

Contains = Annotated[
    str | None,
    typer.Option(help="Only lines that contain this text, in upper or lower case."),
]


@app.command()
def logs(
    job_id: JobId,
    follow: Follow = False,
    rank: Rank = None,
    attempt: OnlyAttempt = None,
    contains: Contains = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the output of the ranks."""
    from dray.cli.display.output import flush, write, write_json_line
    from dray.ranks import role_names, with_role

    again = f"the job continues; follow it again with: dray logs -f {job_id}"
    with connect() as client, interruptible(again if follow else "stopped"):
        job_id = read_job(client, job_id)
        names = [] if as_json or rank is not None else role_names(client.get(job_id).spec)
        lines = client.logs(job_id, rank, attempt=attempt, contains=contains, follow=follow)
        for line in lines:
            if as_json:
                write_json_line(line)
            elif rank is not None:
                write(line.text, colours=True)
            else:
                whose = with_role(line.rank, names)
                write(f"[{line.attempt}:{whose}] {line.text}", colours=True)
            if follow:  # write each line immediately, even to a pipe
                flush()


@app.command()
def events(job_id: JobId, follow: Follow = False, as_json: AsJsonLines = False) -> None:
    """Print the events of a job."""
    from dray.cli.display.output import flush, write_json_line, write_text

    again = f"the job continues; follow it again with: dray events -f {job_id}"
    with connect() as client, interruptible(again if follow else "stopped"):
        job_id = read_job(client, job_id)
        for event in client.follow(job_id) if follow else client.events(job_id):
            write_json_line(event) if as_json else write_text(_event_line(event), indent="    ")
            if follow:
                flush()


def _event_line(event: Event) -> str:
    when = event.time.strftime("%Y-%m-%d %H:%M:%SZ")
    by = f", by {event.actor}" if event.actor else ""
    move = f" {event.from_state or '-'} -> {event.to_state}" if event.to_state else ""
    return f"{event.seq:>3} {when} {event.type}{move}: {event.message}{by} ({event.code})"


@app.command()
def samples(
    job_id: JobId,
    step: Annotated[int | None, typer.Option(help="Only this step.", min=0)] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the texts that the model generated at its evaluations, for each prompt in the order of
    the steps."""
    from dray.cli.display.output import warn, write_json_line, write_text

    with connect() as client:
        job_id = read_job(client, job_id)
        given = client.get(job_id).spec.get("samples") or {}
        found = list(client.samples(job_id, step=step))
    if as_json:
        for one in found:
            write_json_line(one)
        return
    if not found:
        missing = "were generated yet" if step is None else f"of step {step} exist"
        warn(f"no texts {missing}" if given else "the job's document has no samples")
        return
    for number, prompt in enumerate(given.get("prompts", [])):
        write_text(f"prompt {number + 1}: {_prompt(prompt)}", indent="    ")
        for one in found:
            if number < len(one.texts):
                write_text(f"  step {one.step}: {one.texts[number]}", indent="    ")


def _prompt(prompt: Any) -> str:
    """Return a text, or a conversation, as one string."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(f"{message['role']}: {message['content']}" for message in prompt)


@app.command()
def explain(
    job_id: JobId,
    factors: Annotated[
        bool,
        typer.Option(
            "--factors", help="Show the factors of the job's position in the queue instead."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain why a job is in its current state."""
    from dray.cli.display.output import write_json

    with connect() as client:
        job_id = read_job(client, job_id)
        if factors:
            show_factors(client.factors(job_id), as_json)
            return
        answer = client.explain(job_id)
    if as_json:
        write_json(answer)
    else:
        write_explanation(answer)


def write_explanation(answer: Explanation) -> None:
    """Write why a job is waiting or running, how long that is expected to last, and which changes
    would start the job sooner."""
    from dray.cli.display.output import write_text

    write_text(f"{answer.state}: {answer.reason.message} ({answer.reason.code})")
    if answer.position is not None:
        of = "" if answer.queue_length is None else f" of {answer.queue_length}"
        write_text(f"position {answer.position}{of} in the queue")
    for title, jobs, others in (
        ("ahead of it", answer.ahead, (answer.position or 1) - 1 - len(answer.ahead)),
        ("hold slots", answer.running, 0),
    ):
        if jobs:
            write_text(f"{title}:")
        for job in jobs:
            write_text(f"  {job.id} {job.name}: {_other(job)}", indent="  ")
        if jobs and others > 0:
            write_text(f"  and {others} more")
    unnamed = set(answer.blocked_by) - {job.id for job in (*answer.ahead, *answer.running)}
    if unnamed:
        write_text(
            f"waits for: {', '.join(job_id for job_id in answer.blocked_by if job_id in unnamed)}"
        )
    for rule in answer.favoured:
        write_text(f"order: {rule.message}")
    for event, forecast in (("start", answer.start), ("end", answer.end)):
        if forecast is not None:
            write_text(f"expected {event}: {_expected(forecast)}")
    has_start = answer.start is not None and answer.start.at is not None
    if has_start and answer.forecast_error is not None and answer.forecast_error.count:
        write_text(f"error of recent forecasts: {_off(answer.forecast_error)}")
    if answer.counterfactuals:
        write_text("what would change this:")
    for each in answer.counterfactuals:
        write_text(f"  {each.message}{_when(each)}", indent="    ")
    if answer.sync is not None:
        write_text(f"sync: auto became {answer.sync.chosen}:")
        for option in answer.sync.options:
            write_text(f"  {option.name}: {option.why}", indent="    ")
        for sentence in answer.sync.facts:
            write_text(f"  known at the time: {sentence}", indent="    ")


def _expected(forecast: Forecast) -> str:
    """Return the expected time range and the forecast's assumptions, or the reason why the time is
    unknown."""
    from dray.cli.display.output import local

    if forecast.at is None:
        why = "" if forecast.reason is None else f": {forecast.reason.message}"
        bound = forecast.not_before
        return f"unknown{why}" + (f"; not before {local(bound)}" if bound else "")
    if forecast.latest_at is None:
        when = f"{local(forecast.earliest_at or forecast.at)} or later"
    else:
        first, last = local(forecast.earliest_at or forecast.at), local(forecast.latest_at)
        when = first if first == last else f"{first} to {last}"
    if not forecast.num_assumed:
        return when
    jobs = "1 job" if forecast.num_assumed == 1 else f"{forecast.num_assumed} jobs"
    return f"{when}, assuming that {jobs} of unknown length take as long as recent jobs"


def _when(change: Counterfactual) -> str:
    """Return the expected start time in parentheses, or nothing if the job would start
    immediately."""
    from dray.cli.display.output import local

    if change.at is None or change.at <= datetime.now(UTC):
        return ""
    return f" (about {local(change.at)})"


def _off(error: ForecastError) -> str:
    from dray.cli.display.output import duration

    median, most = error.median_s or 0.0, error.p90_s or 0.0
    return (
        f"median {duration(median)}, 90th percentile {duration(most)} "
        ""
        f"({error.count} forecasts in 7 days)"
    )


def _other(job: OtherJob) -> str:
    workers = "1 worker" if job.world_size == 1 else f"{job.world_size} workers"
    return f"{job.state}, {workers}, priority {job.priority}"


@app.command()
def attempts(job_id: JobId, as_json: AsJson = False) -> None:
    """List the attempts of a job."""
    from dray.cli.display.tables import listing

    with connect() as client:
        found = client.attempts(read_job(client, job_id))
    listing(
        found,
        as_json,
        ("ATTEMPT", "STATE", "WORKERS", "FROM STEP", "LOSS", "STARTED", "TOOK", "REASON"),
        lambda a: (
            *(a.attempt, a.state, a.world_size, _from_step(a), _losses(a), a.started_at),
            _took(a),
            a.reason.message if a.reason else None,
        ),
        flexible=("REASON",),
        optional=("TOOK", "STARTED", "WORKERS"),
    )


def _from_step(attempt: Attempt) -> str:
    """Return the step from which the attempt resumed, and the damaged checkpoints that it
    skipped."""
    passed_over = attempt.receipt.passed_over if attempt.receipt is not None else []
    steps = ", ".join(str(each.step) for each in passed_over)
    return f"{attempt.resume_step}" + (f" (not {steps}: damaged)" if steps else "")


def _losses(attempt: Attempt) -> str | None:
    """Return the training loss before and after the attempt resumed."""
    if attempt.receipt is None or not attempt.receipt.url:
        return None
    losses = attempt.receipt.loss_before, attempt.receipt.loss_after
    return " -> ".join("?" if loss is None else f"{float(loss):.4g}" for loss in losses)


def _took(attempt: Attempt) -> str | None:
    from dray.cli.display.output import duration

    if attempt.finished_at is None:
        return None
    return duration(
        (attempt.finished_at - (attempt.started_at or attempt.created_at)).total_seconds()
    )
