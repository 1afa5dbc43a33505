"""Commands that read what jobs leave: logs, events, metrics, results; and the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, AsJsonLines, Follow, JobId, OnlyAttempt, Rank, app, connect

if TYPE_CHECKING:
    from dray.views import Checkpoint, Event, LogLine, NodeSlots

_KINDS = ("CPU", "GPU")


@app.command()
def logs(
    job_id: JobId,
    follow: Follow = False,
    rank: Rank = None,
    attempt: OnlyAttempt = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print what the ranks wrote."""
    from dray.cli.output import flush, write, write_json_line

    with connect() as client:
        for line in client.logs(job_id, rank, attempt=attempt, follow=follow):
            write_json_line(line) if as_json else write(_log_line(line, one_rank=rank is not None))
            if follow:  # each line at once, also into a pipe
                flush()


def _log_line(line: LogLine, *, one_rank: bool) -> str:
    return line.text if one_rank else f"[{line.attempt}:{line.rank}] {line.text}"


@app.command()
def events(job_id: JobId, follow: Follow = False, as_json: AsJsonLines = False) -> None:
    """Print what happened to a job."""
    from dray.cli.output import flush, write, write_json_line

    with connect() as client:
        for event in client.follow(job_id) if follow else client.events(job_id):
            write_json_line(event) if as_json else write(_event_line(event))
            if follow:
                flush()


def _event_line(event: Event) -> str:
    when = event.time.strftime("%H:%M:%S.%f")[:-3]
    move = f" {event.from_state or '-'} -> {event.to_state}" if event.to_state else ""
    return f"{event.seq:>4} {when} {event.type}{move}: {event.message} ({event.code})"


@app.command()
def explain(job_id: JobId, as_json: AsJson = False) -> None:
    """Say why a job is where it is."""
    from dray.cli.output import write, write_json

    with connect() as client:
        answer = client.explain(job_id)
    if as_json:
        write_json(answer)
        return
    write(f"{answer.state}: {answer.reason.message} ({answer.reason.code})")
    if answer.position is not None:
        write(f"position in the queue: {answer.position}")
    if answer.blocked_by:
        write(f"waits for: {', '.join(answer.blocked_by)}")
    if answer.expected_start_at is not None:
        write(f"starts by: {answer.expected_start_at.isoformat()}")


@app.command()
def metrics(
    job_id: JobId,
    key: Annotated[
        list[str] | None, typer.Option(help="Only this series, such as train/loss.")
    ] = None,
    rank: Rank = None,
    max_points: Annotated[int | None, typer.Option(help="Thin out to so many.", min=2)] = None,
    as_json: AsJson = False,
) -> None:
    """Show each series' last value, or with --json the series."""
    from dray.cli.output import table, write_json

    with connect() as client:
        answer = client.metrics(job_id, key, rank=rank, max_points=max_points)
    if as_json:
        write_json(answer)
        return
    rows = sorted(answer.series.items())
    table(
        ("KEY", "POINTS", "LAST STEP", "LAST VALUE"),
        ((name, len(s.steps), s.steps[-1], s.values[-1]) for name, s in rows if s.steps),
    )


@app.command()
def attempts(job_id: JobId, as_json: AsJson = False) -> None:
    """List the launches of a job."""
    from dray.cli.output import listing

    with connect() as client:
        found = client.attempts(job_id)
    listing(
        found,
        as_json,
        ("ATTEMPT", "STATE", "WORKERS", "FROM STEP", "STARTED", "FINISHED", "REASON"),
        lambda a: (
            *(a.attempt, a.state, a.world_size, a.resume_step, a.started_at, a.finished_at),
            a.reason.message if a.reason else None,
        ),
    )


@app.command()
def checkpoints(job_id: JobId, as_json: AsJson = False) -> None:
    """List a job's checkpoints."""
    from dray.cli.output import listing, size

    with connect() as client:
        found = client.checkpoints(job_id)
    listing(
        found,
        as_json,
        ("STEP", "ATTEMPT", "SIZE", "METRIC", "IS", "CREATED"),
        lambda c: (c.step, c.attempt, size(c.size_bytes), c.metric, _marks(c), c.created_at),
    )


@app.command()
def artifacts(job_id: JobId, as_json: AsJson = False) -> None:
    """List a job's results."""
    from dray.cli.output import listing, size

    with connect() as client:
        found = client.artifacts(job_id)
    listing(
        found,
        as_json,
        ("PATH", "SIZE", "SHA256", "ID"),
        lambda a: (a.path, size(a.size_bytes), a.sha256[:12], a.id),
    )


@app.command()
def download(
    job_id: JobId,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to put them in.")] = Path(),
    artifact: Annotated[str | None, typer.Option(help="Only this path or id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a job's results, checked by hash."""
    import json

    from dray.cli.output import write

    with connect() as client:
        paths = client.download(job_id, dest, artifact)
    if as_json:
        write(json.dumps({"paths": [str(path) for path in paths]}))
        return
    for path in paths:
        write(str(path))


@app.command()
def cluster(as_json: AsJson = False) -> None:
    """Show the nodes and what runs on them."""
    from dray.cli.output import table, write, write_json

    with connect() as client:
        answer = client.cluster()
    if as_json:
        write_json(answer)
        return
    write("connected" if answer.connected else f"not connected: {answer.reason}")
    if answer.ray_dashboard:
        write(f"dashboard: {answer.ray_dashboard}")
    rows = (
        (
            node.hostname,
            _health(node),
            *(f"{node.held.get(kind, 0):g}/{node.resources.get(kind, 0):g}" for kind in _KINDS),
            ", ".join(node.jobs) or None,
        )
        for node in answer.nodes
    )
    table(("NODE", "STATE", *(f"{kind} HELD" for kind in _KINDS), "JOBS"), rows)


def _health(node: NodeSlots) -> str:
    if not node.alive:
        return "lost"
    return "ready" if node.accepted else f"refused: {node.reason}"


def _marks(checkpoint: Checkpoint) -> str | None:
    marks = [("latest", checkpoint.is_latest), ("best", checkpoint.is_best)]
    return ", ".join(name for name, holds in marks if holds) or None
