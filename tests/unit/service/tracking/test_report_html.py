"""The exported file contains nothing that runs or loads, whatever is in the report."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from service.domain.charts.svg import Chart, ChartCurve
from service.tracking.reports import html, markdown
from service.tracking.reports.html import ExportOrigin, Section
from service.tracking.reports.parts import PartOfText, parts_of
from service.tracking.reports.runs import RunTable
from tests.seeds import drawn

EVIL = '</title></style><script>alert(1)</script><img src=x onerror="alert(2)">'
ORIGIN = ExportOrigin(EVIL, "report-1", 3, EVIL, EVIL, datetime(2026, 11, 30, 9, 5, tzinfo=UTC))
TEXT = frozenset(
    {
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "p",
        "a",
        "em",
        "strong",
        "s",
        "code",
        "pre",
        "ul",
        "ol",
        "li",
        "blockquote",
        "hr",
        "br",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
)
PAGE = TEXT | {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "header",
    "main",
    "figure",
    "figcaption",
    "div",
    "details",
    "summary",
    "caption",
    "small",
    "svg",
    "desc",
    "text",
    "path",
    "circle",
    "clippath",
    "rect",
    "g",
}
ATTRIBUTES = frozenset(
    {
        "href",
        "rel",
        "class",
        "start",
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "xmlns",
        "viewbox",
        "width",
        "height",
        "role",
        "aria-labelledby",
        "id",
        "x",
        "y",
        "d",
        "r",
        "cx",
        "cy",
        "text-anchor",
        "transform",
        "clip-path",
        "stroke-width",
        "opacity",
        "stroke-dasharray",
    }
)
VOID = {"hr", "br", "meta"}


class Checked(HTMLParser):
    """Reads HTML, and fails at a tag, an attribute or an address that is not expected."""

    def __init__(self, tags: frozenset[str]) -> None:
        super().__init__()
        self.tags = tags
        self.text: list[str] = []
        self.policies: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        assert tag in self.tags, tag
        given = dict(attrs)
        assert set(given) <= ATTRIBUTES, given
        assert len(given) == len(attrs)
        for name, value in attrs:
            if name == "href":
                assert value is not None
                assert value.startswith(("http://", "https://")), value
                assert tag == "a"
            elif name == "http-equiv":
                assert value == "Content-Security-Policy"
                self.policies.append(given["content"] or "")
            elif name == "clip-path":
                assert value is not None
                assert value.startswith("url(#chart")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"a processing instruction: {data}")


def checked(text: str, tags: frozenset[str] = PAGE) -> Checked:
    parser = Checked(frozenset(tags))
    parser.feed(text)
    parser.close()
    assert not parser._open
    return parser


TOKENS = (
    "<script>",
    "</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<!--",
    "-->",
    "<?php",
    "<![CDATA[",
    "]]>",
    "<a href='javascript:alert(1)'>",
    "javascript:alert(1)",
    "&#106;",
    "JaVaScRiPt&colon;x",
    "data:text/html,<script>",
    "vbscript:x",
    "//evil.example",
    "http://a.b/c",
    'https://a.b/"onclick="x',
    "http:javascript:x",
    "http://",
    "https://[",
    "file:///etc",
    "[",
    "]",
    "(",
    ")",
    "](",
    "![",
    "<",
    ">",
    "<http://a.b>",
    "<javascript:x>",
    "`",
    "``",
    "```",
    "~~~",
    "*",
    "**",
    "_",
    "__",
    "~~",
    "\n",
    "\n\n",
    "\n- ",
    "\n1. ",
    "\n> ",
    "\n# ",
    "\n| a | b |\n|:-|-:|\n| ",
    " | ",
    "\\",
    "&lt;",
    "&amp;quot;",
    "&#0;",
    '"',
    "'",
    ' title="',
    "[x]: javascript:y\n",
    "[x]",
    '[y]: http://ok.example "onload=x"\n',
    "[y]",
    "word",
    " ",
    "\t",
    "    ",
    "é",
    "学",
    "\u202e",
    "\0",
)


def hostile(randomly: random.Random) -> str:
    return "".join(randomly.choices(TOKENS, k=randomly.randint(1, 60)))


@pytest.mark.parametrize("seed", drawn(40))
def test_hostile_markdown_is_harmless(seed: int) -> None:
    randomly = random.Random(seed)
    for _ in range(25):
        checked(markdown.render(hostile(randomly)), TEXT)


def test_markdown_is_rendered() -> None:
    found = markdown.render(
        "# A\n\n*b* **c** ~~d~~ `e` [f](https://g.example/h?i=1&j=2)\n\n1. k\n2. l\n\n"
        "|m|n|\n|-:|:-|\n|o|p|\n\n![q](https://g.example/r.png) ![](http://s.example)\n\n"
        "[![t](http://u.example)](http://v.example)\n\n```python\nw < x\n```\n"
    )
    assert "<h2>A</h2>" in found
    assert "<em>b</em> <strong>c</strong> <s>d</s> <code>e</code>" in found
    assert '<a href="https://g.example/h?i=1&amp;j=2" rel="noopener noreferrer">f</a>' in found
    assert "<ol>\n<li>k</li>" in found
    assert "<th>m</th>" in found
    assert '<a href="https://g.example/r.png" rel="noopener noreferrer">q</a>' in found
    assert ">http://s.example</a>" in found
    assert '<a href="http://v.example" rel="noopener noreferrer">t</a>' in found
    assert "w &lt; x" in found


def sections(randomly: random.Random) -> list[Section]:
    chart = parts_of("```chart\nmetrics: a\nwhere: a/b > 1\n```")[0]
    table = parts_of("```table\nwhere: a/b > 1\n```")[0]
    names = [hostile(randomly) for _ in range(4)]
    curves = [
        ChartCurve(name, n, [0.0, 1.0, 2.0], [1.0, float("nan"), float(n)])
        for n, name in enumerate(names)
    ]
    return [
        Section(PartOfText(1, hostile(randomly))),
        Section(chart, chart=(Chart(names[0], names[1], curves), [names[2]])),
        Section(table, table=RunTable(names[:2], [(names[0], names[1], names[2:])], [names[3]])),
        Section(chart, problem=names[0]),
    ]


@pytest.mark.parametrize("seed", drawn(20))
@pytest.mark.parametrize("with_values", [False, True])
def test_a_hostile_report_is_harmless(seed: int, with_values: bool) -> None:
    page = checked(html.render(ORIGIN, sections(random.Random(seed)), with_values=with_values))
    assert page.policies == [html.POLICY]


def test_the_file_states_who_exported_which_version_and_when() -> None:
    page = checked(html.render(ORIGIN, [], with_values=False))
    text = "".join(page.text)
    assert f"Version 3 of the report report-1 by {EVIL}." in text
    assert f"{EVIL} exported it at 2026-11-30 09:05 UTC" in text


def test_values_are_a_table() -> None:
    chart = parts_of("```chart\nmetrics: a\nwhere: a/b > 1\n```")[0]
    curve = ChartCurve(
        "run", 0, [float(n) for n in range(1000)], [float(n % 7) for n in range(1000)]
    )
    section = Section(chart, chart=(Chart("t", "y", [curve]), []))
    without = checked(html.render(ORIGIN, [section], with_values=False))
    assert "Values of t" not in without.text
    text = html.render(ORIGIN, [section], with_values=True)
    checked(text)
    assert text.count("<tr>") - 1 == 100
