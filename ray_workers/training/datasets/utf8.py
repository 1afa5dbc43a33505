"""Where a file stops being text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

PIECE_BYTES = 1 << 20


class NotTextError(Exception):
    """A byte that is not UTF-8."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def pieces(path: Path) -> Iterator[str]:
    """The file's text, about a mebibyte at a time. Raises NotTextError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of the next byte to be read
    with open(path, "rb") as file:
        while True:
            read = file.read(PIECE_BYTES)
            waiting = len(decoder.getstate()[0])  # the beginning of a character, read before
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
    """Offset of the first byte that is not UTF-8; None if all are."""
    try:
        for _ in pieces(path):
            pass
    except NotTextError as error:
        return error.offset
    return None
