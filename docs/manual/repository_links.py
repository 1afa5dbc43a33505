"""Links of the manual to files of the repository that lie outside of `docs/`."""

from __future__ import annotations

import os
import re
from pathlib import Path

INCLUDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results/README.md": "explanation/results.md",
    "docker/README.md": "guides/images.md",
}
"""Pages of the repository, and the page of the manual that has the contents of each."""
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def resolved(text: str, page: Path, docs: Path) -> str:
    """The text of a page of the manual with links that work in the built manual.

    A link to an included page leads to the page of the manual, and a link to a folder becomes the
    folder's path. Other files are copied into the manual by Sphinx.
    """

    def link(match: re.Match[str]) -> str:
        words, path, anchor = match.groups()
        target = (page.parent / path).resolve()
        name = target.relative_to(docs.parent).as_posix()
        if name in INCLUDED:
            to = os.path.relpath(docs / INCLUDED[name], page.parent)
            return f"[{words}]({to}{anchor or ''})"
        if not target.is_dir():
            return match[0]
        return f"`{name}`" if words.strip("`/") == name else f"{words} (`{name}`)"

    return _LINK.sub(link, text)
