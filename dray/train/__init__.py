"""The interface between training scripts and dray::

    from dray import train

    checkpoint = train.load_checkpoint()            # None in the first attempt
    train.report(step, {"train/loss": loss.item()}, total_steps=1000)
    train.report(step, image={"sample": picture}, histogram={"weights": model.head.weight})
    train.save_checkpoint("state", step)            # on one rank; "state" is a folder
    train.save_artifact("model.safetensors")

The same script also runs without dray. In this case, `report` does nothing, `save_artifact` and
`save_checkpoint` leave files in place, and there is no checkpoint to load.
"""

from __future__ import annotations

from dray.train.checkpoints import Checkpoint, SavedCheckpoint
from dray.train.preparing import (
    TrainingProgress,
    checkpoint,
    epochs,
    init,
    no_sync,
    prepare,
    progress,
    track,
)
from dray.train.preparing import drive as drive
from dray.train.preparing import finish as finish
from dray.train.preparing import is_prepared as is_prepared
from dray.train.reporting import MAX_KEYS as MAX_KEYS
from dray.train.reporting import (
    Context,
    SavedArtifact,
    context,
    load_checkpoint,
    save_artifact,
    save_checkpoint,
)
from dray.train.reporting import Observer as Observer
from dray.train.reporting import append as append
from dray.train.reporting import emit as emit
from dray.train.reporting import known as known
from dray.train.reporting import observe as observe
from dray.train.reporting import store_artifact as store_artifact
from dray.train.reporting import wait_until_written as wait_until_written
from dray.train.reports import report
from dray.train.storage_faults import StorageError

__all__ = [
    "Checkpoint",
    "Context",
    "SavedArtifact",
    "SavedCheckpoint",
    "StorageError",
    "TrainingProgress",
    "checkpoint",
    "context",
    "epochs",
    "init",
    "load_checkpoint",
    "no_sync",
    "prepare",
    "progress",
    "report",
    "save_artifact",
    "save_checkpoint",
    "track",
]
