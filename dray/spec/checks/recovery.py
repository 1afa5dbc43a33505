"""Which groups recover in place on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.spec.training.sync import AllReduce

if TYPE_CHECKING:
    from dray.spec.job import JobSpec


def why_not_on_gpus(document: JobSpec) -> str | None:
    """Return the reason why a group that recovers in place on CPU does not do so on GPUs; None if
    the group also recovers in place on GPUs.

    On a GPU, the result of an operation that was aborted is undefined. Therefore, a group recovers
    only if no result of an operation changes a rank's state before the rank has waited for this
    result.
    """
    if document.federated is not None or not isinstance(document.sync, AllReduce | None):
        kind = "federated rounds" if document.federated is not None else "this kind of sync"
        return f"a group on GPUs with {kind} does not recover in place"
    changes_early = {
        "sync.compression": document.compression is not None,
        "parallel.balance": document.parallel.balance != "even",
        "train.measure_noise": document.train.measure_noise,
    }
    for field, is_set in changes_early.items():
        if is_set:
            return (
                f"a group on GPUs with {field} does not recover in place, because results of an "
                "interrupted step may already have changed its state"
            )
    return None


def recovers_on_gpus(document: JobSpec) -> bool:
    """Whether a group of several ranks on GPUs recovers in place. A script must also call
    `train.prepare`."""
    if document.script is not None:
        return not document.is_divided
    has_copies = document.num_replicas > 1 or document.keeps_state_in_memory
    is_alike = has_copies and not document.takes_local_steps
    return is_alike and why_not_on_gpus(document) is None
