"""The page with a server that is slow, cut off, busy or of another version, with a clock that is
wrong, and without a mouse."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from ray_workers.shared.contracts import Cause
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import Watched
from tests.page.site import Site, run
from tests.unit.api.serving import LiveServer, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = IN_BROWSER

PROBLEM = '{"code": "test", "title": "It is too much", "detail": "it is too much"}'
STALLS_ONCE = """
const real = window.fetch;
let hasStalled = false;
window.fetch = async (url, options) => {
  const response = await real(url, options);
  if (hasStalled || !String(url).includes('/v1/jobs?')) return response;
  hasStalled = true;
  const { signal } = options;
  const start = (body) => signal.addEventListener('abort', () => body.error(signal.reason));
  return new Response(new ReadableStream({ start }), response);
};
"""
"""The first list of jobs begins but never ends."""


@pytest.fixture(scope="module")
def job_id(site: Site) -> str:
    """A job that has trained and ended."""
    return site.ended("has-ended", Cause.SUCCEEDED, 1, node="cpu-a", workers=1)


def refused(status: int) -> object:
    """Return a handler that answers each request in this way."""

    def answer(route: Route) -> None:
        route.fulfill(status=status, content_type="application/problem+json", body=PROBLEM)

    return answer


def shows(page: Page, text: str | re.Pattern[str], within: str = "#app") -> None:
    page.locator(within).get_by_text(text).first.wait_for()


@SOAK
def test_answers_that_are_cut_off_are_asked_for_again_after_a_while(
    job_id: str, tab: Watched
) -> None:
    """An answer's head must not wake the requests that wait for the server to come back."""
    page = tab.page
    page.clock.install()
    tab.open(f"jobs/{job_id}")
    page.clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))
    page.route("**/v1/**", lambda route: route.fulfill(status=200, body='{"items": ['))
    page.clock.run_for(61_000)  # until each part of the page has asked
    shows(page, re.compile("The server has not answered"))
    before = len(tab.asked)
    page.wait_for_timeout(200)
    assert len(tab.asked) <= before + 10


@SOAK
def test_an_answer_that_stops_half_way_is_given_up(job_id: str, tab: Watched) -> None:
    page = tab.page
    page.clock.install()
    page.add_init_script(STALLS_ONCE)
    tab.open()
    page.locator(".loading").wait_for()
    page.clock.fast_forward(61_000)
    shows(page, "has-ended")


@SOAK
def test_a_busy_server_is_asked_again_for_events(job_id: str, tab: Watched) -> None:
    tab.statuses.add(429)
    tab.page.route("**/events", refused(429), times=1)
    page = tab.open(f"jobs/{job_id}?tab=events")
    shows(page, "trained to its end", "table")


@SOAK
def test_a_document_is_checked_once_the_server_is_back(job_id: str, tab: Watched) -> None:
    tab.statuses |= {404, 503}
    tab.page.route("**/v1/jobs?dry_run=true", refused(503), times=1)
    tab.page.route("**/examples.json", refused(404))
    page = tab.open("submit")
    shows(page, "It can't be checked at the moment")
    shows(page, "Valid", ".verdict.right")
    assert page.get_by_label("Template").locator("option").all_inner_texts() == ["choose …"]


@SOAK
def test_nothing_is_said_to_be_none_before_the_server_has_said_so(
    job_id: str, tab: Watched
) -> None:
    tab.statuses.add(500)
    page = tab.page
    waiting: list[Route] = []
    for what in ("checkpoints", "artifacts", "logs?*", "events"):
        page.route(f"**/v1/jobs/*/{what}", lambda route: waiting.append(route))
    tab.open(f"jobs/{job_id}?tab=files")
    for name in ("Artifacts", "Checkpoints"):
        card = page.locator(".card", has=page.get_by_role("heading", name=name))
        shows(page, "Loading …")
        assert "None" not in card.inner_text()
    page.get_by_role("tab", name="Logs").click()
    page.locator(".log .loading").wait_for()
    page.get_by_role("tab", name="Events").click()
    page.locator("#panel .loading").wait_for()
    page.route("**/metrics?*", refused(500))
    page.get_by_role("tab", name="Ranks").click()
    shows(page, "it is too much", "#panel")
    page.route("**/v1/schema", refused(500))
    page.get_by_role("tab", name="Document").click()
    shows(page, "it is too much", "#panel")
    page.route("**/v1/jobs?*", refused(500))
    tab.open("cluster")
    shows(page, "it is too much")


@SOAK
def test_a_job_that_is_deleted_meanwhile_is_not_shown_as_if_it_were_there(
    site: Site, tab: Watched
) -> None:
    tab.statuses.add(404)
    job_id = site.ended("to-delete", Cause.SUCCEEDED, 2, node="cpu-a", workers=1)
    with tab.page.expect_response(lambda one: one.url.endswith("/events") and one.status == 204):
        page = tab.open(f"jobs/{job_id}")
    run(site.hands.jobs.delete(job_id))
    shows(page, re.compile("there is no job"), ".failure")


@SOAK
def test_a_readers_clock_may_be_wrong(site: Site, job_id: str, tab: Watched) -> None:
    tab.page.clock.install(time=datetime.now(UTC) + timedelta(days=1, minutes=1))
    site.hands.now = datetime.now(UTC)
    site.submit("just-now")
    page = tab.open("jobs?text=just-now")
    when = page.locator(".jobs td.when")
    wait_until(lambda: when.inner_text() == "now", "the time by the server's clock")


def test_an_answer_of_another_version_spoils_one_place_alone(job_id: str, tab: Watched) -> None:
    page = tab.page
    page.route(f"**/v1/jobs/{job_id}", lambda route: route.fulfill(json={"id": job_id}))
    page.goto(f"{tab.server.url}/#/jobs/{job_id}")
    shows(page, re.compile("can't be shown: the server can't be reached, or was upgraded"))
    page.get_by_role("link", name="Jobs", exact=True).click()
    shows(page, "has-ended")
    assert page.title() == "Jobs - dray"
    assert all(re.match(r"console: \w+Error: ", one) for one in tab.wrong)
    tab.wrong.clear()


def test_a_curve_is_read_and_zoomed_by_keys(job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?keys=train/loss")
    panel = page.get_by_role("region", name="train/loss")
    panel.locator("canvas").wait_for()
    panel.get_by_role("application").focus()
    page.keyboard.press("Home")
    shows(page, "step 1", ".keys")
    page.keyboard.press("ArrowRight")
    shows(page, "step 6", ".keys")
    assert panel.locator(".keys").get_attribute("aria-live") == "polite"
    with page.expect_response(re.compile("until_step=")):
        page.keyboard.press("+")
    page.keyboard.press("-")
    page.get_by_role("button", name="Show all").wait_for(state="detached")


def test_who_signs_out_leaves_nothing_in_the_tab(job_id: str, tab: Watched) -> None:
    page = tab.open("submit")
    page.get_by_label("Job document").fill("a draft")
    wait_until(lambda: page.evaluate("sessionStorage.length") == 2, "a token and a draft")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0


@SOAK
def test_the_content_is_skipped_to_where_a_token_is_asked_for(
    browser: Browser, server: LiveServer
) -> None:
    context = browser.new_context()
    tab = Watched(context.new_page(), server, statuses={401})
    page = tab.open()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    context.close()
    assert not tab.wrong
