"""Paths and file names of the media of a job."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import quote

from dray import views
from dray._http.downloads import RemoteFile, destination
from dray._http.transport import segment

_EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp", "audio/wav": "wav"}
_MAX_NAME_CHARS = 100


def path_of(job_id: str) -> str:
    return f"/v1/jobs/{segment(job_id)}/media"


def remote_file(job_id: str, record: views.MediaRecord) -> RemoteFile | None:
    """Return the file of a picture or of audio, with the path under which it is saved; None for
    other values."""
    value = record.value
    if not isinstance(value, views.Image | views.Audio):
        return None
    file = value.file
    url = f"{path_of(job_id)}/files/{segment(file.sha256)}"
    name = _name_of(record, _EXTENSIONS.get(file.media_type, "bin"))
    return RemoteFile(url, name, file.size_bytes, file.sha256)


def write(root: Path, record: views.MediaRecord) -> Path:
    """Write a value that has no file, and return the path."""
    value = record.value
    if isinstance(value, views.ReportedText):
        extension, text = "txt", value.text
    else:
        extension, text = "json", value.model_dump_json(indent=2)
    target = destination(root, _name_of(record, extension))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def _name_of(record: views.MediaRecord, extension: str) -> str:
    """Return the path of a record's file: its kind, key and step, and the rank unless it is 0."""
    key = quote(record.key, safe=" ()[]+=,@").replace(".", "%2E")
    if len(key) > _MAX_NAME_CHARS:  # the names of different keys must differ
        digest = hashlib.sha256(record.key.encode()).hexdigest()[:16]
        key = f"{key[:_MAX_NAME_CHARS]}-{digest}"
    rank = f"-rank-{record.rank}" if record.rank else ""
    return f"{record.value.kind}/{key}/step-{record.step}{rank}.{extension}"
