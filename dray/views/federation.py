"""Views of federated clients outside the cluster, and of rounds as these clients see them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from dray.views.base import View
from dray.views.jobs import JobState


class Invitation(View):
    """A client's token, which is shown only in this response."""

    client: int
    token: str
    """Token that allows the client to take part in the rounds of this job, and nothing else."""


class InvitationPage(View):
    """Tokens of clients that were invited by the same request."""

    items: list[Invitation]


class FederatedClient(View):
    """An invited client."""

    client: int
    invited_by: str
    created_at: datetime
    joined_at: datetime | None = None
    """When the client's token was first used."""
    sent_at: datetime | None = None
    """When the client's latest update arrived."""
    num_sent: int
    """Number of updates that the client has sent. Refused updates are recorded in the job's log."""


class FederatedClientPage(View):
    """All invited clients, sorted by number, and the latest round."""

    items: list[FederatedClient]
    round: int | None = None
    """Number of the latest round; null before the first round."""
    is_open: bool | None = None
    closes_at: datetime | None = None
    """The deadline of the round. After the deadline, the round ends as soon as it has a quorum."""
    quorum: int | None = None
    num_sent: int | None = None
    """Number of clients that have sent an update in the round."""
    missing: list[int] = []
    """While the round is open, the numbers of the clients that have not responded yet (with secure
    aggregation, in the current phase of the round)."""


class OpenRound(View):
    """The open round of a federated job, and the clients it is waiting for."""

    number: int
    awaits: str
    """The data that clients must send: `update` or, with secure aggregation, the name of the
    response that is expected in this phase."""
    missing: list[str]
    """Names of silos, or numbers of clients outside the cluster, that have not responded yet; at
    most the first 100."""
    num_missing: int
    num_answered: int
    quorum: int
    closes_at: datetime | None = None
    """The deadline of the round. After the deadline, the round ends as soon as it has a quorum."""


class RoundPhase(StrEnum):
    """The next task of a client."""

    OPEN = "open"
    """Train and send an update."""
    WAITING = "waiting"
    """Ask again later: no round is open, the client is not part of the round, or the client has
    already sent its update."""
    OVER = "over"
    """The job has ended."""


class FederatedRound(View):
    """The latest round, as one client sees it."""

    phase: RoundPhase
    client: int
    """Number of the client that sent the request."""
    job_state: JobState
    number: int | None = None
    """Number of the latest round; null before the first round."""
    name: str | None = None
    """Name of the round and its weights, used in the paths of the round's requests."""
    closes_at: datetime | None = None
    """The deadline of the round."""
    quorum: int | None = None
    num_elements: int | None = None
    """Number of 32-bit values in an update."""
    awaits: str | None = None
    """The data that the client must send: `update` or, with secure aggregation, the name of the
    response that is expected in this phase."""
    update_bytes: int | None = None
    """Size of an update in bytes (with secure aggregation, of a masked update)."""
    part_bytes: int | None = None
    """Size of each part of an update in bytes; the last part can be smaller."""
    model_sha256: str | None = None
    model_size_bytes: int | None = None
    form_sha256: str | None = None
    form_size_bytes: int | None = None
    """Size of the form in bytes. The form is the same in all rounds of a job."""


class UpdateReceipt(View):
    """Confirmation that an update arrived. The job's log and metrics show whether the update was
    used."""

    round: int
    client: int
