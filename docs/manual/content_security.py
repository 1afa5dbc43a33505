"""Moves the inline scripts, styles and images of built pages into files.

The service answers with a Content-Security-Policy that allows nothing inline. The theme has a short
script and a style sheet in each page, and icons in its style sheets.
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
    """Rewrites every page below `folder`. Raises ValueError if a page still has an inline part."""
    for page in folder.rglob("*.html"):
        text = _INLINE.sub(partial(_to_file, page=page, folder=folder), page.read_text())
        # Icons have no other properties than these, which may be attributes within an SVG.
        text = _STYLE_OF_SVG.sub(r' \1="\2"', text)
        if left := _LEFT.search(text):
            found = text[left.start() : left.start() + 80]
            raise ValueError(f"{page} has a part that no browser will use: {found!r}")
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
