"""Whether a group that lost ranks is mended in place: pure, without ray or torch.

The survivors hold the whole state of a replicated model, so a rank that was killed is replaced and
nobody repeats a step. A rank that failed by its own error is not: its replacement would fail alike.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from dray.spec import JobSpec
from ray_workers.contracts import AttemptSpec, Cause, Frame
from ray_workers.verdict import RankExit

MOST_WITHOUT_A_STEP = 3
"""How often a group is mended in a row without a step in between: then it is not bad luck."""


def why_never(*, is_script: bool, num_workers: int, has_gpus: bool) -> str | None:
    """Why a job of this kind is never mended in place; None if it is.

    On GPUs, NCCL's operations end behind the program's back, and an optimizer step that was
    launched upon a gradient that never came cannot be told from a good one.
    """
    if is_script:
        return "a script is not mended in place, because only it knows its state"
    if num_workers == 1:
        return "a single rank is not mended in place, because nobody else holds its state"
    if has_gpus:
        return "a group on GPUs is not mended in place, because its state may be half a step on"
    return None


def is_mendable(spec: AttemptSpec) -> bool:
    """Whether a job of this kind is mended in place at all."""
    document = JobSpec.model_validate(spec.spec)
    is_script = document.script is not None
    has_gpus = bool(spec.bundle.get("GPU"))
    num_workers = spec.world_size if spec.min_workers is None else document.resources.num_workers
    why_not = why_never(is_script=is_script, num_workers=num_workers, has_gpus=has_gpus)
    return why_not is None


def refused(
    lost: Sequence[RankExit],
    errors: Mapping[int, Frame],
    *,
    num_survivors: int,
    without_a_step: int,
) -> str | None:
    """Why ranks that ended are not replaced; None if they are.

    lost: how they ended, none of them well. errors: the last words of those that had any.
    without_a_step: how often the group was mended since it last took a step.
    """
    if num_survivors == 0:
        return "nobody is left who holds the state"
    if without_a_step >= MOST_WITHOUT_A_STEP:
        return f"it was mended {without_a_step} times in a row without a step in between"
    for rank in lost:
        frame = errors.get(rank.rank)
        if frame is not None and Cause(frame.body["cause"]) is not Cause.WORKER_LOST:
            return f"rank {rank.rank} ended by an error of its own"
        if frame is None and rank.exit_code is not None and rank.exit_code > 0:
            return f"rank {rank.rank} exited with code {rank.exit_code}"
    return None


def how(lost: RankExit) -> str:
    """The end of a rank in a few words."""
    if lost.exit_code is None:
        return f"the worker of rank {lost.rank} vanished"
    if lost.exit_code >= 0:
        return f"rank {lost.rank} lost the others"
    try:
        name = signal.Signals(-lost.exit_code).name
    except ValueError:
        name = f"signal {-lost.exit_code}"
    return f"rank {lost.rank} was killed by {name}"
