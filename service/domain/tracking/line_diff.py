"""Differences between two versions of a text file, line by line, in the format of `diff -u`.

The lines that stay are a longest common subsequence, found with the greedy algorithm of E. Myers
("An O(ND) Difference Algorithm and Its Variations", 1986) among the lines that both versions have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

CONTEXT: Final = 3
"""Number of unchanged lines that are shown around changed lines, as in `diff -u`."""
MAX_EDITS: Final = 1000
"""Maximum number of edits of lines that both versions have. If there are more, all of these lines
count as replaced, because finding the edits takes time proportional to the square of their number:
0.2 s for this number."""
BINARY_WITHIN: Final = 8000
"""Number of bytes at the start of a file that are searched for NUL. As in Git, a file is binary if
one of them is NUL."""

Pair = tuple[int, int]
"""Positions of a line in the old and in the new version."""


@dataclass(frozen=True)
class LineDiff:
    num_added: int
    num_removed: int
    text: str
    """Hunks in the format of `diff -u`, without the names of the files; empty if the versions are
    equal. Bytes that are not UTF-8 are replaced with U+FFFD."""
    num_tried: int
    """Number of edits up to which a common subsequence was searched for. The search took time
    proportional to its square."""


def is_binary(content: bytes) -> bool:
    return b"\0" in content[:BINARY_WITHIN]


def line_diff(old: bytes, new: bytes, max_edits: int = MAX_EDITS) -> LineDiff:
    """Compare two versions of a text file. As for Git, lines end only with a newline character.

    max_edits: as MAX_EDITS.
    """
    before, after = _lines(old), _lines(new)
    kept, num_tried = _kept(before, after, max_edits)
    rows = list(_rows(len(before), len(after), kept))
    hunks = [_hunk(before, after, some) for some in _with_context(rows)]
    num_added, num_removed = len(after) - len(kept), len(before) - len(kept)
    return LineDiff(num_added, num_removed, "".join(hunks), num_tried)


def _lines(content: bytes) -> list[bytes]:
    *lines, rest = content.split(b"\n")
    return [line + b"\n" for line in lines] + ([rest] if rest else [])


def _kept(
    before: Sequence[bytes], after: Sequence[bytes], max_edits: int
) -> tuple[list[Pair], int]:
    """Return the positions of the lines that stay, in their order, and the number of edits that
    were tried."""
    most = min(len(before), len(after))
    start = next((n for n in range(most) if before[n] != after[n]), most)
    most -= start
    end = next((n for n in range(most) if before[-1 - n] != after[-1 - n]), most)
    olds, news = range(start, len(before) - end), range(start, len(after) - end)
    # A line that only one of the versions has was removed or added.
    both = {before[n] for n in olds} & {after[n] for n in news}
    olds_of_both = [n for n in olds if before[n] in both]
    news_of_both = [n for n in news if after[n] in both]
    old_lines, new_lines = [before[n] for n in olds_of_both], [after[n] for n in news_of_both]
    common, num_tried = _common(old_lines, new_lines, max_edits)
    kept = [(n, n) for n in range(start)]
    kept += [(olds_of_both[x], news_of_both[y]) for x, y in common]
    kept += [(len(before) - n, len(after) - n) for n in range(end, 0, -1)]
    return kept, num_tried


def _common(a: Sequence[bytes], b: Sequence[bytes], max_edits: int) -> tuple[list[Pair], int]:
    """Return the positions of a longest common subsequence, and its number of edits; no positions
    if it requires more than `max_edits` edits."""
    # reached[d][t] is the furthest position in `a` on the diagonal 2 * t - d after d edits. A
    # diagonal is a position in `a` minus a position in `b`.
    reached: list[list[int]] = []
    most = min(len(a) + len(b), max_edits)
    for num_edits in range(most + 1):
        row: list[int] = []
        for t in range(num_edits + 1):
            x = _begin(reached[-1], t) if reached else 0
            y = x - (2 * t - num_edits)
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            row.append(x)
            if x >= len(a) and y >= len(b):
                return _path([*reached, row], x, y), num_edits
        reached.append(row)
    return [], most


def _begin(previous: Sequence[int], t: int) -> int:
    """Return the furthest position that one more edit reaches on a diagonal: it adds a line of `b`,
    or removes a line of `a`."""
    by_adding = previous[t] if t < len(previous) else -1
    by_removing = previous[t - 1] + 1 if t else -1
    return max(by_adding, by_removing)


def _path(reached: Sequence[Sequence[int]], x: int, y: int) -> list[Pair]:
    """Return the positions of the equal lines on the path that ends at x and y."""
    pairs: list[Pair] = []
    for num_edits in range(len(reached) - 1, -1, -1):
        t = (x - y + num_edits) // 2
        begin = _begin(reached[num_edits - 1], t) if num_edits else 0
        while x > begin:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if num_edits and t and reached[num_edits - 1][t - 1] + 1 == begin:
            x -= 1
        else:
            y -= 1
    return pairs[::-1]


Row = tuple[str, int, int]
"""A line: `-` if it was removed, `+` if it was added, or a space; and the positions at which it is
or would be in both versions."""


def _rows(num_old: int, num_new: int, kept: Sequence[Pair]) -> Iterator[Row]:
    i = j = 0
    for old, new in [*kept, (num_old, num_new)]:
        yield from (("-", n, j) for n in range(i, old))
        yield from (("+", old, n) for n in range(j, new))
        if old < num_old:
            yield " ", old, new
        i, j = old + 1, new + 1


def _with_context(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield the changed rows together with the unchanged rows around them."""
    begin = end = 0
    for at in (n for n, (mark, _, _) in enumerate(rows) if mark != " "):
        if at - CONTEXT > end:
            if end:
                yield rows[begin:end]
            begin = at - CONTEXT
        end = min(len(rows), at + CONTEXT + 1)
    if end:
        yield rows[begin:end]


def _hunk(before: Sequence[bytes], after: Sequence[bytes], rows: Sequence[Row]) -> str:
    _, old, new = rows[0]
    num_old = sum(mark != "+" for mark, _, _ in rows)
    num_new = sum(mark != "-" for mark, _, _ in rows)
    # The position of an empty range is the number of the line before it.
    begins = f"-{old + (num_old > 0)},{num_old} +{new + (num_new > 0)},{num_new}"
    text = [f"@@ {begins} @@\n"]
    for mark, i, j in rows:
        line = (after[j] if mark == "+" else before[i]).decode(errors="replace")
        text.append(mark + line if line.endswith("\n") else f"{mark}{line}\n{NO_NEWLINE}\n")
    return "".join(text)


NO_NEWLINE: Final = "\\ No newline at end of file"
