"""A report as one HTML file that needs no script and no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from service.domain.charts import svg
from service.domain.charts.svg import Chart, text
from service.domain.charts.ticks import number
from service.tracking.reports import markdown
from service.tracking.reports.parts import PartOfText
from service.tracking.reports.runs import RunTable, moment, sampled

COLOURS: Final = (
    *(("#0f46e1", "#4d7ff1"), ("#058d1d", "#91ea90"), ("#860f27", "#f5184c")),
    *(("#c65cbf", "#feb4f7"), ("#183d07", "#6b935d"), ("#2f7e9e", "#55c6f4")),
    *(("#67168b", "#c96ffb"), ("#a95e25", "#f3a26b"), ("#422844", "#a173a5")),
    *(("#9b2179", "#d442a9"), ("#6c5374", "#c0b2c4"), ("#ca6b79", "#fbe0e2")),
    *(("#18505c", "#3994a9"), ("#5f4025", "#ba7331"), ("#747a38", "#b6c061")),
    *(("#7267b6", "#9b92e5"), ("#6a33c5", "#9162f5"), ("#d42515", "#ed7665")),
    *(("#197037", "#19db69"), ("#a35588", "#dc75b8")),
)
"""The colours of curves on light and dark backgrounds, as in the web page's app.css."""
MAX_VALUES: Final = 100
"""Maximum number of values of each curve in the tables of values."""
_LIGHT = {"bg": "#fff", "fg": "#1a2029", "soft": "#5c6673", "line": "#dfe3e8", "link": "#2456c8"}
_DARK = {"bg": "#14181e", "fg": "#e4e8ee", "soft": "#97a2b1", "line": "#2b323d", "link": "#7fa6ff"}


def _variables(scheme: int) -> str:
    names = (_LIGHT, _DARK)[scheme] | {f"c{n}": pair[scheme] for n, pair in enumerate(COLOURS)}
    return "".join(f"--{name}:{value};" for name, value in names.items())


STYLE: Final = f"""
:root{{color-scheme:light dark;{_variables(0)}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}
body{{background:var(--bg);color:var(--fg);font:16px/1.55 system-ui,sans-serif;margin:0 auto;
max-width:50rem;padding:1.5rem;overflow-wrap:anywhere}}
a{{color:var(--link)}}h1{{line-height:1.25;margin:0}}.soft,figcaption,small{{color:var(--soft)}}
code,pre{{font:.88em/1.45 ui-monospace,monospace}}
pre,blockquote{{border-left:3px solid var(--line);margin-left:0;overflow-x:auto;
padding:.3rem .9rem}}
figure{{margin:1.4rem 0;break-inside:avoid}}figcaption,small{{font-size:.85rem}}
caption{{font-weight:600;text-align:left}}
.wide{{overflow-x:auto}}svg{{display:block;max-width:100%;height:auto}}
table{{border-collapse:collapse}}th,td{{border-bottom:1px solid var(--line);text-align:left;
padding:.3rem .8rem .3rem 0;vertical-align:top}}
.num{{text-align:right;font-variant-numeric:tabular-nums}}
svg text{{font:11px system-ui,sans-serif;fill:var(--soft)}}
svg .head{{font-size:14px;font-weight:600}}
svg .head,svg .label{{fill:var(--fg)}}svg path{{fill:none;stroke-linejoin:round}}
svg .grid{{stroke:var(--line)}}
{"".join(f".c{n}{{stroke:var(--c{n})}}circle.c{n}{{fill:var(--c{n})}}" for n in range(20))}
@media screen{{th,td{{overflow-wrap:normal}}td:has(small){{min-width:9rem;overflow-wrap:anywhere}}}}
@media print{{body{{max-width:none;padding:0}}a{{color:inherit}}}}
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy in the file. It allows only the style sheet above."""


@dataclass(frozen=True)
class Section:
    """A part of a report with the data of its block."""

    part: PartOfText
    chart: tuple[Chart, Sequence[str]] | None = None
    table: RunTable | None = None
    problem: str | None = None
    """Why the chart or the table can't be shown."""


@dataclass(frozen=True)
class ExportOrigin:
    """The version of a report, the user who exported it, and the time."""

    title: str
    report_id: str
    version: int
    owner: str
    exported_by: str
    exported_at: datetime


def render(origin: ExportOrigin, sections: Sequence[Section], *, with_values: bool) -> str:
    """Return the report as HTML. with_values: add a table with the values of each chart."""
    body = "".join(
        piece
        for at, section in enumerate(sections, 1)
        for piece in _section(section, f"chart{at}", with_values)
    )
    title = text(origin.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="referrer" content="no-referrer">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><header><h1>{title}</h1>"
        f'<p class="soft">Version {origin.version} of the report {text(origin.report_id)} by '
        f"{text(origin.owner)}. {text(origin.exported_by)} exported it at "
        f"{moment(origin.exported_at)}, with the values that the runs had then.</p>"
        f"</header><main>{body}</main></body></html>\n"
    )


def _section(section: Section, name: str, with_values: bool) -> Iterator[str]:
    block = section.part.block
    if section.problem is not None:
        name = "The charts" if block is None else block.title or f"The {section.part.kind}"
        yield f"<p><strong>{text(name)}</strong> can't be shown: {text(section.problem)}</p>"
    elif block is None:
        yield markdown.render(section.part.text)
    elif section.chart is not None:
        chart, notes = section.chart
        yield f'<figure><div class="wide">{svg.draw(chart, name)}</div>{_notes(notes)}</figure>'
        if with_values and chart.curves:
            yield _values(chart)
    elif section.table is not None:
        yield _table(section.table, block.title)


def _notes(notes: Sequence[str]) -> str:
    lines = "<br>".join(text(note) for note in notes)
    return f"<figcaption>{lines}</figcaption>" if notes else ""


def _values(chart: Chart) -> str:
    rows = "".join(
        f'<tr><td>{text(curve.name)}</td><td class="num">{text(svg.place(chart.axis, x))}</td>'
        f'<td class="num">{number(y)}</td></tr>'
        for curve in chart.curves
        for x, y in sampled(curve, MAX_VALUES)
    )
    head = (
        f'<th>Curve</th><th class="num">{svg.X_NAMES[chart.axis]}</th>'
        f'<th class="num">{text(chart.y_name)}</th>'
    )
    return (
        f"<details><summary>Values of {text(chart.title)}</summary>"
        f"<p>At most {MAX_VALUES} points of each curve, with its lowest and highest point.</p>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )


def _table(table: RunTable, title: str) -> str:
    caption = f"<caption>{text(title)}</caption>" if title else ""
    head = "".join(f"<th>{text(column)}</th>" for column in ("run", *table.columns))
    rows = "".join(
        f"<tr><td>{text(name)}<br><small>{text(job_id)}</small></td>"
        + "".join(f"<td>{text(value)}</td>" for value in values)
        + "</tr>"
        for name, job_id, values in table.rows
    )
    return (
        f'<figure><div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{_notes(table.notes)}</figure>"
    )
