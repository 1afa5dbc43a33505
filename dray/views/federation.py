"""Clients of federated jobs that are outside of the cluster, and the rounds that they see."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from dray.views.base import View
from dray.views.jobs import JobState


class Invitation(View):
    """A client's token, which no later answer has."""

    client: int
    token: str
    """It takes part in the rounds of this job, and does nothing else."""


class InvitationPage(View):
    """Tokens of clients that were invited together."""

    items: list[Invitation]


class FederatedClient(View):
    """A client that was invited."""

    client: int
    invited_by: str
    created_at: datetime
    joined_at: datetime | None = None
    """When its token was first used."""
    sent_at: datetime | None = None
    """When its newest update came."""
    num_sent: int
    """Updates that it has sent. The job's log names those that were refused."""


class FederatedClientPage(View):
    """All clients that were invited, by their numbers, and the newest round."""

    items: list[FederatedClient]
    round: int | None = None
    """Its number; None if there was none yet."""
    is_open: bool | None = None
    closes_at: datetime | None = None
    """From then on a quorum ends it."""
    quorum: int | None = None
    num_sent: int | None = None
    """Clients that have sent an update in it."""
    missing: list[int] = []
    """Clients that are asked and have not answered, while it is open; with secure aggregation in
    its phase."""


class OpenRound(View):
    """The round of a federated job that is open, and the clients for which it waits."""

    number: int
    awaits: str
    """The thing that clients are to send: `update`, or with secure aggregation their answer in this
    phase."""
    missing: list[str]
    """Names of silos, or numbers of clients outside of the cluster, that are asked and have not
    answered: the first 100."""
    num_missing: int
    num_answered: int
    quorum: int
    closes_at: datetime | None = None
    """The deadline, from which on a quorum ends it."""


class RoundPhase(StrEnum):
    """The task that a round has for a client."""

    OPEN = "open"
    """Train, and send an update."""
    WAITING = "waiting"
    """Ask again: no round is open, or the client is not asked for an update, or has sent it."""
    OVER = "over"
    """The job has ended."""


class FederatedRound(View):
    """A round, as one client is to see it."""

    phase: RoundPhase
    client: int
    """The number of the client that asks."""
    job_state: JobState
    number: int | None = None
    """Of the newest round; None if there was none yet."""
    name: str | None = None
    """It stands for the round's weights as well, and is part of the paths of its requests."""
    closes_at: datetime | None = None
    """The deadline."""
    quorum: int | None = None
    num_elements: int | None = None
    """Of an update: as many numbers of 32 bits."""
    awaits: str | None = None
    """The thing that the client is to send: `update`, or with secure aggregation its answer in this
    phase."""
    update_bytes: int | None = None
    """The size of an update; with secure aggregation of a masked one."""
    part_bytes: int | None = None
    """The size of a part of an update; the last one may be smaller."""
    model_sha256: str | None = None
    model_size_bytes: int | None = None
    form_sha256: str | None = None
    form_size_bytes: int | None = None
    """The form is the same in all rounds of a job."""


class UpdateReceipt(View):
    """An update came in. Whether it counts, the job's log and metrics tell."""

    round: int
    client: int
