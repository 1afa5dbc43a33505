"""Uploading a folder's code, and getting a job's code back."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path

from dray import views
from dray._http.calls import Calls
from dray._http.downloads import destination
from dray._http.transport import Call, Flow, Run, segment
from dray.code.packing import PackedCode
from dray.errors import IntegrityError

BATCH_BYTES = 8 << 20
"""Of parts that are sent in one request; the server takes twice as much."""
BATCH_PARTS = 2000
MAX_ROUNDS = 3
"""How often parts are sent that are said to be missing: they were deleted meanwhile, or lost."""

OnUpload = Callable[[int, int], None]
"""Called with how many of the bytes to send are sent, and how many there are."""


def upload(calls: Calls, packed: PackedCode, on_progress: OnUpload | None) -> Flow[views.Code]:
    """Send what the server does not have of these files; the code as it is there."""
    files = [
        {
            "path": file.path,
            "size_bytes": file.size_bytes,
            "is_executable": file.is_executable,
            "parts": list(file.parts),
        }
        for file in packed.files
    ]
    content = json.dumps({"files": files}, separators=(",", ":")).encode()
    describe = Call("POST", "/v1/code", (), {"Content-Type": "application/json"}, content)
    code = yield from calls.read(views.Code, describe, patient=True)
    for _ in range(MAX_ROUNDS):
        if code.is_complete:
            break
        sent, total = 0, sum(packed.size_of(part) for part in code.missing)
        for batch in _batches(packed, code.missing):
            body, size = yield Run(lambda batch=batch: _as_tar(packed, batch))  # type: ignore[misc]
            headers = {"Content-Type": "application/x-tar"}
            call = Call("POST", "/v1/code/parts", (), headers, body)
            yield from calls.send(call, patient=True)
            sent += size
            if on_progress is not None:
                on_progress(sent, total)
        code = yield from calls.read(views.Code, describe, patient=True)
    if not code.is_complete:
        raise IntegrityError("the server does not keep the parts of the code that it was sent")
    return code


def _batches(packed: PackedCode, parts: Sequence[str]) -> Iterator[list[str]]:
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


def _as_tar(packed: PackedCode, parts: Sequence[str]) -> tuple[bytes, int]:
    """These parts as the members of an archive, and how many bytes they have."""
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


def files_of(calls: Calls, job_id: str) -> Flow[list[views.CodeFile]]:
    call = Call("GET", f"/v1/jobs/{segment(job_id)}/code")
    return (yield from calls.read(views.CodeFilePage, call)).items


def download(calls: Calls, job_id: str, dest: str | PathLike[str]) -> Flow[list[Path]]:
    """Write the job's code below the folder `dest`; the files' paths."""
    call = Call("GET", f"/v1/jobs/{segment(job_id)}/code/archive")
    response = yield from calls.send(call, patient=True)
    written: list[Path] = yield Run(lambda: _unpack(response.content, Path(dest)))
    return written


def _unpack(content: bytes, dest: Path) -> list[Path]:
    written = []
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            path = destination(dest, member.name)
            packed = archive.extractfile(member)
            assert packed is not None, "dray's archives have regular files alone"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed.read())
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
            written.append(path)
    return written
