"""Clients of federated jobs outside of the cluster, and the rounds as these clients see them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from dray.views.base import View
from dray.views.jobs import JobState


class Invitation(View):
    """A client's token, which is only in this answer."""

    client: int
    token: str
    """Token with which the client takes part in the rounds of this job; it permits nothing else."""


class InvitationPage(View):
    """Tokens of clients that were invited together."""

    items: list[Invitation]


class FederatedClient(View):
    """A client that was invited."""

    client: int
    invited_by: str
    created_at: datetime
    joined_at: datetime | None = None
    """When the client's token was first used."""
    sent_at: datetime | None = None
    """When the client's newest update arrived."""
    num_sent: int
    """Number of updates that the client has sent. The job's log names the refused updates."""


class FederatedClientPage(View):
    """All invited clients in the order of their numbers, and the newest round."""

    items: list[FederatedClient]
    round: int | None = None
    """Number of the newest round; null before the first round."""
    is_open: bool | None = None
    closes_at: datetime | None = None
    """The deadline of the round, after which a quorum ends it."""
    quorum: int | None = None
    num_sent: int | None = None
    """Number of clients that have sent an update in the round."""
    missing: list[int] = []
    """Numbers of the clients that have not answered yet, while the round is open; with secure
    aggregation, in the present phase of the round."""


class OpenRound(View):
    """The open round of a federated job, and the clients that it waits for."""

    number: int
    awaits: str
    """Kind of the data that clients must send: `update`, or with secure aggregation their answer in
    this phase."""
    missing: list[str]
    """Silos by name, or clients outside of the cluster by number, that have not answered yet; only
    the first 100."""
    num_missing: int
    num_answered: int
    quorum: int
    closes_at: datetime | None = None
    """The deadline, after which a quorum ends the round."""


class RoundPhase(StrEnum):
    """The next task of a client."""

    OPEN = "open"
    """The client trains and sends an update."""
    WAITING = "waiting"
    """The client asks again: no round is open, or the client does not take part in the round, or
    has sent its update."""
    OVER = "over"
    """The job has ended."""


class FederatedRound(View):
    """The newest round, as one client sees it."""

    phase: RoundPhase
    client: int
    """Number of the client that sent the request."""
    job_state: JobState
    number: int | None = None
    """Number of the newest round; null before the first round."""
    name: str | None = None
    """Name of the round and of its weights, which is part of the paths of the round's requests."""
    closes_at: datetime | None = None
    """The deadline of the round."""
    quorum: int | None = None
    num_elements: int | None = None
    """Number of 32-bit numbers in an update."""
    awaits: str | None = None
    """Kind of the data that the client must send: `update`, or with secure aggregation its answer
    in this phase."""
    update_bytes: int | None = None
    """Size of an update in bytes; with secure aggregation, of a masked update."""
    part_bytes: int | None = None
    """Size of a part of an update in bytes; the last part may be smaller."""
    model_sha256: str | None = None
    model_size_bytes: int | None = None
    form_sha256: str | None = None
    form_size_bytes: int | None = None
    """Size of the form in bytes; the form is the same in all rounds of a job."""


class UpdateReceipt(View):
    """Confirms that an update arrived. The job's log and metrics show whether it counts."""

    round: int
    client: int
