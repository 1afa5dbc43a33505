"""Files of a download: selection, paths, and verification of hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from dray import errors, views
from dray._http.transport import Call, segment

OnProgress = Callable[[str, int, int], None]
"""Called with a file's path, the number of bytes downloaded, and the file's size."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to download."""

    url_path: str
    path: str
    """Path relative to the destination folder."""
    size_bytes: int
    sha256: str


def artifact_files(
    job_id: str, items: Iterable[views.Artifact], wanted: str | None
) -> list[RemoteFile]:
    """Return all artifacts, or only the artifact with the id or path `wanted`. Raises
    ArtifactNotFound if there is no such artifact."""
    base = f"/v1/jobs/{segment(job_id)}/artifacts"
    return [
        RemoteFile(f"{base}/{segment(item.id)}", item.path, item.size_bytes, item.sha256)
        for item in _choose(items, job_id, wanted)
    ]


def checkpoint_files(
    job_id: str, step: int, items: Iterable[views.CheckpointFile]
) -> list[RemoteFile]:
    base = f"/v1/jobs/{segment(job_id)}/checkpoints/{step}/files"
    return [
        RemoteFile(f"{base}/{quote(item.path)}", item.path, item.size_bytes, item.sha256)
        for item in items
    ]


def _choose(
    items: Iterable[views.Artifact], job_id: str, wanted: str | None
) -> list[views.Artifact]:
    """Return the requested artifacts. If several artifacts have the same path, return only the
    newest one."""
    newest: dict[str, views.Artifact] = {}
    for item in sorted(items, key=lambda item: item.created_at):
        if item.id == wanted:
            return [item]
        newest[item.path] = item
    if wanted is None:
        return list(newest.values())
    if wanted in newest:
        return [newest[wanted]]
    raise errors.ArtifactNotFound(
        views.Problem(
            type="about:blank",
            title="Not Found",
            status=404,
            code=errors.ArtifactNotFound.code,
            detail=f"job {job_id} has no artifact {wanted!r}",
            hint=f"its artifacts are {', '.join(newest)}"
            if newest
            else "the job has no artifacts yet",
        )
    )


def range_call(file: RemoteFile, offset: int) -> Call:
    headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
    if offset:
        headers |= {"Range": f"bytes={offset}-", "If-Range": f'"{file.sha256}"'}
    return Call("GET", file.url_path, (), headers, streamed=True)


def destination(root: Path, name: str) -> Path:
    """Return the path of the file `name` under `root`. Raises IntegrityError if the path is outside
    `root`."""
    parts = PurePosixPath(name)
    target = root.joinpath(*parts.parts)
    unsafe = parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name
    if unsafe or not parts.parts or not target.resolve().is_relative_to(root.resolve()):
        raise errors.IntegrityError(
            f"the path {name!r} is outside {root}, so the file was not downloaded"
        )
    return target


def matches(path: Path, file: RemoteFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def begin(part: Path, size_bytes: int) -> int:
    """Create the part file. Returns the number of bytes that an earlier download has already
    written."""
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.is_symlink():
        part.unlink()
    with part.open("ab") as opened:
        if opened.tell() > size_bytes:
            opened.truncate(0)
        return opened.seek(0, 2)


def write_at(part: Path, offset: int, content: bytes) -> None:
    with part.open("r+b") as opened:
        opened.seek(offset)
        opened.truncate()
        opened.write(content)


def write_whole(path: Path, content: bytes) -> int:
    """Write a file, or replace it. Returns its size in bytes."""
    part = path.with_name(f".{path.name[:40]}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return len(content)


def finish(part: Path, target: Path, file: RemoteFile) -> None:
    if not matches(part, file):
        part.unlink()
        raise errors.IntegrityError(
            f"the download of {file.path} has the wrong size or SHA-256 digest (expected "
            f"{file.sha256}) and has been deleted: download it again"
        )
    part.replace(target)
