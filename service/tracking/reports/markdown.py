"""Renders Markdown as HTML that contains no script, no foreign resource and no raw HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

DEEPEST: Final = 20
"""Maximum nesting of lists and quotes; what is deeper remains text."""


class _SafeMarkdown(MarkdownIt):
    def validateLink(self, url: str) -> bool:  # noqa: N802 - the name in the base class
        """Whether the address is a web address. Other links, such as `javascript:`, remain text."""
        try:
            parts = urlsplit(url)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and bool(parts.netloc)


_parser = _SafeMarkdown("commonmark", {"html": False, "maxNesting": DEEPEST})
_parser.enable(["table", "strikethrough"])


def render(text: str) -> str:
    """Return the text as HTML. HTML in the text is shown as text, and images become links."""
    tokens = _parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"  # h1 is the report's title
        elif token.type in ("th_open", "td_open"):
            token.attrs = {}  # styles, which the policy of the page forbids
        elif token.children:
            token.children = _without_images(token.children)
    found: str = _parser.renderer.render(tokens, _parser.options, {})
    return found


def _without_images(tokens: Sequence[Token]) -> list[Token]:
    """Replace each image by a link to it or, within a link, by its description."""
    found: list[Token] = []
    is_in_link = False
    for token in tokens:
        if token.type in ("link_open", "link_close"):
            is_in_link = token.type == "link_open"
            if is_in_link:
                token.attrs = _to(str(token.attrs["href"]))
        if token.type != "image":
            found.append(token)
            continue
        address = str(token.attrs["src"])
        label = Token("text", "", 0, content=token.content or address)
        if is_in_link:
            found.append(label)
            continue
        link = Token("link_open", "a", 1, attrs=_to(address))
        found += [link, label, Token("link_close", "a", -1)]
    return found


def _to(address: str) -> dict[str, str | int | float]:
    """Return the attributes of a link."""
    return {"href": address, "rel": "noopener noreferrer"}
