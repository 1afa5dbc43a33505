"""Includes pages of the repository in the manual, and resolves links to files outside `docs/`."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

INCLUDED = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/results/README.md": "explanation/results.md",
    "docker/README.md": "guides/images.md",
}
"""Maps pages of the repository to the pages of the manual that include or replace them."""
_NOT_COPIED = (".md", ".py")
_INCLUDE = re.compile(r"```\{include\} (\S+)\n```")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def resolved(text: str, page: Path, docs: Path) -> str:
    """Returns a page's text with its included pages, and with links that work in the manual."""

    def included(match: re.Match[str]) -> str:
        source = (page.parent / match[1]).resolve()
        return _with_links(source.read_text(), source, page, docs)

    return _INCLUDE.sub(included, _with_links(text, page, page, docs))


def _with_links(text: str, source: Path, page: Path, docs: Path) -> str:
    """Returns the text of `source` with its links rewritten for inclusion in `page`."""
    return _LINK.sub(partial(_link, source=source, page=page, docs=docs), text)


def _link(match: re.Match[str], source: Path, page: Path, docs: Path) -> str:
    """Rewrites a link. A link to an included page leads to the page of the manual, and a link
    to a folder, a program or another page of the repository is replaced by its path. Sphinx
    copies other files into the manual."""
    words, path, anchor = match.groups()
    target = (source.parent / path).resolve()
    name = target.relative_to(docs.parent).as_posix()
    if name in INCLUDED:
        target = docs / INCLUDED[name]
    elif target.is_dir() or (target.suffix in _NOT_COPIED and not target.is_relative_to(docs)):
        return f"`{name}`" if words.strip("`/") == name else f"{words} (`{name}`)"
    return f"[{words}]({os.path.relpath(target, page.parent)}{anchor or ''})"
