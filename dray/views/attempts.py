"""Views of a job's attempts and checkpoints."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import MetricValue, Reason, View
from dray.views.jobs import Cost


class PassedOver(View):
    """A damaged checkpoint that was skipped."""

    step: int
    why: str


class Position(View):
    epoch: int
    """Number of completed epochs."""
    step_in_epoch: int
    samples: int
    """Number of samples used in the current epoch. The order of samples does not depend on the
    world size."""


class Receipt(View):
    """The state from which an attempt resumed."""

    step: int
    """Step of the checkpoint; 0 for a fresh start."""
    url: str
    """URL of the checkpoint; empty if no intact checkpoint was found."""
    sha256: str | None = None
    """Hash of the manifest. The manifest contains the hash against which each file was verified."""
    size_bytes: int | None = None
    position: Position | None = None
    """Position in the training data."""
    world_size: int | None = None
    """Number of ranks in the group that saved the checkpoint."""
    optimizer_restored: bool = False
    rng: str | None = None
    """How the state of the random number generators was restored."""
    loss_before: MetricValue | None = None
    """Training loss of the saved step; null if it was not a number."""
    loss_after: MetricValue | None = None
    """Training loss of the first step after the saved step."""
    passed_over: list[PassedOver] = []


class Attempt(View):
    attempt: int
    state: str
    world_size: int
    resume_step: int
    """Number of optimizer steps completed before the attempt; 0 for a fresh start."""
    receipt: Receipt | None = None
    """Unset for a fresh start."""
    reason: Reason | None = None
    cost: Cost | None = None
    """Cost of the attempt up to its latest report; unset if slots have no prices."""
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class AttemptPage(View):
    items: list[Attempt]


class Checkpoint(View):
    attempt: int
    step: int
    size_bytes: int
    sha256: str
    """Hash of the manifest. The manifest contains the hash of each file."""
    created_at: datetime
    is_latest: bool
    is_best: bool
    metric: MetricValue | None = None
    url: str


class CheckpointPage(View):
    items: list[Checkpoint]


class CheckpointFile(View):
    path: str
    """Path relative to the checkpoint."""
    size_bytes: int
    sha256: str


class CheckpointFilePage(View):
    items: list[CheckpointFile]
    """Files of the checkpoint. The last file is the manifest, which contains the hashes of all
    other files."""
