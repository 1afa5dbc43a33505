"""Moves inline scripts, styles and images of built pages into files.

The service sends a Content-Security-Policy that allows no inline content. The theme puts a short
script and a style sheet into each page, and icons into its style sheets.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from pathlib import Path
from urllib.parse import unquote

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_STYLE_OF_SVG = re.compile(r' style="(opacity|display): ([^;"]+);?"')
_ICON = re.compile(r"""url\((["'])data:image/svg\+xml;charset=utf-8,(.*?)\1\)""")
_LEFT = re.compile(r"<style|<script(?![^>]* src=)|<[^>]* (?:style|on[a-z]+)=|javascript:")
_LOADED = {
    "script": ("js", '<script src="{}"></script>'),
    "style": ("css", '<link rel="stylesheet" type="text/css" href="{}">'),
}


def move_inline_parts(folder: Path) -> None:
    """Rewrites all pages in `folder`. Raises ValueError if a page still has inline content."""
    for page in folder.rglob("*.html"):
        text = _INLINE.sub(partial(_to_file, page=page, folder=folder), page.read_text())
        # The inline styles of icons contain only properties that SVG also accepts as attributes.
        text = _STYLE_OF_SVG.sub(r' \1="\2"', text)
        if left := _LEFT.search(text):
            found = text[left.start() : left.start() + 80]
            raise ValueError(
                f"{page} still has inline content, which browsers will block: {found!r}"
            )
        page.write_text(text)
    for sheet in folder.rglob("*.css"):
        sheet.write_text(_ICON.sub(partial(_icon_to_file, sheet=sheet), sheet.read_text()))


def _icon_to_file(icon: re.Match[str], sheet: Path) -> str:
    body = unquote(icon[2])
    name = f"{_digest(body)}.svg"
    (sheet.parent / name).write_text(body)
    return f'url("{name}")'


def _to_file(part: re.Match[str], page: Path, folder: Path) -> str:
    kind, body = part.groups()
    ending, element = _LOADED[kind]
    file = folder / "_static" / f"{_digest(body)}.{ending}"
    file.write_text(body)
    return element.format(Path(os.path.relpath(file, page.parent)).as_posix())


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
