"""Pure rules for drills, which are faults that users inject: when a drill is possible, and which
states it passes through."""

from __future__ import annotations

from dataclasses import dataclass

from dray.views import DrillKind, DrillState

_ORDER = {
    DrillState.WAITING: 0,
    DrillState.STRUCK: 1,
    DrillState.PASSED: 2,
    DrillState.FAILED: 2,
}


def is_news(state: DrillState, reported: DrillState) -> bool:
    """Whether the reported state advances the drill. A drill never returns to an earlier state, and
    `PASSED` and `FAILED` are final."""
    return _ORDER[reported] > _ORDER[state]


@dataclass(frozen=True)
class Running:
    """The facts about a running job that determine whether a drill makes sense."""

    world_size: int
    step: int
    """Number of completed optimizer steps, as far as is known."""
    total_steps: int | None
    has_steps: bool
    """Whether the ranks report steps, as ranks of recipes and of some scripts do."""
    compares_replicas: bool = False
    """Whether the document sets `check.replicas_every`, and the job has at least two ranks now."""
    why_not_in_place: str | None = None
    """The reason why the job's group does not recover in place; None if it does."""


def ends_attempt(kind: DrillKind, job: Running) -> bool:
    """Whether the drill should end the attempt, so that the next attempt resumes the job."""
    return kind in (DrillKind.PREEMPT, DrillKind.CORRUPT) or job.why_not_in_place is not None


@dataclass(frozen=True)
class Refusal:
    """The reason why a drill makes no sense."""

    pointer: str
    message: str
    hint: str | None = None


def refusal(kind: DrillKind, rank: int, at_step: int | None, job: Running) -> Refusal | None:
    """Return the reason why the drill makes no sense; None if it can be tried."""
    if kind is DrillKind.PREEMPT and rank != 0:
        return Refusal("/rank", "a preemption affects the whole job: omit the rank")
    if rank >= job.world_size:
        ranks = "only rank 0" if job.world_size == 1 else f"ranks 0 to {job.world_size - 1}"
        return Refusal("/rank", f"there is no rank {rank}: the job has {ranks}")
    if kind is DrillKind.CORRUPT and not job.compares_replicas:
        return Refusal(
            "/kind",
            "the job does not compare its replicas, so the flipped bit would stay in the model",
            hint="start the job with `check: {replicas_every: N}`",
        )
    if at_step is None:
        return None
    if not job.has_steps:
        return Refusal(
            "/at_step",
            "the script has not reported a step yet, so it might not report steps at all",
            hint="omit at_step to inject the fault immediately, or try again after the script's "
            "first report",
        )
    if at_step <= job.step:
        return Refusal(
            "/at_step",
            f"the job has already completed {job.step} steps",
            hint="omit at_step to inject the fault immediately, or choose a later step",
        )
    if job.total_steps is not None and at_step >= job.total_steps:
        return Refusal(
            "/at_step", f"the job ends after step {job.total_steps}: choose an earlier step"
        )
    return None


def outcome_sentence(recovery_s: float | None, steps_lost: int | None) -> str:
    """Return a string such as `recovered in 0.41 s, 0 steps lost`, without unknown values."""
    how_long = "recovered" if recovery_s is None else f"recovered in {recovery_s:.2f} s"
    if steps_lost is None:
        return how_long
    return f"{how_long}, {steps_lost} step{'' if steps_lost == 1 else 's'} lost"
