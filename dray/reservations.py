"""Request bodies of reservations."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, StringConstraints, model_validator

from dray.spec.fields import (
    Document,
    Int,
    LabelKey,
    NodeLabelValue,
    PlainText,
    QueueName,
    ReservationName,
    Seconds,
    UserName,
    wrong,
)
from dray.spec.times import Time, with_offsets

ReservedName = Annotated[PlainText, StringConstraints(min_length=1, max_length=255)]
Names = Annotated[tuple[ReservedName, ...], Field(max_length=1000)]
Users = Annotated[tuple[UserName, ...], Field(max_length=1000)]
Queues = Annotated[tuple[QueueName, ...], Field(max_length=1000)]
NodeLabels = Annotated[dict[LabelKey, NodeLabelValue], Field(max_length=16)]
Comment = Annotated[PlainText, StringConstraints(max_length=1000)]
NumReserved = Annotated[Int, Field(ge=1, le=10**6)]
AtBegin = Literal["preempt", "wait", "cancel"]
AtEnd = Literal["continue", "preempt"]


class ReservationRequest(Document):
    """Set nodes aside for jobs of some users, queues or projects, or for maintenance."""

    name: ReservationName
    begin_at: Time | None = None
    """Begin of the reservation; by default, and if the time is in the past, now."""
    end_at: Time | None = None
    """End of the reservation. Set exactly one of `end_at` and `duration_s`."""
    duration_s: Seconds | None = None
    """Time from the begin to the end: a number of seconds, or a duration such as `2h`."""
    time_zone: str | None = None
    """Name of the time zone of those times that have no offset from UTC, such as
    `Europe/Berlin`."""
    users: Users = ()
    """Users whose jobs can name the reservation."""
    queues: Queues = ()
    """Queues whose jobs can name the reservation."""
    projects: Names = ()
    """Projects whose jobs can name the reservation."""
    maintenance: StrictBool = False
    """Whether no jobs run on the nodes. Set this or at least one of `users`, `queues` and
    `projects`."""
    nodes: Names = ()
    """Hostnames or ids of nodes. A node that does not exist is included when it joins."""
    node_labels: NodeLabels = Field(default_factory=dict)
    """All nodes with these labels, including nodes that join later. With `num_nodes` or `num_gpus`,
    the labels of the nodes that can be chosen."""
    num_nodes: NumReserved | None = None
    """Number of nodes, which the scheduler chooses."""
    num_gpus: NumReserved | None = None
    """Number of GPUs. The scheduler chooses whole nodes with at least this number of GPUs."""
    all_nodes: StrictBool = False
    """All nodes, including nodes that join later."""
    accepts_unnamed: StrictBool = False
    """Whether jobs that could name the reservation can use its nodes without naming it."""
    flex: StrictBool = False
    """Whether jobs that name the reservation can also start before it begins, and on other
    nodes."""
    at_begin: AtBegin = "preempt"
    """The effect on other jobs that still run on the nodes when the reservation begins. With
    `preempt`, they return to the queue; with `cancel`, they are cancelled; with `wait`, they
    continue."""
    at_end: AtEnd = "continue"
    """Whether jobs that run in the reservation continue or are preempted when it ends."""
    comment: Comment = ""

    @model_validator(mode="before")
    @classmethod
    def _times_with_offsets(cls, document: Any) -> Any:
        return with_offsets(document)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.end_at is None) == (self.duration_s is None):
            raise ValueError("specify exactly one of end_at and duration_s")
        others = [name for name in ("users", "queues", "projects") if getattr(self, name)]
        if self.maintenance == bool(others):
            raise ValueError(
                "specify either maintenance: true or some of users, queues and projects"
            )
        has_number = self.num_nodes is not None or self.num_gpus is not None
        by = (
            bool(self.nodes),
            self.num_nodes is not None,
            self.num_gpus is not None,
            self.all_nodes,
            bool(self.node_labels) and not has_number,
        )
        if sum(by) != 1:
            raise ValueError(
                "specify exactly one of nodes, node_labels, num_nodes, num_gpus and all_nodes; "
                "only node_labels can be combined with num_nodes or num_gpus"
            )
        for name in ("accepts_unnamed", "flex"):
            if self.maintenance and getattr(self, name):
                raise wrong(f"/{name}", "can't be combined with maintenance")
        if self.maintenance and self.at_end != "continue":
            raise wrong(
                "/at_end",
                "can't be combined with maintenance: no jobs run in a reservation for maintenance",
            )
        return self


class ReservationChangeRequest(Document):
    """Change a reservation, as a JSON merge patch (RFC 7396): null restores a field's default.
    Omitted fields remain unchanged. `ReservationRequest` describes the fields."""

    begin_at: Time | None = None
    end_at: Time | None = None
    duration_s: Seconds | None = None
    time_zone: str | None = None
    users: Users | None = None
    queues: Queues | None = None
    projects: Names | None = None
    maintenance: StrictBool | None = None
    nodes: Names | None = None
    node_labels: NodeLabels | None = None
    num_nodes: NumReserved | None = None
    num_gpus: NumReserved | None = None
    all_nodes: StrictBool | None = None
    accepts_unnamed: StrictBool | None = None
    flex: StrictBool | None = None
    at_begin: AtBegin | None = None
    at_end: AtEnd | None = None
    comment: Comment | None = None

    @model_validator(mode="before")
    @classmethod
    def _times_with_offsets(cls, document: Any) -> Any:
        return with_offsets(document)
