"""Converts output in which a program redraws lines, as progress bars do, into log lines. The module
is pure, and imports neither Ray nor torch.

A program redraws a line after a carriage return, after backspaces, or after moving the cursor up.
For a redrawn line, one state per second and the last state are logged. All other lines are logged
when they end.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

from ray_workers.shared.secret_files import Masker

PERIOD_S = 1.0
"""Seconds between logged states of a redrawn line."""
MAX_ROWS = 64
"""Number of rows, counted from the bottom, to which the cursor can move. Rows further up can no
longer be changed."""
LINE_CHARS = 8192
"""Maximum length of a line. Longer lines are split, so that a single line can't fill a page of the
log."""
_CONTROL = re.compile(r"([\n\r\x08]|\x1b\[[0-9;?]{0,16}[ABDEFGJK])")
_PART_OF_CONTROL = re.compile(r"\x1b(\[[0-9;?]{0,16})?\Z")


class Line(NamedTuple):
    at: float
    """Unix time at which the process wrote the line."""
    text: str
    row: str = ""
    """Name of the redrawn row whose state this is; all states of a row have the same name. Empty
    for other lines."""


class _Row:
    """A row of the imaginary terminal to which the program writes."""

    def __init__(self) -> None:
        self.text = ""
        self.whole = ""
        """The last complete text of the row, which is kept while the program draws the next
        text."""
        self.is_redrawn = False
        self.name = ""
        self.at = 0.0
        self.logged: str | None = None


class Redraws:
    """Processes output as it is read, and returns the lines to log.

    Each drawn text is also added to the list `drawn`, even if the text is not logged. The caller
    must empty this list.
    """

    def __init__(self) -> None:
        self.masker = Masker({})
        """Masks secrets in all text that is returned."""
        self.drawn: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._part = ""
        """The start of a control sequence whose end has not been read yet."""
        self._rows = [_Row()]
        self._at = 0
        """Index of the row with the cursor."""
        self._column = 0
        self._has_returned = False
        """Whether the cursor was moved to this column by a carriage return."""
        self._has_begun = False
        """Whether the program has written to the row since the cursor entered the row or last moved
        back."""
        self._fed_at = 0.0
        self._waiting_since: float | None = None
        """Time of the first redraw that has not been logged; None if all redraws have been
        logged."""
        self._num_named = 0
        self._lines: list[Line] = []

    @property
    def num_held(self) -> int:
        """Number of characters in the row that is being written."""
        return len(self._rows[self._at].text)

    def feed(self, data: bytes, now: float) -> list[Line]:
        """Return the lines that end in this part of the output, and the states of redrawn rows that
        are due to be logged.

        `now` is the Unix time.
        """
        self._log_due(now, is_quiet=False)
        text = self._part + self._decoder.decode(data)
        found = _PART_OF_CONTROL.search(text, max(0, len(text) - 20))
        self._part = found.group() if found else ""
        self._fed_at = now
        for number, part in enumerate(_CONTROL.split(text.removesuffix(self._part))):
            if part:
                self._control(part) if number % 2 else self._write(part)
        return self._take()

    def due(self, now: float) -> list[Line]:
        """Return the states of redrawn rows that are due to be logged. Must be called periodically,
        because a program might write nothing for a long time."""
        self._log_due(now, is_quiet=not 0.0 <= now - self._fed_at < PERIOD_S)
        return self._take()

    def finish(self) -> list[Line]:
        """Return the remaining lines at the end of the output."""
        self._write(self._part + self._decoder.decode(b"", final=True))
        self._complete()
        self._log_waiting(len(self._rows))
        row = self._rows[self._at]
        if row.text and row.logged is None and not row.is_redrawn:
            self._log(row, row.text)
        self._rows, self._at, self._column, self._part = [_Row()], 0, 0, ""
        return self._take()

    # Drawing.

    def _write(self, text: str) -> None:
        if not text:
            return
        row = self._rows[self._at]
        if self._column < len(row.text) or self._has_returned or row.logged is not None:
            self._cut(row)
        row.text += text
        row.at = self._fed_at
        self._column = len(row.text)
        self._has_begun, self._has_returned = True, False
        if len(row.text) > LINE_CHARS:
            self._split(row)
        if row.is_redrawn:
            self._redrawn(row)

    def _cut(self, row: _Row) -> None:
        """Delete the text to the right of the cursor. Programs redraw entire lines, so the end of a
        longer old text must not remain after a shorter new text."""
        row.text = row.text[: self._column]
        self._redrawn(row)

    def _redrawn(self, row: _Row) -> None:
        row.is_redrawn = True
        if self._waiting_since is None:
            self._waiting_since = self._fed_at

    def _control(self, control: str) -> None:
        kind, row = control[-1], self._rows[self._at]
        number = _number_in(control)
        if kind == "\n":
            self._end_row()
        elif kind in "ABEF":
            self._leave_row(-(number or 1) if kind in "AF" else number or 1)
        elif kind in "JK":
            self._erase(kind, number)
        else:
            self._complete()
            column = {"\r": 0, "\x08": self._column - 1, "D": self._column - (number or 1)}
            self._column = min(max(column.get(kind, (number or 1) - 1), 0), len(row.text))
            self._has_returned = kind == "\r"

    def _leave_row(self, by: int) -> None:
        """Move the cursor up or down to the beginning of a row, without ending the current row."""
        row = self._rows[self._at]
        self._complete()
        if row.text and row.logged is None:
            self._redrawn(row)
        self._at = min(max(self._at + by, 0), len(self._rows) - 1)
        self._column, self._has_returned = 0, False

    def _complete(self) -> None:
        """Record that the text of the row is complete."""
        row = self._rows[self._at]
        if self._has_begun:
            self._has_begun = False
            self.drawn.append(self.masker.text(row.text))
            if not row.text.isspace():
                row.whole = row.text

    def _erase(self, kind: str, mode: int) -> None:
        row = self._rows[self._at]
        if kind == "K" and mode == 2:
            self._column = 0
        if mode == 0 or (kind, mode) == ("K", 2):
            self._complete()
            if self._column < len(row.text):
                self._cut(row)
        if kind == "J" and mode == 0:
            del self._rows[self._at + 1 :]

    def _end_row(self) -> None:
        row = self._rows[self._at]
        is_blank = not row.text
        if self._has_begun:
            self._complete()
        elif is_blank:
            self.drawn.append("")
        if not row.is_redrawn and row.logged is None:
            self._log_waiting(self._at)
            row.at = row.at if row.text else self._fed_at
            self._log(row, row.text)
        self._at += 1
        self._column, self._has_returned = 0, False
        if self._at == len(self._rows):
            self._rows.append(_Row())
        if len(self._rows) > MAX_ROWS:
            self._log_waiting(1)
            del self._rows[0]
            self._at -= 1

    # Logging.

    def _log_due(self, now: float, *, is_quiet: bool) -> None:
        """Log the states that are due. `is_quiet` is true if the program has not written anything
        for a while."""
        since = self._waiting_since
        # `now - since` is negative if the clock has been set back.
        if since is None or 0.0 <= now - since < PERIOD_S:
            return
        self._waiting_since = None
        row = self._rows[self._at]
        for each in self._rows:
            if each is row and self._has_begun:
                if is_quiet and not self.masker.may_go_on(each.text):
                    self._log_state(each, each.text)
                else:
                    self._log_state(each, each.whole)
                    self._waiting_since = now
            else:
                self._log_state(each, each.text)

    def _log_waiting(self, before: int) -> None:
        """Log the unlogged states of all rows above the row with index `before`."""
        if self._waiting_since is None:
            return
        for row in self._rows[:before]:
            self._log_state(row, row.text)
        if before == len(self._rows):
            self._waiting_since = None

    def _log_state(self, row: _Row, text: str) -> None:
        if row.is_redrawn and text.strip() and text.rstrip() != row.logged:
            if not row.name:  # unique also among processes that are started again
                self._num_named += 1
                row.name = f"{int(1000 * row.at):x}.{self._num_named}"
            self._log(row, text.rstrip())

    def _log(self, row: _Row, text: str) -> None:
        row.logged = text
        self._lines.append(Line(row.at, self.masker.text(text), row.name))

    def _split(self, row: _Row) -> None:
        """Log the beginning of a long line. The end is held back, because it might contain the
        beginning of a secret, which would not be masked."""
        longest = LINE_CHARS + self.masker.longest
        if len(row.text) > longest:
            row.text = self.masker.text(row.text)
        while len(row.text) > longest:
            piece, row.text = row.text[:LINE_CHARS], row.text[LINE_CHARS:]
            self._log_waiting(self._at)
            self._lines.append(Line(row.at, piece))
            self.drawn.append(piece)
        self._column = len(row.text)

    def _take(self) -> list[Line]:
        lines, self._lines = self._lines, []
        return lines


def _number_in(control: str) -> int:
    """Return the first number of a control sequence, or 0 if it has none."""
    digits = control[2:-1].partition(";")[0] if len(control) > 2 else ""
    return min(int(digits), LINE_CHARS) if digits.isdecimal() else 0
