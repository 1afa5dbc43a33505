"""Views of reservations."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import Reason, View


class ReservedNode(View):
    """A node of a reservation."""

    node_id: str
    hostname: str


class NodeReservation(View):
    """A reservation, or a maintenance window, that includes a node."""

    name: str
    begins_at: datetime
    ends_at: datetime
    maintenance: bool
    users: list[str]
    """The users whose jobs can use the node in this time; in addition to the jobs of `queues` and
    of `projects`."""
    queues: list[str]
    projects: list[str]


class Reservation(View):
    """A reservation, or a maintenance window. `ReservationRequest` describes the fields that are
    not described here."""

    name: str
    state: str
    """`planned`, `active` or `ended`."""
    begins_at: datetime
    ends_at: datetime
    maintenance: bool
    users: list[str]
    queues: list[str]
    projects: list[str]
    nodes: list[str]
    node_labels: dict[str, str]
    num_nodes: int | None = None
    num_gpus: int | None = None
    all_nodes: bool
    accepts_unnamed: bool
    flex: bool
    at_begin: str
    at_end: str
    comment: str
    includes: list[ReservedNode]
    """The nodes that the reservation includes now. For a number of nodes or GPUs, the scheduler
    chooses them in its next round."""
    num_waiting: int
    """Number of waiting jobs that name the reservation."""
    num_running: int
    """Number of jobs with slots that name the reservation."""
    created_by: str
    warnings: list[Reason] = []
    """Nodes that the reservation needs but that don't exist."""


class ReservationPage(View):
    items: list[Reservation]
