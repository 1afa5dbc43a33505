"""How a measurement is kept (JSON) and shown (markdown, on the screen and in the results)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Ratio, Spread

LINE = 90
"""Most characters of a line of JSON, but for single texts and what is before it."""


@dataclass(frozen=True)
class Row:
    """The samples of one contender, in seconds."""

    label: str
    samples: Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """One ratio, its goal, and the ratio that the same method gives for identical contenders."""

    label: str
    n: int
    ratio: Ratio
    same: Ratio
    """An A/A comparison: its distance from 1 is the resolution of the method."""
    goal: str
    met: bool | None
    """None where there is no goal."""


@dataclass(frozen=True)
class Table:
    """Any further figures, as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A plot, in a file of its own next to the page."""

    name: str
    """Name of the file, without `.svg`."""
    caption: str
    """Describes the plot."""
    svg: str


@dataclass(frozen=True)
class Result:
    """One benchmark's figures and how they were taken."""

    name: str
    """Name of the JSON file."""
    title: str
    method: Sequence[str]
    rows: Sequence[Row]
    comparisons: Sequence[Comparison]
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    """All other samples, for a later analysis."""


def write(result: Result, machine: Mapping[str, str], taken_at: str, folder: Path) -> str:
    """Add the result to the folder and rewrite its README.md; the result as markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        **asdict(result),
        "rows": [
            {"label": row.label, **asdict(Spread.of(row.samples)), "samples": list(row.samples)}
            for row in result.rows
        ],
        "pictures": [{"name": each.name, "caption": each.caption} for each in result.pictures],
        "machine": dict(machine),
        "taken_at": taken_at,
    }
    for picture in result.pictures:
        (folder / f"{picture.name}.svg").write_text(picture.svg)
    (folder / f"{result.name}.json").write_text(as_json(content) + "\n")
    stored = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    head = "# Results\n\nWritten by `make bench`; how to read them is in `benchmarks/README.md`.\n"
    (folder / "README.md").write_text("\n".join([head, *map(markdown, stored)]))
    return markdown(content)


def as_json(value: Any) -> str:
    """Indented JSON in which lists of numbers fill their lines, and what is short has one."""
    short = json.dumps(value)
    if len(short) <= LINE or not isinstance(value, dict | list) or not value:
        return short
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {as_json(part)}" for key, part in value.items()]
    elif all(isinstance(part, int | float) for part in value):
        parts = textwrap.wrap(short[1:-1], LINE, break_on_hyphens=False)
        return "[\n" + textwrap.indent("\n".join(parts), " ") + "\n]"
    else:
        parts = [as_json(part) for part in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + textwrap.indent(",\n".join(parts), " ") + f"\n{end}"


def markdown(content: Mapping[str, Any]) -> str:
    """A stored result for people."""
    machine = content["machine"]
    parts = [
        f"## {content['title']}",
        "\n".join(f"- {line}" for line in content["method"]),
        f"Taken {content['taken_at']} on " + ", ".join(f"{k} {v}" for k, v in machine.items()),
    ]
    if content["rows"]:
        parts.append(_spreads(content["rows"]))
    if content["comparisons"]:
        parts.append(_comparisons(content["comparisons"]))
    for table in content["tables"]:
        parts.append(f"**{table['title']}**\n\n" + table_of(table["columns"], table["rows"]))
    for picture in content.get("pictures", ()):
        caption = picture["caption"]
        parts.append(f"**{caption}**\n\n![{caption}]({picture['name']}.svg)")
    return "\n\n".join(parts) + "\n"


def seconds(value: float) -> str:
    """Three digits that mean something."""
    return f"{value * 1e3:.3g} ms" if abs(value) < 0.1 else f"{value:.3g} s"


def _spreads(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("p50", "p25", "p75", "lowest", "highest")
    cells = [[row["label"], str(row["n"]), *(seconds(row[name]) for name in names)] for row in rows]
    return table_of(["", "n", *names], cells)


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            each["label"],
            str(each["n"]),
            str(Ratio(**each["ratio"])),
            str(Ratio(**each["same"])),
            each["goal"],
            {True: "yes", False: "no", None: ""}[each["met"]],
        ]
        for each in comparisons
    ]
    return table_of(["ratio of", "n", "ratio [95%]", "A/A [95%]", "goal", "met"], cells)


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * max(width, 3) for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(c.ljust(max(w, 3)) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
