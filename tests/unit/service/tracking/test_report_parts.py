"""The text of a report: where charts and tables begin and end, and what is refused."""

from __future__ import annotations

import random

import pytest
from markdown_it import MarkdownIt

from dray.report_requests import MAX_BLOCKS, ChartBlock, TableBlock
from service.domain.errors import InvalidDocument
from service.tracking.reports.parts import MAX_BLOCK, parameters_of, parts_of
from tests.seeds import drawn

CHART = "```chart\nmetrics: val/loss\nwhere: experiment = 'rates'\n```"
JOB = "job-06f2k9z3qw8m5x1yv7t4b0n2ra"


def test_a_report_is_divided_into_its_parts() -> None:
    text = (
        f"# Title\r\n\r\n{CHART}\r\nBetween.\n\n~~~table\n"
        f'{{"runs": ["{JOB}"], "columns": "state,lr"}}\n~~~\n\n'
    )
    title, chart, between, table = parts_of(text)
    assert [(part.kind, part.line) for part in (title, chart, between, table)] == [
        ("text", 1),
        ("chart", 3),
        ("text", 7),
        ("table", 9),
    ]
    assert isinstance(chart.block, ChartBlock)
    assert chart.block.metrics == ("val/loss",)
    assert parameters_of(chart.block) == {"where": "experiment = 'rates'", "limit": 10}
    assert isinstance(table.block, TableBlock)
    assert parameters_of(table.block) == {
        "where": f'id in ("{JOB}")',
        "columns": "state,lr",
        "limit": 1,
    }
    assert parts_of(" \n\n") == ()


SHOWN = (
    f"````\n{CHART}\n````",
    "```charts\nx\n```",
    "```python\nchart\n```",
    "~~~ text\n```chart\n~~~",
    "text ```chart",
    "``` `chart`\nx",
)


@pytest.mark.parametrize("text", SHOWN, ids=range(len(SHOWN)))
def test_other_blocks_of_code_remain_text(text: str) -> None:
    (part,) = parts_of(text)
    assert (part.kind, part.text) == ("text", text)


MANY = "\n".join([CHART] * (MAX_BLOCKS + 1))
SWEEP = f"array-{JOB.removeprefix('job-')}"
COLUMNS = ",".join(f"m/{n}" for n in range(21))
REFUSED = (
    ("x\n```chart\nmetrics: [a]\n```", 2, "select runs"),
    ("```chart\nwhere: a/b > 1\n```", 2, "the field 'metrics' is missing"),
    ("```chart\nmetrics: a\nwhere: a/b >\n```", 3, "where: column 6: expected a number"),
    ("a\n\n```chart\nmetrics: a\n\nwhere: [\n```", 6, "expected"),
    ("```chart\nmetrics: a\nwhere: a/b > 1\nsmoothing: 1.5\n```", 4, "smoothing: must be"),
    ("```chart\nmetrics: a\nwhere: a/b > 1\nsmoothing: .nan\n```", 4, "smoothing: must be"),
    ("```chart\nmetrics: a\nwhere: a/b > 1\ncolour: 3\n```", 4, "there is no field 'colour'"),
    ("```chart\nmetrics: a\nwhere: a/b > 1\nlimit: 21\n```", 1, "21 runs are too many"),
    ("```chart\nmetrics: [a, b, c]\nwhere: a/b > 1\nlimit: 20\n```", 1, "60 curves"),
    ("```chart\nmetrics: [a, a]\nwhere: a/b > 1\n```", 1, "twice"),
    ("```chart\nmetrics: [a, b, c, d, e]\nwhere: a/b > 1\n```", 2, "metrics: must have at most 4"),
    ("```chart\nmetrics: []\nwhere: a/b > 1\n```", 2, "metrics: must have at least 1"),
    (f"```chart\nmetrics: a\nruns: [{JOB}, {JOB}]\n```", 1, "twice"),
    (f"```chart\nmetrics: a\nruns: [{JOB}]\nsort: lr\n```", 1, "can't be combined"),
    (f"```chart\nmetrics: a\nruns: {JOB}\n```", 3, "runs: must be a list"),
    ("```chart\nmetrics: a\nruns: [job-../..]\n```", 3, "runs/0: must match"),
    (f"```chart\nmetrics: a\nsweep: {SWEEP}\nsort: tags\n```", 4, "can't be sorted by tags"),
    ("```chart\nmetrics: a\nwhere: a/b > 1\ny_min: 2\ny_max: 1\n```", 1, "less than"),
    ("```chart\nmetrics: a\nmetrics: b\n```", 3, "appears twice"),
    ("```chart\nmetrics: &x [a]\nruns: *x\n```", 3, "aliases"),
    ("```chart\n```", 1, "has no fields"),
    ("```chart\njust words\n```", 1, "has no fields"),
    ("```chart\nmetrics: a", 1, "has no end"),
    ("```chart loss\nmetrics: a\n```", 1, "contains only ```chart"),
    ("```Chart\nmetrics: a\n```", 1, "contains only ```chart"),
    ("- ```chart\n  metrics: a\n  ```", 1, "must begin at the start"),
    ("> 1. ~~~table\n", 1, "must begin at the start"),
    (" ```chart\nmetrics: a\n```", 1, "must begin at the start"),
    ("\n    ```chart", 2, "must begin at the start"),
    ("```table\nwhere: a/b > 1\ncolumns: state,,lr lr\n```", 3, "columns: "),
    (f"```table\nwhere: a/b > 1\ncolumns: {COLUMNS}\n```", 3, "at most 20"),
    (f"```table\nwhere: a/b > 1\ntitle: {'x' * MAX_BLOCK}\n```", 1, "more than 10,000 characters"),
    (f"```table\nwhere: a/b > 1\nlimit: {'9' * 6000}\n```", 3, "more than 4,300 digits"),
    (MANY, 4 * MAX_BLOCKS + 1, "at most 20 charts and tables"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "line", "says"), REFUSED, ids=range(len(REFUSED)))
def test_an_error_names_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parts_of(text)
    assert caught.value.message.startswith(f"line {line}: ")
    assert says in caught.value.message
    assert caught.value.pointer == "/text"


PIECES = (
    CHART,
    "~~~~table\nwhere: state = 'FAILED'\n~~~~",
    "```table\nwhere: a/b > 1\n```  ",
    "````\n```chart\n````",
    "```\ncode\n```",
    "~~~ x\n```chart\n~~~",
    "text",
    "    indented",
    "- item\n  more",
    "> quote",
    "``` not `a` fence",
    "# heading",
    "",
    "---",
    "`` ` ``",
)


@pytest.mark.parametrize("seed", drawn(300))
def test_blocks_are_those_of_commonmark(seed: int) -> None:
    """A parser that shares no code with the service finds the same blocks."""
    randomly = random.Random(seed)
    # A blank line ends lists and quotes, which the parser would continue.
    text = "\n\n".join(randomly.choices(PIECES, k=randomly.randint(1, 12)))
    found = [(part.kind, part.line) for part in parts_of(text) if part.block is not None]
    tokens = MarkdownIt("commonmark").parse(text)
    wanted = [
        (token.info.strip(), token.map[0] + 1)
        for token in tokens
        if token.type == "fence" and token.map and token.info.strip() in ("chart", "table")
    ]
    assert found == wanted
