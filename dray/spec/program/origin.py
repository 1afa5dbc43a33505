"""The part of a job document that records where the document and its code come from."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, StrictBool, StringConstraints

from dray.spec.fields import Document, JobId, PlainText


def whole_commit(value: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", value) is None:
        raise ValueError(
            "must be the full hash of a commit, 40 or 64 hexadecimal digits, because branches and "
            "tags can move; `git rev-parse main` prints the current hash of main"
        )
    return value


Commit = Annotated[PlainText, AfterValidator(whole_commit)]


class GitState(Document):
    """The commit of the Git work tree from which the code was uploaded."""

    commit: Commit
    """Full hash of the commit."""
    dirty: StrictBool = False
    """Whether the uploaded folder had changes or files that were not committed."""
    branch: Annotated[PlainText, StringConstraints(min_length=1, max_length=255)] | None = None
    """Name of the branch; unset if no branch was checked out."""


class DocumentOrigin(Document):
    """Where the document and its code come from. Does not affect the training."""

    git: GitState | None = None
    """Set by `dray submit` and the SDK when they upload code from a Git work tree."""
    job: JobId | None = None
    """The job whose document was edited and resubmitted. Set by *Edit and resubmit* on the web page
    and by `dray submit --like`."""
