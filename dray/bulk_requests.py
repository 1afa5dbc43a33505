"""The request body of an action on many jobs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from dray.filters import JobFilter
from dray.requests import MAX_GRACE_S, MAX_TAGS, JobChangeRequest, Priority, Tag
from dray.spec.fields import Document, Int, Number, QueueName, wrong


class BulkAction(StrEnum):
    """An action on all jobs that a filter selects."""

    CANCEL = "cancel"
    DELETE = "delete"
    HOLD = "hold"
    RELEASE = "release"
    MOVE = "move"
    PRIORITY = "priority"
    PREEMPT = "preempt"
    TAG = "tag"


class BulkParameters(Document):
    """The parameters of an action on many jobs. Each belongs to one action."""

    queue: QueueName | None = None
    """For `move`: move the waiting jobs to this queue."""
    first: Literal[True] | None = None
    """For `move`: move the waiting jobs ahead of all others of their priority; only for admins."""
    priority: Priority | None = None
    """For `priority`: the new priority."""
    grace_s: Annotated[Number, Field(ge=0.0, le=MAX_GRACE_S)] | None = None
    """For `preempt`: a job that still holds its slots after this many seconds is killed."""
    held: Literal[True] | None = None
    """For `preempt`: hold the jobs once they wait again."""
    add_tags: Annotated[tuple[Tag, ...], Field(max_length=MAX_TAGS)] = ()
    """For `tag`."""
    remove_tags: Annotated[tuple[Tag, ...], Field(max_length=MAX_TAGS)] = ()
    """For `tag`."""


_PARAMETERS: Mapping[BulkAction, tuple[str, ...]] = {
    BulkAction.MOVE: ("queue", "first"),
    BulkAction.PRIORITY: ("priority",),
    BulkAction.TAG: ("add_tags", "remove_tags"),
}
"""The parameters of an action; at least one is required."""


class BulkRequest(Document):
    """Apply an action to all jobs of the caller that a filter selects."""

    action: BulkAction
    filter: JobFilter = Field(default_factory=JobFilter)
    """The jobs, as in `GET /v1/jobs`. Jobs of other users are left unchanged, unless `owner` names
    their owner."""
    parameters: BulkParameters = Field(default_factory=BulkParameters)
    dry_run: StrictBool = False
    """Only report what would happen, without changing any job."""
    max: Annotated[Int, Field(ge=0, le=10**9)] | None = None
    """Change nothing if more jobs are selected. Required if the filter excludes no job, apart
    from its states and owner."""

    @model_validator(mode="after")
    def _parameters_fit(self) -> Self:
        given = {name for name, value in self.parameters if value not in (None, ())}
        own = _PARAMETERS.get(self.action, ())
        also = ("grace_s", "held") if self.action is BulkAction.PREEMPT else ()
        if own and not given & set(own):
            needed = f"the action {self.action} needs {' or '.join(own)}"
            raise wrong("/parameters", needed)
        for name in sorted(given - {*own, *also}):
            raise wrong(f"/parameters/{name}", f"does not belong to the action {self.action}")
        if self.filter.collapse_arrays:
            message = "selects only one job of each array; change arrays with PATCH /v1/arrays/ID"
            raise wrong("/filter/collapse_arrays", message)
        return self

    @property
    def job_change(self) -> JobChangeRequest | None:
        """The change that the action makes to each job; only for actions that change the jobs'
        positions."""
        match self.action:
            case BulkAction.HOLD:
                return JobChangeRequest(held=True)
            case BulkAction.RELEASE:
                return JobChangeRequest(held=False)
            case BulkAction.MOVE:
                return JobChangeRequest(queue=self.parameters.queue, first=self.parameters.first)
            case BulkAction.PRIORITY:
                return JobChangeRequest(priority=self.parameters.priority)
            case _:
                return None
