"""Archives for uploading and downloading code."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dray._http.downloads import destination
from dray._http.transport import Call
from dray.code.packing import PackedCode

BATCH_BYTES = 8 << 20
"""Maximum size of the parts in one request. The server accepts twice this size."""
BATCH_PARTS = 2000
OnUpload = Callable[[int, int], None]
"""Called with (bytes sent, bytes to send)."""


def described(packed: PackedCode) -> Call:
    """Return the call that describes the files to the server. The response lists the missing
    parts."""
    files = [
        {
            "path": file.path,
            "size_bytes": file.size_bytes,
            "is_executable": file.is_executable,
            "parts": list(file.parts),
        }
        for file in packed.files
    ]
    return Call.with_json("POST", "/v1/code", {"files": files})


def batches(packed: PackedCode, parts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for part in parts:
        size += packed.size_of(part)
        if batch and (size > BATCH_BYTES or len(batch) >= BATCH_PARTS):
            yield batch
            batch, size = [], packed.size_of(part)
        batch.append(part)
    if batch:
        yield batch


def as_tar(packed: PackedCode, parts: Sequence[str]) -> tuple[bytes, int]:
    """Return an archive with the given parts as members, and the size of the parts in bytes."""
    archive, size = io.BytesIO(), 0
    for part in parts:
        data = packed.read(part)
        member = tarfile.TarInfo(part)
        member.size = len(data)
        archive.write(member.tobuf(tarfile.USTAR_FORMAT))
        archive.write(data)
        archive.write(bytes(-len(data) % tarfile.BLOCKSIZE))
        size += len(data)
    archive.write(bytes(2 * tarfile.BLOCKSIZE))
    return archive.getvalue(), size


def unpack(content: bytes, dest: Path) -> list[Path]:
    written = []
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            path = destination(dest, member.name)
            packed = archive.extractfile(member)
            assert packed is not None, "dray's archives contain only regular files"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed.read())
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
            written.append(path)
    return written
