"""Tables that are fitted to the width of a terminal, but written in full to a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from dray.cli.display import terminal
from dray.cli.display.output import cell, write_drawn, write_json
from dray.cli.display.terminal import display_width

if TYPE_CHECKING:
    from pydantic import BaseModel

Item = TypeVar("Item", bound="BaseModel")

GAP = "  "
LEAST = 16
"""Minimum width of a flexible column."""

_TIME_OF_AN_ID = len("job-") + 10
"""Number of characters of an id that encode its creation time, to the millisecond."""

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
    shorter: Mapping[str, Callable[[Sequence[str]], Sequence[str]]] = MappingProxyType({}),
) -> None:
    """Write a line for each row.

    If the terminal is too narrow, each column in `shorter` is replaced by the result of its
    function, then `optional` columns are omitted in the given order, and then `flexible` columns
    are truncated. A table that is still too wide is written with a line for each value. An optional
    column that is empty in every row is always omitted."""
    texts = [[terminal.clean(cell(value)) for value in row] for row in rows]
    if not sys.stdout.isatty():
        widths = _natural(headings, texts)
        for line in (headings, *texts):
            write_drawn(_joined(line, widths))
        return
    headings, texts = _chosen(headings, texts, _with_a_value(headings, texts, optional))
    if _total(_natural(headings, texts)) > terminal.width():
        for heading in [heading for heading in headings if heading in shorter]:
            _replace_column(texts, headings.index(heading), shorter[heading])
    headings, texts = _chosen(headings, texts, _that_fit(headings, texts, flexible, optional))
    widths = _squeezed(headings, texts, flexible)
    if _total(widths) > terminal.width():
        _write_records(headings, texts)
        return
    colours = terminal.has_colours()
    write_drawn(terminal.styled(_joined(headings, widths), terminal.BOLD if colours else None))
    for line in texts:
        write_drawn(_joined(line, widths, colours=colours))


def _chosen(
    headings: Sequence[str], texts: Sequence[Sequence[str]], columns: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    return [headings[n] for n in columns], [[row[n] for n in columns] for row in texts]


def _with_a_value(
    headings: Sequence[str], texts: Sequence[Sequence[str]], optional: Sequence[str]
) -> list[int]:
    return [
        n
        for n, heading in enumerate(headings)
        if heading not in optional or not texts or any(row[n] != cell(None) for row in texts)
    ]


def _replace_column(
    texts: Sequence[list[str]], column: int, make: Callable[[Sequence[str]], Sequence[str]]
) -> None:
    for row, text in zip(texts, make([row[column] for row in texts]), strict=True):
        row[column] = text


def _write_records(headings: Sequence[str], texts: Sequence[Sequence[str]]) -> None:
    """Write a line for each value, and a blank line between rows."""
    width = max(map(display_width, headings)) + len(GAP)
    for number, row in enumerate(texts):
        if number:
            write_drawn("")
        for heading, text in zip(headings, row, strict=True):
            for line in terminal.wrapped(f"{heading:<{width}}{text}", terminal.width(), GAP):
                write_drawn(line)


def shortest_prefixes(ids: Sequence[str]) -> list[str]:
    """Return a prefix of each id. The prefix is unique among `ids`, and almost always among all
    ids. Array ids get longer prefixes, because they begin with a longer word than job ids."""
    length = _TIME_OF_AN_ID
    while len({one[: _length(one, length)] for one in ids}) < len(set(ids)):
        length += 1
    return [one[: _length(one, length)] for one in ids]


def _length(one: str, of_a_job: int) -> int:
    return of_a_job - len("job") + len(one.partition("-")[0])


def listing(
    found: Sequence[Item],
    as_json: bool,
    headings: Sequence[str],
    row: Callable[[Item], Sequence[object]],
    *,
    flexible: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Write a list of items as a table with a row for each item, or as one JSON document."""
    if as_json:
        write_json(found)
    else:
        table(headings, map(row, found), flexible=flexible, optional=optional)


def in_tree(parents: Mapping[str, str | None]) -> dict[str, str]:
    """Return the names in the order of a tree, each mapped to the name indented by its depth.
    `parents` maps each name to its parent."""
    found: dict[str, str] = {}
    children: dict[str | None, list[str]] = {}
    for name, parent in sorted(parents.items()):
        children.setdefault(parent if parent in parents else None, []).append(name)

    def add(above: str | None, indent: str) -> None:
        for name in children.get(above, ()):
            found[name] = indent + name
            add(name, indent + "  ")

    add(None, "")
    return found


def shortened(text: str, width: int) -> str:
    """Shorten `text` to at most `width` columns, with an ellipsis in place of the last words. A
    single word is shortened in the middle, because similar names often differ only at the end."""
    if display_width(text) <= width:
        return text
    ellipsis = "…" if terminal.has_unicode() else "~"
    if " " not in text:
        end = _beginning(text[::-1], (width - 1) // 3)[::-1]
        return _beginning(text, width - 1 - display_width(end)) + ellipsis + end
    kept = _beginning(text, width - 1)
    whole_words = kept if text[len(kept)] == " " else kept.rpartition(" ")[0]
    return (whole_words or kept).rstrip(" ,;:") + ellipsis


def _beginning(text: str, width: int) -> str:
    """Return the longest prefix of `text` that fits into `width` columns."""
    kept = ""
    for character in text:
        if display_width(kept + character) > width:
            break
        kept += character
    return kept


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
    """Return the indices of the columns to show."""
    natural = _natural(headings, texts)
    least = [
        min(width, LEAST) if heading in flexible else width
        for heading, width in zip(headings, natural, strict=True)
    ]
    kept = list(range(len(headings)))
    for heading in [heading for heading in optional if heading in headings]:
        if _total([least[n] for n in kept]) <= terminal.width():
            break
        kept.remove(headings.index(heading))
    return kept


def _squeezed(
    headings: Sequence[str], texts: Sequence[Sequence[str]], flexible: Sequence[str]
) -> list[int]:
    """Return the widths of the columns, shrinking the widest flexible columns until the table
    fits."""
    widths = _natural(headings, texts)
    givers = [n for n, heading in enumerate(headings) if heading in flexible and widths[n] > LEAST]
    while givers and _total(widths) > terminal.width():
        widest = max(givers, key=widths.__getitem__)
        widths[widest] -= 1
        givers = [n for n in givers if widths[n] > LEAST]
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
