"""Unpack compressed files and archives into a folder, without trusting their headers."""

from __future__ import annotations

import gzip
import re
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, Self

from ray_workers.datasets.core.errors import Budget, broken, reading, shortened
from ray_workers.datasets.core.types import is_data
from ray_workers.datasets.formats.prepared import Workshop
from ray_workers.datasets.sources.source import SourceFile

PIECE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_PACKINGS = {
    "bzip2": re.compile(rb"BZh[1-9]1AY&SY"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "Zstandard": re.compile(rb"\x28\xb5\x2f\xfd"),
    "zip": re.compile(rb"PK\x03\x04"),
}
"""First bytes of files in unsupported compression formats."""
EXTENSION_BYTES = 1 << 20
"""Maximum size of a tar archive's extended header, because the entire header is read into
memory."""
_READ_WHOLE = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


def plain_file(shop: Workshop) -> tuple[Path, str]:
    """Return (path, location for errors) of the source's only file, decompressed if it is gzip."""
    (file,) = shop.files
    return gunzipped(file, shop.scratch / "plain", shop.budget), file.location


def gunzipped(file: SourceFile, target: Path, budget: Budget) -> Path:
    """Return the file itself or, if it is a gzip file, `target` with the decompressed content.
    Raises DataError."""
    with open(file.path, "rb") as source:
        begins = source.read(10)
    for packing, pattern in _PACKINGS.items():
        if pattern.match(begins):
            raise broken(file.location, f"is compressed with {packing}: decompress it, or use gzip")
    if not begins.startswith(_GZIP):
        return file.path
    with reading(file.location, "can't be unpacked completely"), gzip.open(file.path) as packed:
        _copy(packed, target, budget)
    return target


def unpack_member(file: SourceFile, name: str, target: Path, budget: Budget) -> Path:
    """Write one member of a zip archive to `target`. Raises DataError."""
    with (
        reading(file.location, "is not a zip archive, or is incomplete"),
        zipfile.ZipFile(file.path) as archive,
        archive.open(name) as packed,
    ):
        _copy(packed, target, budget)
    return target


def unpack_archive(
    file: SourceFile, folder: Path, budget: Budget, suffixes: tuple[str, ...]
) -> None:
    """Write the members with these suffixes to `folder`. Raises DataError if the file is not a zip
    or tar archive, or if a member would be written outside the folder."""
    with reading(file.location, "is not a zip or tar archive, or is incomplete"):
        if zipfile.is_zipfile(file.path):
            with zipfile.ZipFile(file.path) as archive:
                _unpack_zip(archive, file.location, folder, budget, suffixes)
        else:
            with tarfile.open(file.path, "r:*", tarinfo=_Member) as members:
                _unpack_tar(members, file.location, folder, budget, suffixes)


def unpack_code(file: SourceFile, folder: Path, budget: Budget) -> list[str]:
    """Write all files of a tar archive to `folder`. Returns the paths of the files, one per member.
    File modes are not kept, except for the owner's execute permission. Raises DataError if the file
    is not a tar archive, or if a member is a link or a device or would be written outside the
    folder."""
    with (
        reading(file.location, "is not a tar archive, or is incomplete"),
        tarfile.open(file.path, "r:*", tarinfo=_Member) as members,
    ):
        return _unpack_tar(members, file.location, folder, budget, None)


def _unpack_zip(
    archive: zipfile.ZipFile, location: str, folder: Path, budget: Budget, suffixes: tuple[str, ...]
) -> None:
    for member in archive.infolist():
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind == stat.S_IFLNK:
            raise broken(location, f"the member {shortened(member.filename)} is a link")
        path = _path_of(member.filename, location, suffixes)
        if path is not None and not member.is_dir():
            with archive.open(member) as packed:
                _copy(packed, folder / path, budget)


class _Member(tarfile.TarInfo):
    """A header that must be readable and must not have a negative size. With a negative size,
    reading would move backwards and never end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:  # tarfile would treat this as the end of the archive
            raise tarfile.ReadError(f"a header can't be read: {error}") from error
        if member.size < 0:
            raise tarfile.HeaderError(f"a member has the negative size {member.size}")
        if member.type in _READ_WHOLE and member.size > EXTENSION_BYTES:
            raise tarfile.HeaderError(f"a header of {member.size} bytes is too long")
        return member


def _unpack_tar(
    archive: tarfile.TarFile,
    location: str,
    folder: Path,
    budget: Budget,
    suffixes: tuple[str, ...] | None,
) -> list[str]:
    """Write members and return their paths. suffixes: suffixes of the members to write; None writes
    all members, including hidden ones."""
    written = []
    for member in archive:
        if member.size < 0:  # set by an extended header
            raise broken(
                location, f"the member {shortened(member.name)} has the negative size {member.size}"
            )
        if member.issym() or member.islnk():
            raise broken(location, f"the member {shortened(member.name)} is a link")
        path = _path_of(member.name, location, suffixes)
        if member.isdir() or path is None:
            budget.spend_member()
            continue
        packed = archive.extractfile(member)
        if packed is None:
            raise broken(location, f"the member {shortened(member.name)} is not a regular file")
        with packed:
            _copy(packed, folder / path, budget)
        if suffixes is None:
            (folder / path).chmod(0o755 if member.mode & stat.S_IXUSR else 0o644)
        written.append(path.as_posix())
    return written


def _path_of(name: str, location: str, suffixes: tuple[str, ...] | None) -> Path | None:
    """Return the member's path within the folder; None if the member should be skipped."""
    path = PurePosixPath(name)
    if "\\" in name:
        raise broken(
            location,
            f"the member {shortened(name)} has a backslash in its name: pack the archive with "
            "/ between folders",
        )
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise broken(
            location,
            f"the member {shortened(name)} would be written outside the target folder",
        )
    if suffixes is None:
        return Path(path)
    counts = all(map(is_data, path.parts)) and path.suffix.lower() in suffixes
    return Path(path) if counts else None


def _copy(source: IO[bytes] | gzip.GzipFile, target: Path, budget: Budget) -> None:
    budget.spend_member()
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        while piece := source.read(PIECE_BYTES):
            budget.spend(len(piece))
            file.write(piece)
