"""Check prose against `words.toml`: `python -m tests.plain_english [PATH ...]`.

Docstrings, comments and messages of Python files are read, the text of Markdown files without their
code, and the lines of the page's files. Without a path the files are those that `make lint` holds.
Exit code 1 if there is a finding, or more marks `plain: ok` than `words.toml` allows.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LISTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
MARK = "plain: ok"
READ = (".py", ".md", ".js", ".html")


class Kind(StrEnum):
    DOCSTRING = "docstring"
    PROSE = "prose"
    NAMES = "names"


@dataclass(frozen=True)
class Text:
    line: int
    kind: Kind
    text: str


@dataclass(frozen=True)
class Finding:
    line: int
    found: str
    instead: str


def findings(path: Path, source: str) -> list[Finding]:
    """The findings of one file, but for lines that have a mark."""
    lines = source.splitlines()
    found = {one for text in _texts(path, source) for one in _check(text)}
    return sorted(
        (one for one in found if MARK not in lines[one.line - 1]),
        key=lambda one: (one.line, one.found),
    )


def _check(text: Text) -> Iterator[Finding]:
    def at(start: int) -> int:
        return text.line + text.text.count("\n", 0, start)

    if text.kind is Kind.DOCSTRING:
        rules = LISTS["docstrings"]["never_begin_with"]
        begins = next((one for one in rules if re.match(rf"\s*{one}\b", text.text)), None)
        if begins:
            yield Finding(at(0), f"a docstring that begins with {begins!r}", "a verb, or the thing")
    for rule in LISTS["word"]:
        if (rule.get("where") == Kind.NAMES) != (text.kind is Kind.NAMES):
            continue
        proper = [m.span() for m in _spaced(rule["unless"], text.text)] if "unless" in rule else []
        for match in _spaced(rule["pattern"], text.text):
            if not any(start <= match.start() < end for start, end in proper):
                yield Finding(at(match.start()), " ".join(match[0].split()), rule["instead"])
    if text.kind is not Kind.NAMES:
        for rule in LISTS["sentence"]:
            if rule.get("where", text.kind) != text.kind:
                continue
            for match in re.finditer(rf"(?:^[\s#\"']*|[.:;]\s+)({rule['pattern']})", text.text):
                yield Finding(at(match.start(1)), match[1], rule["instead"])


def _spaced(pattern: str, text: str) -> Iterator[re.Match[str]]:
    """Whole words, where a blank of the pattern may be a line's end with its indentation."""
    spaced = pattern.replace(" ", r"[\s#]+")
    return re.finditer(rf"(?<![\w.`/-])(?:{spaced})(?![\w`/(=-]|\.\w)", text, re.IGNORECASE)


def _texts(path: Path, source: str) -> Iterator[Text]:
    match path.suffix:
        case ".py":
            yield from _of_python(source)
        case ".md":
            # Code keeps its lines, so that numbers of lines stay right.
            bare = re.sub(r"(?ms)^\s*```.*?^\s*```", lambda m: "\n" * m[0].count("\n"), source)
            yield Text(1, Kind.PROSE, re.sub(r"`[^`\n]+`|\]\([^)]*\)", "``", bare))
        case _:
            yield Text(1, Kind.PROSE, source)


def _of_python(source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = {
        node.value.lineno: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    for line, text in docstrings.items():
        yield Text(line, Kind.DOCSTRING, text)
    comment: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if comment and token.type != tokenize.NL and token.type != tokenize.COMMENT:
            yield Text(comment[0].start[0], Kind.PROSE, "\n".join(one.string for one in comment))
            comment = []
        if token.type == tokenize.COMMENT:
            comment.append(token)
            continue
        is_message = token.type == tokenize.STRING and token.string.count(" ") >= 2
        if is_message and token.start[0] not in docstrings:
            yield Text(token.start[0], Kind.PROSE, token.string)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Text(node.lineno, Kind.NAMES, _words_of(node.name))
        elif isinstance(node, ast.arg):
            yield Text(node.lineno, Kind.NAMES, _words_of(node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Text(node.lineno, Kind.NAMES, _words_of(node.id))


def _words_of(name: str) -> str:
    """`_tellsIt_so_many` as `tells it so many`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower()


def files(paths: Sequence[str]) -> list[Path]:
    """The files of Git under these paths whose prose is read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(READ)]


def main() -> int:
    paths = sys.argv[1:] or LISTS["checked"]
    num_found = num_marks = 0
    for path in files(paths) if paths else []:
        source = path.read_text()
        num_marks += source.count(MARK) if path.parent != Path(__file__).parent else 0
        for one in findings(path, source):
            num_found += 1
            print(f"{path.relative_to(ROOT)}:{one.line}: {one.found!r}: {one.instead}")
    if num_found:
        print(f"{num_found} findings; tests/plain_english/words.toml has the lists")
    if num_marks > LISTS["most_marks"]:
        print(f"{num_marks} marks {MARK!r}; at most {LISTS['most_marks']} are allowed")
    return 1 if num_found or num_marks > LISTS["most_marks"] else 0


if __name__ == "__main__":
    sys.exit(main())
