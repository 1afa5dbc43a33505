"""Divides the text of a report into Markdown, charts and tables.

A chart or a table is a block of code whose fence begins at the start of a line:

    ```chart
    metrics: [val/loss]
    where: experiment = "rates"
    ```
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from dray.documents import parse_yaml, position_of
from dray.errors import SpecError
from dray.input import validation
from dray.report_requests import MAX_BLOCKS, MAX_COLUMNS, ChartBlock, RunBlock, TableBlock
from service.domain.errors import InvalidDocument, InvalidSearch
from service.domain.tracking.columns import parse_columns, parse_sort
from service.domain.tracking.search import MAX_CHARS, parse_search

MAX_BLOCK = 10_000
"""Maximum number of characters of a block."""
KINDS: dict[str, type[ChartBlock] | type[TableBlock]] = {"chart": ChartBlock, "table": TableBlock}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_NESTED = re.compile(r"[\s>*+\-0-9.)]*(?:`{3,}|~{3,})[ \t]*(chart|table)[ \t]*")


@dataclass(frozen=True)
class PartOfText:
    """A piece of a report."""

    line: int
    """Number of its first line in the report's text, starting at 1."""
    text: str = ""
    """Markdown, if the part is no block."""
    block: ChartBlock | TableBlock | None = None

    @property
    def kind(self) -> Literal["text", "chart", "table"]:
        if self.block is None:
            return "text"
        return "chart" if isinstance(self.block, ChartBlock) else "table"


@lru_cache(maxsize=64)
def parts_of(text: str) -> tuple[PartOfText, ...]:
    """Return the parts of a report. Raises InvalidDocument with the line of the first error."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    parts: list[PartOfText] = []
    start = 0
    for number, (kind, first, end) in enumerate(_fenced(lines), 1):
        if number > MAX_BLOCKS:
            raise _wrong(first, f"a report can have at most {MAX_BLOCKS} charts and tables")
        parts += _markdown(lines, start, first)
        parts.append(PartOfText(first + 1, block=_block(kind, lines[first + 1 : end], first + 1)))
        start = end + 1
    return (*parts, *_markdown(lines, start, len(lines)))


def parameters_of(block: RunBlock) -> dict[str, Any]:
    """Return the parameters of `GET /v1/jobs` that select the runs of a block."""
    where = block.where
    if block.runs:
        ids = ", ".join(f'"{each}"' for each in block.runs)
        where = f"id in ({ids})"
    columns = block.columns if isinstance(block, TableBlock) else None
    given = {"where": where, "array": block.sweep, "sort": block.sort, "columns": columns}
    return {name: value for name, value in given.items() if value is not None} | {
        "limit": block.num_runs
    }


def _markdown(lines: Sequence[str], start: int, end: int) -> list[PartOfText]:
    text = "\n".join(lines[start:end])
    return [PartOfText(start + 1, text)] if text.strip() else []


def _fenced(lines: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the kind of each chart and table, with the indices of its first and last line."""
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        info = "" if fence is None else lines[at][fence.end() :].strip()
        if fence is None or (fence[1][0] == "`" and "`" in info):
            if nested := _NESTED.fullmatch(lines[at]):
                raise _wrong(at, f"the {nested[1]} must begin at the start of the line")
            at += 1
            continue
        kind = info.partition(" ")[0].lower()
        end = next((n for n in range(at + 1, len(lines)) if _closes(lines[n], fence[1])), None)
        if kind in KINDS:
            if info != kind:
                raise _wrong(at, f"a {kind} begins with a line that contains only ```{kind}")
            if not lines[at].startswith(fence[1]):
                raise _wrong(at, f"the {kind} must begin at the start of the line")
            if end is None:
                raise _wrong(at, f"the {kind} has no end: add a line that contains only {fence[1]}")
            yield kind, at, end
        at = len(lines) if end is None else end + 1


def _closes(line: str, mark: str) -> bool:
    """Whether the line is the end of a block that began with `mark`."""
    found = _FENCE.match(line)
    return found is not None and found[1].startswith(mark) and not line[found.end() :].strip()


def _block(kind: str, lines: Sequence[str], before: int) -> ChartBlock | TableBlock:
    """Return the block whose lines follow the first `before` lines of the report."""
    text = "\n".join(lines)
    if len(text) > MAX_BLOCK:
        raise _wrong(before - 1, f"the {kind} has more than {MAX_BLOCK:,} characters")
    source = f"the {kind}"
    try:
        document = parse_yaml(text, source=source)
    except SpecError as error:
        found = re.match(rf"{source}, line (\d+), column (\d+): (.*)", str(error), re.DOTALL)
        line, message = (int(found[1]), found[3]) if found else (0, str(error))
        raise _wrong(before + line - 1, message) from None
    if not isinstance(document, dict):
        example = "metrics: [val/loss]" if kind == "chart" else "where: state = 'RUNNING'"
        raise _wrong(before - 1, f"the {kind} has no fields, such as `{example}`")
    try:
        validation.check_values(document)
        block = validation.check_as(KINDS[kind], document)
        _check(block)
    except (validation.Fault, InvalidSearch) as error:
        detail = error.message if isinstance(error, InvalidSearch) else error.detail
        position = position_of(text, error.pointer or "") if error.pointer else None
        line = before - 1 if position is None else before + position[0] - 1
        field = (error.pointer or "").lstrip("/")
        raise _wrong(line, f"{field}: {detail}" if field else detail, error.hint) from None
    return block


def _check(block: ChartBlock | TableBlock) -> None:
    """Raise InvalidSearch if the runs of the block can't be listed."""
    if block.where is not None and len(block.where) <= MAX_CHARS:
        parse_search(block.where)
    if block.sort is not None:
        parse_sort(block.sort)
    if isinstance(block, TableBlock):
        found = parse_columns(block.columns)
        if len(found) > MAX_COLUMNS:
            message = f"{len(found)} columns are too many: at most {MAX_COLUMNS} are allowed"
            raise InvalidSearch(message, pointer="/columns")


def _wrong(index: int, message: str, hint: str | None = None) -> InvalidDocument:
    return InvalidDocument(f"line {index + 1}: {message}", pointer="/text", hint=hint)
