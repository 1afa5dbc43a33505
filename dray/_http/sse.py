"""Incremental decoder for server-sent events (WHATWG HTML, 9.2.6)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dray import errors

_LINE_END = re.compile(r"\r\n|\n|\r")

MAX_PENDING_CHARS = 16 << 20
"""Maximum number of characters of an event. All of dray's events are shorter."""


@dataclass(frozen=True)
class Message:
    """One event of a stream."""

    name: str
    data: str


class Decoder:
    """Decodes a stream piece by piece. A piece can end anywhere, even within a character.

    Lines end only with CR, LF or both; `str.splitlines` would also split at characters that JSON
    does not escape. `retry_s` is the reconnection time that the server sent last. The ids of events
    are ignored, because the data of each event contains its number.
    """

    def __init__(self) -> None:
        self.retry_s: float | None = None
        self._text = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._pending = ""
        self._name = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[Message]:
        """Yield the messages that `piece` completes."""
        self._pending += self._text.decode(piece)
        # A CR at the end of the data might be half of a CRLF, so wait for more data.
        ends = [e for e in _LINE_END.finditer(self._pending) if e.group() != "\r" or self._more(e)]
        start = 0
        for end in ends:
            message = self._line(self._pending[start : end.start()])
            start = end.end()
            if message is not None:
                yield message
        self._pending = self._pending[start:]
        if len(self._pending) > MAX_PENDING_CHARS:
            raise errors.TransportError("a line of the event stream is too long")

    def _more(self, end: re.Match[str]) -> bool:
        return end.end() < len(self._pending)

    def _line(self, line: str) -> Message | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        elif field == "retry" and value.isascii() and value.isdigit():
            self.retry_s = int(value) / 1000.0
        return None

    def _dispatch(self) -> Message | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return Message(name, "\n".join(data)) if data or name == "reset" else None
