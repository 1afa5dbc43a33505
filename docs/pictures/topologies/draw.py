"""Draws how copies are kept in step: which ranks communicate, and which wait for a slow rank.

    python docs/pictures/topologies/draw.py

This command writes one SVG file for each kind of `sync` to the folder that contains this script.
The left side shows the ranks and their messages. The right side is a timeline: a block is the
computation of a step, a bar between rows is a message, and a gap in a row means that the rank
waits. Rank 1 takes 2.5 times as long as the others. The colours depend on whether the reader
prefers a light or a dark colour scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

PACES = (1.0, 2.5, 1.0, 1.0)
"""Time that each rank needs for a step."""
SEND = 0.35
SPAN = 11.0
"""Length of the timeline."""
BOUND = 1
"""Maximum number of steps by which a bounded worker can be ahead of the slowest worker."""
UNIT, ROW, BLOCK = 36, 34, 20
GRAPH, MARGIN, LABEL = 190, 16, 52
HEIGHT = 2 * MARGIN + 4 * ROW + 22
WIDTH = GRAPH + LABEL + SPAN * UNIT + 2 * MARGIN
STYLE = """
text { font: 12px sans-serif; fill: #333 }
.rank { fill: #3b6ea5 } .slow { fill: #c2762a } .server { fill: #5a8f5a }
.name { fill: #fff; text-anchor: middle; font-weight: bold }
.row { stroke: #999; stroke-width: 0.6; stroke-dasharray: 2 3 }
.send { stroke: #777; stroke-width: 1.4; fill: none } .tip { fill: #777 }
@media (prefers-color-scheme: dark) {
  text { fill: #ccc } .row { stroke: #777 }
  .rank { fill: #5b93cf } .slow { fill: #dc9448 } .server { fill: #77b077 }
  .name { fill: #111 } .send { stroke: #aaa } .tip { fill: #aaa }
}
""".strip()


class Block(NamedTuple):
    """A rank computes a step."""

    rank: int
    start: float
    end: float


class Sending(NamedTuple):
    """A message between two rows, or an exchange among all rows from the first to the last."""

    first: int
    last: int
    at: float
    width: float = 0.0


class Play(NamedTuple):
    blocks: list[Block]
    sendings: list[Sending]


class Way(NamedTuple):
    edges: Sequence[tuple[int, int]]
    """Pairs (sender, receiver); two pairs for a connection in both directions."""
    play: Callable[[], Play]
    has_server: bool = False
    """Whether the last rank is a server."""


def together(ranks: int, every: int = 1) -> Play:
    """All ranks wait for each other once per `every` steps."""
    play, now = Play([], []), 0.0
    while now < SPAN:
        ends = []
        for rank in range(ranks):
            for step in range(every):
                start = now + step * PACES[rank]
                play.blocks.append(Block(rank, start, start + PACES[rank]))
            ends.append(now + every * PACES[rank])
        now = max(ends)
        last = 3  # includes the server's row, if there is one
        play.sendings.append(Sending(0, last, now, SEND))
        now += SEND
    return play


def neighbours(of: Callable[[int], Sequence[int]]) -> Play:
    """A rank begins a step once it has received its neighbours' copies of the previous step."""
    play, ends = Play([], []), [0.0] * 4
    for _ in range(20):
        starts = [max(ends[other] for other in (rank, *of(rank))) for rank in range(4)]
        for rank, start in enumerate(starts):
            play.blocks.append(Block(rank, start, start + PACES[rank]))
            for other in of(rank):
                if start and abs(other - rank) == 1:
                    play.sendings.append(Sending(min(rank, other), max(rank, other), start))
        ends = [start + PACES[rank] for rank, start in enumerate(starts)]
    return play


def pairs() -> Play:
    """No rank waits: after each step of ranks 0 and 2, a thread averages with a neighbour."""
    play = Play([], [])
    for rank, pace in enumerate(PACES):
        for step in range(math.ceil(SPAN / pace)):
            play.blocks.append(Block(rank, step * pace, (step + 1) * pace))
            if rank % 2 == 0:
                other = rank + (1 if step % 2 == 0 or rank == 0 else -1)
                at = (step + 1) * pace
                play.sendings.append(Sending(min(rank, other), max(rank, other), at))
    return play


def served(bound: float) -> Play:
    """A worker pushes to the server, pulls, and continues unless it is too far ahead."""
    play, clocks = Play([], []), [0] * 3
    ready = dict.fromkeys(range(3), 0.0)
    """Idle workers, each with the earliest time at which it could start a step."""
    running: list[tuple[float, int]] = []
    now = 0.0
    while now < SPAN:
        for rank in [r for r in ready if clocks[r] - min(clocks) <= bound]:
            start = max(now, ready.pop(rank))
            play.blocks.append(Block(rank, start, start + PACES[rank]))
            running.append((start + PACES[rank], rank))
        now, rank = min(running)
        running.remove((now, rank))
        play.sendings.append(Sending(rank, 3, now))
        clocks[rank] += 1
        ready[rank] = now + SEND / 2
    return play


def ring(rank: int) -> list[int]:
    return [(rank - 1) % 4, (rank + 1) % 4]


ALL = [(one, other) for one in range(4) for other in range(4) if one != other]
RING = [(rank, other) for rank in range(4) for other in ring(rank)]
SERVED = [pair for worker in range(3) for pair in ((worker, 3), (3, worker))]
WAYS = {
    "all_reduce": Way(ALL, lambda: together(4)),
    "local_steps": Way(ALL, lambda: together(4, every=3)),
    "d_psgd": Way(RING, lambda: neighbours(ring)),
    "sgp": Way(
        [(rank, (rank + 1) % 4) for rank in range(4)],
        lambda: neighbours(lambda rank: [(rank - 1) % 4]),
    ),
    "ad_psgd": Way(RING, pairs),
    "synchronous": Way(SERVED, lambda: together(3), has_server=True),
    "bounded": Way(SERVED, lambda: served(BOUND), has_server=True),
    "asynchronous": Way(SERVED, lambda: served(math.inf), has_server=True),
}


def looks(rank: int, way: Way) -> tuple[str, str]:
    """Returns (CSS class, name)."""
    if way.has_server and rank == 3:
        return "server", "server"
    return ("slow" if PACES[rank] > 1 else "rank"), f"rank {rank}"


def graph(way: Way) -> list[str]:
    middle, radius, size = GRAPH / 2, 62, 19
    positions = [(middle + x * radius, HEIGHT / 2 + y * radius) for x, y in (
        (-1, -1), (1, -1), (1, 1), (-1, 1)
    )]  # fmt: skip
    lines = []
    for one, other in way.edges:
        (x, y), (to_x, to_y) = positions[one], positions[other]
        length = math.hypot(to_x - x, to_y - y)
        dx, dy = (to_x - x) / length, (to_y - y) / length
        from_x, from_y = x + dx * size, y + dy * size
        end_x, end_y = to_x - dx * (size + 6), to_y - dy * (size + 6)
        lines.append(f'<path class="send" d="M{from_x:.1f} {from_y:.1f}L{end_x:.1f} {end_y:.1f}"/>')
        tip_x, tip_y = to_x - dx * size, to_y - dy * size
        wings = [(end_x - dy * 3.5, end_y + dx * 3.5), (end_x + dy * 3.5, end_y - dx * 3.5)]
        corners = "L".join(f"{a:.1f} {b:.1f}" for a, b in ((tip_x, tip_y), *wings))
        lines.append(f'<path class="tip" d="M{corners}Z"/>')
    for rank, (x, y) in enumerate(positions):
        kind, _ = looks(rank, way)
        lines.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>')
        short = "S" if kind == "server" else str(rank)
        lines.append(f'<text class="name" x="{x:.1f}" y="{y + 4:.1f}">{short}</text>')
    return lines


def timeline(way: Way) -> list[str]:
    left = GRAPH + LABEL
    play = way.play()

    def x(at: float) -> float:
        return left + min(at, SPAN) * UNIT

    def y(row: int) -> float:
        return MARGIN + row * ROW + ROW / 2

    lines = []
    for rank in range(4):
        _, name = looks(rank, way)
        lines.append(f'<text x="{GRAPH:g}" y="{y(rank) + 4:g}">{name}</text>')
        ends = f'x1="{left:g}" y1="{y(rank):g}" x2="{x(SPAN):g}" y2="{y(rank):g}"'
        lines.append(f'<line class="row" {ends}/>')
    for each in play.sendings:
        if each.at + each.width / 2 < SPAN:
            middle = x(each.at + each.width / 2)
            reach = f"V{y(each.last):g}"
            lines.append(f'<path class="send" d="M{middle:.1f} {y(each.first):g}{reach}"/>')
    for block in play.blocks:
        if block.start < SPAN - 0.05:
            kind, _ = looks(block.rank, way)
            width = x(block.end) - x(block.start) - 2
            at = f'x="{x(block.start) + 1:.1f}" y="{y(block.rank) - BLOCK / 2:g}"'
            size = f'width="{width:.1f}" height="{BLOCK}" rx="3"'
            lines.append(f'<rect class="{kind}" {at} {size}/>')
    lines.append(f'<text x="{left:g}" y="{HEIGHT - MARGIN + 4:g}">time →</text>')
    return lines


def picture(way: Way) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" '
        f'width="{WIDTH:g}">'
    )
    return (
        "\n".join([head, f"<style>{STYLE}</style>", *graph(way), *timeline(way), "</svg>"]) + "\n"
    )


def main() -> None:
    for name, way in WAYS.items():
        (Path(__file__).parent / f"{name}.svg").write_text(picture(way))


if __name__ == "__main__":
    main()
