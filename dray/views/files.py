"""Files of a job: its artifacts, the code that it brought, and links to download them."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import View


class Artifact(View):
    id: str
    path: str
    size_bytes: int
    sha256: str
    created_at: datetime


class ArtifactPage(View):
    items: list[Artifact]


class Code(View):
    """Uploaded code, or what of an upload is still to be sent."""

    id: str
    """`code-` and a hash of all its files: the same files have the same id."""
    num_files: int
    size_bytes: int
    is_complete: bool
    """Whether every part is there, so that a job may name it."""
    missing: list[str] = []
    """The SHA-256 of each part that is still to be sent."""


class CodeFile(View):
    path: str
    size_bytes: int
    is_executable: bool


class CodeFilePage(View):
    id: str
    items: list[CodeFile]


class DownloadLink(View):
    """A link that downloads one file of a job, once, without a token."""

    url: str
    """Its path on this server; anybody who has it can get the file."""
    expires_at: datetime
    """When the download must have begun."""
