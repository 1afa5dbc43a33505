"""Commands for faults: preempt jobs, inject faults, and show hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import (
    AsJson,
    AsJsonLines,
    JobId,
    app,
    connect,
    interruptible,
    seconds,
)
from dray.cli.bulk import DryRun, Expect, Where, change_matching, change_named, searched
from dray.cli.choosing import Owner, References, Yes, read_job
from dray.cli.exits import Exit

if TYPE_CHECKING:
    from dray.views import Drill, Hang, HangRank

KINDS = ("kill", "stall", "corrupt", "preempt")


@app.command()
def preempt(
    jobs: References = None,
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="Time limit for saving a checkpoint, such as 90 (seconds) or 2m.",
            parser=seconds,
        ),
    ] = None,
    hold: Annotated[
        bool,
        typer.Option(
            "--hold", help="Hold the jobs, so that they resume only after `dray release`."
        ),
    ] = False,
    where: Where = None,
    owner: Owner = "@me",
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJsonLines = False,
) -> None:
    """Ask jobs to save a checkpoint, release their slots and resume later."""
    search = searched(jobs, where, owner, dry_run=dry_run, expect=expect, yes=yes)
    if search is not None:
        change_matching("preempt", search, as_json, {"grace_s": grace_s, "held": hold or None})
        return
    then = ", and will be held" if hold else ""
    change_named(
        jobs or (),
        as_json,
        lambda client, job_id: client.preempt(job_id, grace_s=grace_s, hold=hold),
        lambda client, array_id: client.preempt_array(array_id, grace_s=grace_s, hold=hold),
        lambda job: f"{job.id} ({job.state}) was asked to release its slots{then}",
    )


@app.command()
def drill(
    job_id: JobId,
    kill: Annotated[bool, typer.Option("--kill", help="Kill the process of a rank.")] = False,
    stall: Annotated[
        bool, typer.Option("--stall", help="Suspend the process of a rank, so that it hangs.")
    ] = False,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Flip a bit of a rank's copy of the model.")
    ] = False,
    preempt: Annotated[bool, typer.Option("--preempt", help="Preempt the whole job.")] = False,
    rank: Annotated[int, typer.Option(help="The rank to inject the fault into.", min=0)] = 0,
    at_step: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Inject the fault after this number of steps.", min=0),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the drill is over.")
    ] = True,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            help="Running the command twice with the same key injects only one fault.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Inject a fault into a training job, and report how the job recovers.

    Exits with 1 if the job did not recover as it should.
    """
    from dray.cli.display.output import write_json, write_text
    from dray.views import DrillState

    chosen = [
        kind for kind, given in zip(KINDS, (kill, stall, corrupt, preempt), strict=True) if given
    ]
    if len(chosen) != 1:
        raise typer.BadParameter("choose one of --kill, --stall, --corrupt and --preempt")
    with connect() as client, interruptible("the drill continues"):
        done = client.drill(
            client.resolve(job_id),
            kind=chosen[0],
            rank=rank,
            at_step=at_step,
            wait=wait,
            idempotency_key=key,
        )
    write_json(done) if as_json else write_text(_outcome(done))
    if done.state is DrillState.FAILED:
        raise typer.Exit(Exit.JOB_ENDED_BADLY)


def _outcome(drill: Drill) -> str:
    """Return the outcome, such as `recovered in 0.41 s, 0 steps lost`, or the state of an
    unfinished drill."""
    from dray.views import DrillState

    if drill.state is DrillState.PASSED:
        return drill.message
    if drill.state is DrillState.FAILED:
        return f"failed: {drill.message}"
    return f"{drill.id} {drill.state}: {drill.message}"


@app.command()
def hangs(
    job_id: JobId,
    every_frame: Annotated[
        bool, typer.Option("--all", help="Also show the stack frames in dray's own code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show each hang of a job: which ranks hung, where and for how long, and the stack of every
    rank."""
    from dray.cli.display.output import write, write_json
    from dray.ranks import role_names

    with connect() as client:
        job_id = read_job(client, job_id)
        found = client.hangs(job_id)
        names = role_names(client.get(job_id).spec) if found else []
    if as_json:
        write_json(found)
        return
    if not found:
        write("no hangs")
    for number, hang in enumerate(found):
        if number:
            write("")
        _show(hang, names, every_frame=every_frame)


def _show(hang: Hang, names: Sequence[str], *, every_frame: bool) -> None:
    """Write one hang. `names` are the names of the ranks, if they have roles."""
    from dray.cli.display.output import cell, write
    from dray.ranks import with_role

    where = f" in {hang.phase}" if hang.phase else ""
    step = "" if hang.step is None else f" at step {hang.step}"
    waited = "" if hang.waited_s is None else f" for {hang.waited_s:.1f} s"
    limit = "" if hang.limit_s is None else f" (the limit was {hang.limit_s:.1f} s)"
    write(f"hang {hang.seq}, attempt {hang.attempt}, {cell(hang.time)}")
    write(f"{_named(hang.culprits)} hung{where}{step}{waited}{limit}")
    for rank in sorted(hang.ranks, key=lambda one: (one.rank not in hang.culprits, one.rank)):
        is_culprit = rank.rank in hang.culprits
        _show_rank(rank, with_role(rank.rank, names), is_culprit, every_frame=every_frame)


def _show_rank(rank: HangRank, name: str, is_culprit: bool, *, every_frame: bool) -> None:
    from dray.cli.display import output
    from dray.cli.display.output import write

    stack = rank.stack or "no stack"
    parts = [f"rank {name}" + (", the culprit" if is_culprit else "")]
    if isinstance(rank.collective, str):  # more precise than a script's phase
        parts.append(f"in {rank.collective}")
    elif rank.phase:
        parts.append(rank.phase)
    if rank.step is not None:
        parts.append(f"step {rank.step}")
    if (
        isinstance(rank.collective, int) and rank.collective
    ):  # a script's stack already shows its collective call
        parts.append(f"collective {rank.collective}")
    if rank.since_s is not None:
        parts.append(f"for {rank.since_s:.1f} s")
    write(f"  {'; '.join(parts)}")
    if location := output.innermost_of_user(stack):
        write(f"    at {location}")
    for line in (stack if every_frame else output.of_the_program(stack)).splitlines():
        write(f"    {line}")


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "an unknown rank"
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
