"""Chooses the checkpoint to resume from, and reports the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from dray.spec import InitFrom
from dray.train.checkpoints import CheckpointRef
from dray.train.storage_faults import StorageError
from ray_workers.shared import job_log
from ray_workers.shared.frames import DataPosition, PassedOver, ResumedReport
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.checkpoint.checkpoint_files import LoadedCheckpoint, SkippedCheckpoint
from ray_workers.training.core.errors import DataError

MAX_SKIPPED = 100
MAX_WHY_CHARS = 1000
MAX_TENSORS = 3
"""Maximum number of tensors named in the error about a checkpoint of a different model."""


def choose(
    refs: Sequence[CheckpointRef],
    everywhere: Callable[[bool], bool],
    *,
    number: int = 0,
    num_ranks: int = 1,
    read: Callable[..., LoadedCheckpoint] = checkpoint_files.load,
) -> tuple[LoadedCheckpoint | None, list[SkippedCheckpoint]]:
    """Return the first of `refs` that is valid on every rank, and the skipped checkpoints before
    it. A collective operation.

    everywhere: returns whether all ranks passed True; all ranks get the same result. number,
    num_ranks: this rank's index and the number of ranks, which verify different files. read:
    see `checkpoint_files.load_each`. Raises StorageError if no checkpoint is valid and the storage
    could not be read, because starting from scratch would lose the checkpoints in this storage.
    """
    passed_over: list[SkippedCheckpoint] = []
    for found in checkpoint_files.load_each(refs, number=number, num_ranks=num_ranks, read=read):
        agreed = agree(found, everywhere)
        if isinstance(agreed, LoadedCheckpoint):
            return agreed, passed_over
        passed_over.append(agreed)
    out_of_reach = [each for each in passed_over if not each.is_reached]
    if out_of_reach:
        raise StorageError(
            f"no checkpoint can be read (step {out_of_reach[0].step}: {out_of_reach[0].why})"
        )
    return None, passed_over


def agree(
    found: LoadedCheckpoint | SkippedCheckpoint, everywhere: Callable[[bool], bool]
) -> LoadedCheckpoint | SkippedCheckpoint:
    """Return the checkpoint if it is valid on every rank. A collective operation, like
    `everywhere`."""
    is_valid = isinstance(found, LoadedCheckpoint)
    if everywhere(is_valid) or not isinstance(found, LoadedCheckpoint):
        return found
    return SkippedCheckpoint(found.saved.step, "another rank found the checkpoint to be invalid")


def damaged_origin(
    asked: InitFrom | None, damaged: SkippedCheckpoint, older: LoadedCheckpoint | None
) -> str:
    """Return the error about a checkpoint of another job that can't be loaded. older: the newest
    older checkpoint of this job that is intact."""
    of_job = f" of {asked.job}" if asked is not None else ""
    message = f"init_from: the checkpoint of step {damaged.step}{of_job} is damaged: {damaged.why}"
    if older is None:
        return f"{message}. The job has no older checkpoint that is intact"
    return (
        f"{message}. The previous intact checkpoint is from step "
        f"{older.saved.step}: to start from it, set init_from.step to {older.saved.step}"
    )


def log_passed_over(passed_over: Sequence[SkippedCheckpoint]) -> None:
    for each in passed_over:
        job_log.log(f"skipping the checkpoint of step {each.step}: {each.why}")


def refuse_other_model(what: str, loaded: LoadedCheckpoint, own: Mapping[str, Tensor]) -> None:
    """Raise DataError unless the checkpoint's weights have the same names and shapes as `own`, the
    tensors of the whole model. what: the subject of the message, which names the checkpoint."""
    found = loaded.state.get("model")
    if not isinstance(found, Mapping):
        raise DataError(
            f"{what} has no weights written by a recipe: specify a job that ran a recipe"
        )
    differing = [
        _difference(name, found.get(name), own.get(name))
        for name in dict.fromkeys((*own, *found))
        if name not in found or name not in own or found[name].shape != own[name].shape
    ]
    if not differing:
        return
    more = len(differing) - MAX_TENSORS
    others = f" (and {more} more tensors)" if more > 0 else ""
    raise DataError(
        f"{what} belongs to a different model: {', '.join(differing[:MAX_TENSORS])}{others}. Use "
        "the same model options, data columns and classes as the job that wrote the weights"
    )


def refuse_other_base(what: str, loaded: LoadedCheckpoint, own: str | None) -> None:
    """Raise DataError if the checkpoint's weights were trained on top of frozen weights that differ
    from this job's. what: see `refuse_other_model`. own: `Workload.base`."""
    known = loaded.position.get("base")
    if known != own:
        raise DataError(
            f"{what} was trained with other frozen weights: the hash of the files of model.base is "
            f"{own or 'not used'}, but was {known or 'not used'}. Restore the files, or start a "
            "new job without the checkpoint"
        )


def _difference(name: str, found: Tensor | None, own: Tensor | None) -> str:
    return f"{name} is {_shape(found)} in the checkpoint and {_shape(own)} in the model"


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return " x ".join(map(str, tensor.shape)) or "a scalar"


def receipt(
    loaded: LoadedCheckpoint | None,
    passed_over: Sequence[SkippedCheckpoint],
    *,
    step: int,
    position: Mapping[str, int] | None,
) -> ResumedReport:
    """Return the report that is written when training starts. The loss after resuming is reported
    with the metrics of the first step.

    loaded: the checkpoint from which training resumed or, if `step` is 0, from which the weights
    were loaded. position: the position from which to continue reading the data;
    None if it is not recorded.
    """
    saved = None if loaded is None else loaded.saved
    return ResumedReport(
        step=step,
        url="" if saved is None else saved.url,
        sha256=None if saved is None else saved.manifest_sha256,
        size_bytes=None if saved is None else saved.size_bytes,
        position=None if position is None else DataPosition(**position),
        world_size=None if loaded is None else loaded.position.get("world_size"),
        optimizer_restored=step > 0,
        rng=checkpoint_files.RNG,
        loss_before=None if loaded is None else loaded.loss,
        passed_over=[
            PassedOver(each.step, each.why[:MAX_WHY_CHARS]) for each in passed_over[:MAX_SKIPPED]
        ],
    )
