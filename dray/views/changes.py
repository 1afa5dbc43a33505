"""Views of the changes between two jobs, and of the lineage of a job."""

from __future__ import annotations

from typing import Literal

from dray.views.base import View
from dray.views.jobs import JobState
from dray.views.tracking import ComparedJob, FieldDifference


class FileDiff(View):
    """A file that differs between the code of two jobs."""

    path: str
    change: Literal["added", "removed", "changed"]
    old_bytes: int | None
    """Size in the first job's code; null if the file was added."""
    new_bytes: int | None
    is_executable: list[bool]
    """Whether the file is executable in each of the two codes that has it."""
    num_added: int | None = None
    """Number of lines that only the second version has; null if the lines were not compared."""
    num_removed: int | None = None
    text: str | None = None
    """The changed lines in the format of `diff -u`, without the names of the files; null if they
    are left out."""
    left_out: Literal["binary", "large", "limit"] | None = None
    """Why `text` is null: a binary file, a file that is too large, or a response that would be too
    large."""


class CodeDiff(View):
    """The difference between the uploaded code of two jobs."""

    ids: list[str | None]
    """Id of each job's code; null if no code is stored."""
    notes: list[str]
    """Why the code of a job can't be compared."""
    num_files: int
    """Number of files that differ."""
    files: list[FileDiff]
    """The first 1,000 of these files, sorted by path."""


class CodeCommit(View):
    """The commit of a job's code."""

    commit: str
    dirty: bool
    """Whether the uploaded folder had changes or files that were not committed."""
    branch: str | None


class DataVersion(View):
    """The data of a job, as in its document."""

    sources: list[str]
    sha256: str | None
    """The digest that the document requires; null if it requires none."""


class PackageDifference(View):
    name: str
    versions: list[str | None]
    """Version in each job; null if the job does not have the package."""


class PackageDiff(View):
    """The difference between the packages of two jobs' ranks."""

    is_known: list[bool]
    """Whether the packages of each job are known."""
    differences: list[PackageDifference]
    """Empty unless the packages of both jobs are known."""


class JobDiff(View):
    """The changes from one job to another. Each list of two items has an item for each job."""

    jobs: list[ComparedJob]
    document: list[FieldDifference]
    """The fields in which the documents differ, except for `origin`."""
    git: list[CodeCommit | None]
    """Null if the commit is unknown."""
    data: list[DataVersion | None]
    packages: PackageDiff
    code: CodeDiff


class LineageJob(View):
    """A job in a lineage."""

    id: str
    name: str | None
    """Null, like `state`, if the job was deleted."""
    variant: str | None = None
    state: JobState | None
    owner: str | None = None
    attempts: int = 0
    """Number of attempts."""


class LineageLink(View):
    """A job or model that came from another one."""

    parent: str
    """Id of a job, or `model://NAME@VERSION`."""
    child: str
    kind: Literal["init_from", "edited", "registered"]
    """init_from: the child starts from the parent's weights. edited: the child's document is an
    edited copy of the parent's. registered: the child is a version of a model whose files are the
    parent's."""
    step: int | None = None
    """Step of the checkpoint; null for a result, and for `edited`."""
    model: str | None = None
    """The version of a model that the child's document names, if `kind` is init_from."""


class Lineage(View):
    """The jobs from which a job was made, and the jobs and models that were made from it."""

    job_id: str
    array_id: str | None
    """Id of the job's array or sweep."""
    is_sweep: bool
    jobs: list[LineageJob]
    links: list[LineageLink]
    is_complete: bool
    """False if there are more than 200 jobs, of which only the nearest are returned."""
