"""The type of `script.code`: uploaded code, or remote code that nodes fetch themselves."""

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

from dray.spec.fields import CodeId, Document, Sha256, wrong
from dray.spec.program.origin import Commit
from dray.spec.training.data import SourceUrl

# Python checks the host and curl connects to it, so both must extract the same host from the URL.
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|[0-9a-f:.]*:[0-9a-f:.]*")


def _of_the_web(value: Any) -> Any:
    if isinstance(value, str) and re.match("https?://", value) is None:
        raise ValueError("must start with https://")
    return value


def _repository(value: str) -> str:
    url = urlsplit(value)
    if url.query or url.fragment:
        raise ValueError("must not have a query or a fragment")
    if _HOST.fullmatch(url.hostname or "") is None:
        raise ValueError("must have a host name of ASCII letters, digits, dots and hyphens")
    return value


class RemoteCode(Document):
    """Code that each node fetches itself: a commit of a Git repository, or a tar archive."""

    git: Annotated[SourceUrl, BeforeValidator(_of_the_web), AfterValidator(_repository)] | None = (
        None
    )
    """`https://` URL of the repository from which `commit` is fetched. Submodules and Git LFS files
    are not fetched."""
    commit: Commit | None = None
    """Full hash of the commit, so that every attempt runs the same files."""
    url: Annotated[SourceUrl, BeforeValidator(_of_the_web)] | None = None
    """URL of a tar archive, optionally compressed with gzip, bzip2 or xz."""
    sha256: Sha256 | None = None
    """SHA-256 of the archive."""
    credentials: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] | None
    ) = None
    """Name of a file with credentials that the cluster's operator has put on the nodes, as for
    `data.credentials`."""

    @property
    def address(self) -> str:
        return self.git or self.url or ""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.git is None) == (self.url is None):
            raise wrong("/script/code", "requires either git and commit, or url and sha256")
        wanted, foreign = ("commit", "sha256") if self.git else ("sha256", "commit")
        if getattr(self, wanted) is None:
            raise wrong(f"/script/code/{wanted}", "is missing: it identifies the files to run")
        if getattr(self, foreign) is not None:
            raise wrong(f"/script/code/{foreign}", f"can't be combined with {wanted}")
        return self


def _kind(value: Any) -> str:
    return "CodeId" if isinstance(value, str) else "RemoteCode"


Code = Annotated[
    Annotated[CodeId, Tag("CodeId")] | Annotated[RemoteCode, Tag("RemoteCode")],
    Discriminator(_kind),
]
