"""Comments and docstrings name their subject: no sentence is a bare 'What ...' or 'Who ...'."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHECKED = ("api", "dray", "service", "ray_workers")
"""Packages whose prose is checked."""

_BARE = re.compile(r"(What|Who|Whose|Whoever)\b")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and strings that stand below an attribute."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, those on consecutive lines as one text."""
    begin, last, text = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        is_whole_line = not token.line[: token.start[1]].strip()
        if text and (line != last + 1 or not is_whole_line):
            yield begin, text
            text = ""
        begin = begin if text else line
        text, last = f"{text} {token.string.lstrip('#: ')}", line
    if text:
        yield begin, text


def _bare_sentences(source: str) -> list[str]:
    found = []
    for line, text in (*_docstrings(source), *_comments(source)):
        for sentence in _SENTENCE_END.split(text):
            words = " ".join(sentence.split())
            if _BARE.match(words) and not words.endswith("?"):
                found.append(f"{line}: {words}")
    return found


@pytest.mark.parametrize("package", CHECKED)
def test_no_sentence_is_a_bare_what_or_who(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{sentence}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for sentence in _bare_sentences(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('"""What a rank reports."""', 1),
        ('size = 1\n"""Bytes. Whoever reads it waits."""', 1),
        ("x = 1  # What is left.", 1),
        ("# The ranks wait.\n# Who leaves is ended.", 1),
        ('"""The state: What is known of a rank."""', 1),
        ('"""What is a rank?"""', 0),
        ('"""The rank whose\nWhat is a name."""', 0),
        ('text = "What a string says is not prose."', 0),
    ],
)
def test_the_check_finds_sentences_in_docstrings_and_comments(source: str, number: int) -> None:
    assert len(_bare_sentences(source)) == number
