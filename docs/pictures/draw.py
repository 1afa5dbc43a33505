"""Draws diagrams of how each way of training divides a model and a batch among four ranks.

    python docs/pictures/draw.py

This command writes one SVG file for each way of training to the folder that contains this script. A
rank is drawn as the model's four layers, from top to bottom, above its input batch. The parts of
the model and the batch that the rank holds or computes are filled.
"""

from __future__ import annotations

from pathlib import Path

RANKS = 4
LAYERS = 4
WIDTH, HEIGHT = 132, 18
"""Size of a layer, in pixels."""
GAP, MARGIN, LABEL = 34, 14, 22
MODEL, STATE, BATCH, NOTHING = "#3b6ea5", "#9cc0e4", "#e0a34a", "#f3f3f3"
TEXT = 'font-family="sans-serif" font-size="11" fill="#333"'

Span = tuple[float, float]
"""Start and end of a part, as fractions of the whole."""
ALL: Span = (0.0, 1.0)


def part(number: int, of: int) -> Span:
    return number / of, (number + 1) / of


class Rank:
    """The parts of the model and the batch that one rank computes or holds."""

    def __init__(
        self,
        *,
        layers: range = range(LAYERS),
        columns: Span = ALL,
        held: Span = ALL,
        samples: Span = ALL,
        positions: Span = ALL,
    ) -> None:
        """layers: the layers that the rank computes. columns: the part of each layer that it
        computes. held: the part of these columns that it holds while it is not computing.
        samples, positions: the rank's part of the batch."""
        self.layers, self.columns, self.held = layers, columns, held
        self.samples, self.positions = samples, positions


WAYS = {
    "data": [Rank(samples=part(r, 4)) for r in range(4)],
    "shard": [Rank(samples=part(r, 4), held=part(r, 4)) for r in range(4)],
    "data_shard": [Rank(samples=part(r, 4), held=part(r % 2, 2)) for r in range(4)],
    "tensor": [Rank(columns=part(r, 4)) for r in range(4)],
    "pipeline": [Rank(layers=range(r, r + 1)) for r in range(4)],
    "context": [Rank(positions=part(r, 4), held=part(r, 4)) for r in range(4)],
    "pipeline_tensor": [
        Rank(layers=range(r // 2 * 2, r // 2 * 2 + 2), columns=part(r % 2, 2)) for r in range(4)
    ],
}


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" '
        'stroke="#777" stroke-width="0.6"/>'
    )


def drawn(rank: Rank, number: int, x: float) -> list[str]:
    lines = [f'<text x="{x + WIDTH / 2:g}" y="{MARGIN + 4}" text-anchor="middle" {TEXT}>']
    lines[-1] += f"rank {number}</text>"
    y = MARGIN + LABEL - 8
    for layer in range(LAYERS):
        lines.append(box(x, y, WIDTH, HEIGHT, NOTHING))
        if layer in rank.layers:
            start, stop = rank.columns
            lines.append(box(x + WIDTH * start, y, WIDTH * (stop - start), HEIGHT, STATE))
            size = (stop - start) * WIDTH
            first, last = rank.held
            lines.append(
                box(x + WIDTH * start + size * first, y, size * (last - first), HEIGHT, MODEL)
            )
        y += HEIGHT + 4
    y += 8
    height = 3 * HEIGHT
    lines.append(box(x, y, WIDTH, height, NOTHING))
    (top, bottom), (left, right) = rank.samples, rank.positions
    area = (x + WIDTH * left, y + height * top, WIDTH * (right - left), height * (bottom - top))
    lines.append(box(*area, BATCH))
    return lines


def picture(ranks: list[Rank]) -> str:
    width = 2 * MARGIN + RANKS * WIDTH + (RANKS - 1) * GAP
    height = MARGIN + LABEL + LAYERS * (HEIGHT + 4) + 3 * HEIGHT + MARGIN
    body = [
        line
        for number, rank in enumerate(ranks)
        for line in drawn(rank, number, MARGIN + number * (WIDTH + GAP))
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    )
    return "\n".join([head, box(0, 0, width, height, "#ffffff"), *body, "</svg>"]) + "\n"


def main() -> None:
    for name, ranks in WAYS.items():
        (Path(__file__).parent / f"{name}.svg").write_text(picture(ranks))


if __name__ == "__main__":
    main()
