"""The request body of a saved view."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from dray.filters import GroupedBy, JobTable
from dray.spec.fields import Document, PlainText


class SavedQuery(JobTable):
    """A list of jobs: its filter, order, columns and groups, as in `GET /v1/jobs` and
    `GET /v1/job-groups`."""

    group: GroupedBy | None = None


class SavedViewRequest(Document):
    """Store a list of jobs under a name."""

    query: SavedQuery
    project: Annotated[PlainText, StringConstraints(min_length=1, max_length=255)] | None = None
    """The project that the view is for; unset if the view is only for its owner."""
