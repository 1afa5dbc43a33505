"""The link that a server without a tokens file prints signs a browser in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from api.__main__ import sign_in_link
from api.security import local_callers
from tests.marks import IN_BROWSER, SOAK
from tests.unit.api.serving import LiveServer, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = IN_BROWSER


@pytest.fixture
def guarded(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveServer]:
    """A server with a job, that sees all callers as processes of another user from now on."""
    with serving(tmp_path_factory.mktemp("guarded") / "home") as server:
        server.submit(name="mine")
        monkeypatch.setattr(local_callers, "is_of_own_user", lambda request: False)
        yield server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def link_of(server: LiveServer) -> str:
    link = sign_in_link(server.settings, server.url)
    assert link is not None
    return link


def test_the_link_opens_the_jobs_and_leaves_the_address(guarded: LiveServer, page: Page) -> None:
    requests = []
    page.on("request", lambda request: requests.append((request.url, request.headers)))
    page.goto(link_of(guarded))
    page.wait_for_selector("text=mine")
    assert page.url == f"{guarded.url}/"
    assert all("token" not in url for url, _ in requests)
    assert all("token" not in headers.get("referer", "") for _, headers in requests)
    page.reload()
    page.wait_for_selector("text=mine")
    assert page.evaluate("history.length") == 2  # with the tab's empty page


@SOAK
def test_the_link_also_signs_in_a_tab_that_asks_for_the_token(
    guarded: LiveServer, page: Page
) -> None:
    page.goto(guarded.url)
    page.wait_for_selector("text=the link that the server prints when it starts")
    page.evaluate("(link) => { location.href = link; }", link_of(guarded))
    page.wait_for_selector("text=mine")
    assert page.url == f"{guarded.url}/"


@SOAK
def test_a_link_with_another_token_signs_nobody_in(guarded: LiveServer, page: Page) -> None:
    page.goto(f"{guarded.url}/#token=somebodys-own")
    page.wait_for_selector("text=There is no such page")
    page.click("text=Go to the jobs")
    page.get_by_role("heading", name="Sign in").wait_for()
    assert page.evaluate("sessionStorage.getItem('dray.token')") is None
