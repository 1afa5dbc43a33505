"""Code that nodes fetch themselves, and the field that names it or uploaded code."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    StringConstraints,
    Tag,
    model_validator,
)

from dray.spec.fields import CodeId, Document, PlainText, Sha256, wrong
from dray.spec.training.data import SourceUrl

# curl and Python must parse the same host: Python checks it, and curl connects to it.
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|[0-9a-f:.]*:[0-9a-f:.]*")


def _of_the_web(value: Any) -> Any:
    if isinstance(value, str) and re.match("https?://", value) is None:
        raise ValueError("must begin with https://")
    return value


def _repository(value: str) -> str:
    url = urlsplit(value)
    if url.query or url.fragment:
        raise ValueError("must not have a query or a fragment: a repository has none")
    if _HOST.fullmatch(url.hostname or "") is None:
        raise ValueError("must name its host in plain letters, digits, dots and hyphens")
    return value


def _whole_commit(value: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", value) is None:
        raise ValueError(
            "must be the whole hash of a commit, 40 or 64 hexadecimal digits: a branch or a tag "
            "may move, and `git rev-parse main` prints what it is now"
        )
    return value


class RemoteCode(Document):
    """Code that each node fetches itself: a commit of a git repository, or a tar archive."""

    git: Annotated[SourceUrl, BeforeValidator(_of_the_web), AfterValidator(_repository)] | None = (
        None
    )
    """`https://` address of a repository, from which `commit` is fetched. Submodules and git LFS
    files are left out."""
    commit: Annotated[PlainText, AfterValidator(_whole_commit)] | None = None
    """Whole hash of the commit, so that every attempt runs the same files."""
    url: Annotated[SourceUrl, BeforeValidator(_of_the_web)] | None = None
    """Address of a tar archive, which may be compressed by gzip, bzip2 or xz."""
    sha256: Sha256 | None = None
    """SHA-256 of the archive."""
    credentials: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] | None
    ) = None
    """Name of a file with credentials that the cluster's operator put on the nodes, as in
    `data.credentials`."""

    @property
    def address(self) -> str:
        return self.git or self.url or ""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.git is None) == (self.url is None):
            raise wrong("/script/code", "needs git and commit, or url and sha256")
        wanted, foreign = ("commit", "sha256") if self.git else ("sha256", "commit")
        if getattr(self, wanted) is None:
            raise wrong(f"/script/code/{wanted}", "is missing: it selects the files to run")
        if getattr(self, foreign) is not None:
            raise wrong(f"/script/code/{foreign}", f"does not go with {wanted}")
        return self


def _kind(value: Any) -> str:
    return "CodeId" if isinstance(value, str) else "RemoteCode"


Code = Annotated[
    Annotated[CodeId, Tag("CodeId")] | Annotated[RemoteCode, Tag("RemoteCode")],
    Discriminator(_kind),
]
