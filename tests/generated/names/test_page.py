"""The web page shows generated names unchanged, in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.generated.names.conftest import seeds
from tests.generated.names.doors import entered
from tests.generated.names.drawing import Case, Draw
from tests.generated.names.exits import name_of
from tests.generated.names.sites import Sites
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import browser
from tests.seeds import noted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]
FEW = 25
pytestmark = [IN_BROWSER, SOAK]


def test_the_page_shows_names_as_they_are(sites: Sites, browser: Browser, tmp_path: Path) -> None:
    page = browser.new_context().new_page()
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    for seed in noted(seeds()[:FEW]):
        case = Draw(seed).case()
        case.user = None  # the browser has no token
        with entered(sites, tmp_path, case) as doors:
            job_id = doors.put()
            page.goto(f"{doors.server.url}/#/jobs/{job_id}")
            shows(page, case)
    assert not wrong


def shows(page: Page, case: Case) -> None:
    page.wait_for_function(
        "(name) => document.querySelector('h1')?.textContent === name", arg=name_of(case)
    )
    labels = case.document.get("labels", {})
    for text in [*labels, *labels.values(), *(f"#{tag}" for tag in case.tags)]:
        page.wait_for_function(
            "(text) => document.querySelector('main').textContent.includes(text)", arg=text
        )
    for key in case.metrics:
        page.locator(f"[aria-label={quoted(key)}]").first.wait_for(state="attached")


def quoted(text: str) -> str:
    """Return a string in a CSS selector."""
    return '"' + "".join(f"\\{ord(c):x} " if c in '"\\' else c for c in text) + '"'
