"""Tables: all of the text in a pipe, as much as fits on a terminal."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dray.cli import terminal
from dray.cli.output import cell, write_drawn, write_json

if TYPE_CHECKING:
    from pydantic import BaseModel

Item = TypeVar("Item", bound="BaseModel")

GAP = "  "
LEAST = 12
"""Columns that a flexible column keeps."""

_COLOUR_OF_STATE = {
    **dict.fromkeys(("SUCCEEDED", "ready"), terminal.GREEN),
    **dict.fromkeys(("FAILED", "lost", "refused"), terminal.RED),
    **dict.fromkeys(("STARTING", "RUNNING"), terminal.CYAN),
    **dict.fromkeys(("RECOVERING", "CANCELLING"), terminal.MAGENTA),
}


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    flexible: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """A line for each row.

    On a terminal that is too narrow for it the `optional` columns are left out, the first named
    first, and the `flexible` ones are cut short; what is then still too long goes on in the next
    line.
    """
    texts = [[terminal.clean(cell(value)) for value in row] for row in rows]
    if not sys.stdout.isatty():
        widths = _natural(headings, texts)
        for line in (headings, *texts):
            write_drawn(_joined(line, widths))
        return
    kept = _that_fit(headings, texts, flexible, optional)
    names = [headings[n] for n in kept]
    chosen = [[row[n] for n in kept] for row in texts]
    widths = _squeezed(names, chosen, flexible)
    colours = terminal.has_colours()
    write_drawn(terminal.styled(_joined(names, widths), terminal.BOLD if colours else None))
    for line in chosen:
        write_drawn(_joined(line, widths, colours=colours))


def listing(
    found: Sequence[Item],
    as_json: bool,
    headings: Sequence[str],
    row: Callable[[Item], Sequence[object]],
) -> None:
    """A list of answers: a table with a row for each, or one JSON document."""
    if as_json:
        write_json(found)
    else:
        table(headings, map(row, found))


def display_width(text: str) -> int:
    """Columns of a terminal: East Asian and emoji take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` columns, with an ellipsis for what was cut."""
    if display_width(text) <= width:
        return text
    kept = ""
    for character in text:
        if display_width(kept + character) > width - 1:
            break
        kept += character
    return kept + ("…" if terminal.has_unicode() else "~")


def _natural(headings: Sequence[str], texts: Sequence[Sequence[str]]) -> list[int]:
    return [max(display_width(row[n]) for row in (headings, *texts)) for n in range(len(headings))]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _that_fit(
    headings: Sequence[str],
    texts: Sequence[Sequence[str]],
    flexible: Sequence[str],
    optional: Sequence[str],
) -> list[int]:
    """Numbers of the columns to show."""
    natural = _natural(headings, texts)
    least = [
        min(width, LEAST) if heading in flexible else width
        for heading, width in zip(headings, natural, strict=True)
    ]
    kept = list(range(len(headings)))
    for heading in optional:
        if _total([least[n] for n in kept]) <= terminal.width():
            break
        kept.remove(headings.index(heading))
    return kept


def _squeezed(
    headings: Sequence[str], texts: Sequence[Sequence[str]], flexible: Sequence[str]
) -> list[int]:
    widths = _natural(headings, texts)
    for n, heading in enumerate(headings):
        over = _total(widths) - terminal.width()
        if heading in flexible and over > 0:
            widths[n] = max(min(widths[n], LEAST), widths[n] - over)
    return widths


def _joined(line: Sequence[str], widths: Sequence[int], *, colours: bool = False) -> str:
    cells = []
    last = len(line) - 1
    for n, (text, width) in enumerate(zip(line, widths, strict=True)):
        short = shortened(text, width)
        padding = "" if n == last else " " * (width - display_width(short))
        colour = _COLOUR_OF_STATE.get(text.partition(":")[0]) if colours else None
        cells.append(terminal.styled(short, colour) + padding)
    return GAP.join(cells).rstrip()
