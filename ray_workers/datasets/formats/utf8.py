"""Text in UTF-8 and other encodings, and the position at which a file is not valid text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from ray_workers.datasets.core.errors import Budget, broken

PIECE_BYTES = 1 << 20


class NotTextError(Exception):
    """A byte is invalid in the encoding."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def pieces(path: Path, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the text of the file, about 1 MiB at a time. Raises NotTextError."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset = 0  # position of the next byte to read
    with open(path, "rb") as file:
        while True:
            read = file.read(PIECE_BYTES)
            waiting = len(decoder.getstate()[0])  # bytes of an incomplete character
            try:
                text = decoder.decode(read, final=not read)
            except UnicodeDecodeError as error:
                raise NotTextError(offset - waiting + error.start) from None
            offset += len(read)
            if text:
                yield text
            if not read:
                return


def first_bad_byte(path: Path) -> int | None:
    """Return the offset of the first byte that is not UTF-8; None if the file is valid UTF-8."""
    try:
        for _ in pieces(path):
            pass
    except NotTextError as error:
        return error.offset
    return None


def converted(path: Path, encoding: str, location: str, target: Path, budget: Budget) -> Path:
    """Return the file itself if it is UTF-8, else `target` with the text in UTF-8. Raises
    DataError."""
    if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig"):
        return path
    try:
        with open(target, "wb") as file:
            for text in pieces(path, encoding):
                piece = text.encode(errors="replace")
                budget.spend(len(piece))
                file.write(piece)
    except NotTextError as error:
        raise broken(
            location,
            f"is not {encoding}, the encoding in data.encoding: the byte at offset "
            f"{error.offset:,} is invalid",
        ) from None
    return target


def likely_encoding(path: Path) -> str:
    """Return the likely encoding of a file that is not UTF-8."""
    with open(path, "rb") as file:
        begins = file.read(2)
    return "utf-16" if begins in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin-1 or cp1252"
