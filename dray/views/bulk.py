"""Views of actions on many jobs."""

from __future__ import annotations

from dray.views.base import View


class BulkProblem(View):
    """Jobs that an action could not change, for the same reason."""

    code: str
    """The code of the problem that the same action on a single job returns."""
    count: int
    """Number of jobs."""
    message: str
    """The message for the first of these jobs."""
    jobs: list[str]
    """Ids of the first of these jobs."""


class BulkChange(View):
    """The result of an action on all jobs that a filter selects."""

    dry_run: bool
    """Whether nothing was changed, because the request was a dry run."""
    matched: int
    """Number of jobs that the filter selects, including jobs of other users."""
    other_owners: int
    """Number of jobs of other users, which were left unchanged."""
    changed: int
    """Number of jobs that were changed."""
    unchanged: int
    """Number of jobs that already were as requested."""
    refused: int
    """Number of jobs that could not be changed. `problems` has the reasons."""
    problems: list[BulkProblem]
    jobs: list[str]
    """Ids of the first jobs that were changed, newest first."""
