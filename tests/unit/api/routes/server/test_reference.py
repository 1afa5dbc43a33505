"""The reference page: it is complete, and doesn't contain anything that a browser would fetch or
run."""

from __future__ import annotations

from html.parser import HTMLParser

import httpx
import pytest

from api import reference
from tests.unit.api.serving import LiveServer

ACTIVE = frozenset({"script", "link", "img", "iframe", "object", "embed", "form", "base", "svg"})


class Page(HTMLParser):
    """The anchors, links and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


@pytest.fixture(scope="module")
def text(server: LiveServer) -> str:
    response = server.ask("GET", "/docs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    return response.text


def test_every_operation_and_type_is_there_once_and_every_link_leads_somewhere(
    http: httpx.Client, text: str
) -> None:
    page = Page(text)
    document = http.get("/openapi.json").json()
    operations = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    types = [f"schema-{name}" for name in document["components"]["schemas"]]
    assert sorted(page.ids) == sorted([*operations, *types, "schemas"])
    assert {link.removeprefix("#") for link in page.links} <= {*page.ids, "openapi.json"}


def test_a_browser_loads_and_runs_nothing(http: httpx.Client, text: str) -> None:
    page = Page(text)
    assert not page.tags & ACTIVE
    assert not {name for name in page.names if name.startswith("on") or name == "style"}
    policy = http.get("/docs").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_what_a_description_says_is_text() -> None:
    field = {"type": "string", "description": "<script>`a<b`", "default": "<i>"}
    page = reference.render(
        {
            "info": {"title": "<b>", "version": "1", "description": "x & y"},
            "paths": {},
            "components": {"schemas": {"A": {"properties": {"<u>": field}}}},
        }
    )
    assert not Page(page).tags & {"script", "b", "i", "u"}
    assert "<code>a&lt;b</code>" in page


def test_the_reference_needs_no_token_and_is_the_same_for_all(
    site: LiveServer, ann: httpx.Client
) -> None:
    for path in ("/docs", "/openapi.json"):
        answer = site.ask("GET", path)
        assert answer.status_code == 200
        assert answer.content == ann.get(path).content
