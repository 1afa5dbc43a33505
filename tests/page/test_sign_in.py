"""Staying signed in, and what pages of other origins can do to a browser that is signed in."""

from __future__ import annotations

import logging
import re
import threading
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from api.page.static_files import load
from dray.input.invisible import is_invisible
from service.db.models import JobRow
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import TOKEN, Watched
from tests.page.site import Site
from tests.page.test_accessibility import violations
from tests.unit.api.serving import DEADLINE_S, LiveServer, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ColorScheme, Page, Request

pytestmark = IN_BROWSER

ATTACKS = Path(__file__).with_name("foreign_page.js").read_text().partition("\n")[2]


class Foreign(BaseHTTPRequestHandler):
    """A page on another port, which records the cookies that it receives."""

    def do_GET(self) -> None:
        body = b"<!doctype html><body><a id=link>a link</a></body>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def foreign_port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    thread = threading.Thread(target=server.serve_forever, name="foreign", daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def job_id(site: Site) -> str:
    job_id = site.submit("signed-in", 1)
    site.claim(job_id, "cpu-a", 1)
    site.hands.report(job_id, 1, [site.artifact(job_id, 1, "notes.txt", b"hello\n" * 50)])
    return job_id


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(DEADLINE_S * 1000)
    yield context
    context.close()


def sign_in(page: Page, server: LiveServer, *, stay: bool = True) -> None:
    page.goto(server.url)
    page.get_by_role("heading", name="Sign in").wait_for()
    box = page.get_by_label("Stay signed in on this browser")
    assert not box.is_checked()
    box.set_checked(stay)
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_text("signed-in").first.wait_for()


def artifact_of(server: LiveServer, job_id: str) -> str:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = server.ask("GET", f"/v1/jobs/{job_id}/artifacts", headers=headers)
    found: str = answer.json()["items"][0]["id"]
    return found


def test_by_choice_all_tabs_are_signed_in_until_one_signs_out(
    context: BrowserContext, server: LiveServer, site: Site, job_id: str
) -> None:
    waiting = site.submit("waits-signed-in", 1)
    first = context.new_page()
    watched = Watched(first, server, statuses={401})
    sign_in(first, server)
    (cookie,) = context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    held = first.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert TOKEN not in held
    assert cookie["value"] not in held
    assert TOKEN not in cookie["value"]

    second = context.new_page()
    also_watched = Watched(second, server, statuses={401})
    second.goto(f"{server.url}/#/jobs/{waiting}")
    second.get_by_role("button", name="Hold").click()
    second.get_by_role("button", name="Release").wait_for()
    second.goto(f"{server.url}/#/jobs/{job_id}?tab=files")
    with second.expect_download() as download:
        second.get_by_role("link", name="notes.txt").click()
    assert Path(download.value.path()).read_bytes() == b"hello\n" * 50
    assert "/v1/jobs/" in download.value.url

    first.get_by_role("button", name="Sign out").click()
    for page in (first, second):
        page.get_by_role("heading", name="Sign in").wait_for()
    assert first.evaluate("localStorage.length + sessionStorage.length") == 0
    assert context.cookies() == []
    with_copy = {"Cookie": f"{cookie['name']}={cookie['value']}"}
    assert server.ask("GET", "/v1/jobs", headers=with_copy).status_code == 401
    assert not watched.wrong
    assert not also_watched.wrong


def test_without_the_choice_another_tab_asks_again(
    context: BrowserContext, server: LiveServer, job_id: str
) -> None:
    sign_in(context.new_page(), server, stay=False)
    assert context.cookies() == []
    other = context.new_page()
    other.goto(server.url)
    other.get_by_role("heading", name="Sign in").wait_for()


def test_a_wrong_token_and_one_with_an_invisible_character_are_named(
    context: BrowserContext, server: LiveServer
) -> None:
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("heading", name="Sign in").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for stay in (False, True):
        page.get_by_label("Stay signed in on this browser").set_checked(stay)
        page.get_by_label("Token").fill(f"{TOKEN[:4]}\u200b{TOKEN[4:]}")
        page.keyboard.press("Enter")
        page.get_by_text("an invisible character (U+200B) at position 5").wait_for()
        assert asked == []
    page.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("does not know the token").wait_for()
    assert context.cookies() == []


def test_the_page_and_the_server_agree_on_what_is_invisible(tab: Watched) -> None:
    page = tab.open()
    place = f"/page/{load().version}/lib/credentials.js"
    assigned = [
        code
        for code in range(0x3FFFF)
        if unicodedata.category(chr(code)) not in ("Cn", "Cs")  # newer Unicode has assigned more
    ]
    found = page.evaluate(
        f"""async (codes) => {{
            const {{ invisibleIn }} = await import('{place}');
            return codes.filter((code) => invisibleIn(String.fromCodePoint(code)));
        }}""",
        assigned,
    )
    assert found == [code for code in assigned if is_invisible(chr(code))]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_neither_reads_nor_writes(
    context: BrowserContext,
    server: LiveServer,
    site: Site,
    job_id: str,
    foreign_port: int,
    host: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another port of the same host is of the same site; `localhost` is another site."""
    own = context.new_page()
    sign_in(own, server)
    own.close()
    victim = site.submit("victim", 1)
    page = context.new_page()
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    page.goto(f"http://{host}:{foreign_port}/")
    base = f"{server.url}/"
    before = num_jobs(site)
    artifact = f"v1/jobs/{job_id}/artifacts/{artifact_of(server, job_id)}"
    with caplog.at_level(logging.INFO, "api.access"):
        caplog.clear()
        read = page.evaluate(ATTACKS, [base, victim, artifact])
        answered = [vars(one) for one in caplog.records if one.name == "api.access"]
    assert read == []
    assert len(answered) > 50
    assert {one["caller"] for one in answered} == {"-"}
    assert min(one["status"] for one in answered) >= 400
    assert {one["method"] for one in answered} >= {"GET", "POST", "OPTIONS"}
    sent = [one for one in asked if "cookie" in one.all_headers() and one.url.startswith(base)]
    assert bool(sent) is (host == "127.0.0.1"), "only pages of the same site send the cookie"
    assert num_jobs(site) == before
    assert server.state_of(victim) == "QUEUED"
    page.goto(server.url)
    page.get_by_text("signed-in").first.wait_for()


def num_jobs(site: Site) -> int:
    count = select(func.count()).select_from(JobRow)
    return site.hands.database.read_sync(lambda s: s.scalar(count)) or 0


def test_a_link_on_another_site_leads_to_a_reader_who_is_signed_in(
    context: BrowserContext, server: LiveServer, job_id: str, foreign_port: int
) -> None:
    sign_in(context.new_page(), server)
    page = context.new_page()

    def follow(address: str) -> None:
        page.goto(f"http://localhost:{foreign_port}/")
        page.evaluate("(to) => { document.getElementById('link').href = to; }", address)
        page.get_by_text("a link").click()

    follow(f"{server.url}/#/jobs/{job_id}")
    page.get_by_role("heading", name=re.compile("signed-in")).wait_for()
    follow(f"{server.url}/docs")
    page.get_by_role("heading", name="dray").first.wait_for()
    follow(f"{server.url}/v1/jobs/{job_id}/artifacts/{artifact_of(server, job_id)}")
    page.get_by_role("heading", name="Sign in to open this address").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="open the address").click()
    assert download.value.suggested_filename == "notes.txt"
    page.get_by_role("link", name="sign in", exact=True).click()
    page.get_by_text("signed-in").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_form_is_accessible_also_on_a_phone(
    browser: Browser, server: LiveServer, scheme: ColorScheme
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(DEADLINE_S * 1000)
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("heading", name="Sign in").wait_for()
    assert violations(page, []) == []
    page.get_by_label("Token").focus()
    page.keyboard.type("\u200b")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.get_by_label("Stay signed in on this browser").is_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="U+200B").wait_for()
    assert violations(page, []) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


@SOAK
def test_the_reader_learns_that_the_server_could_not_be_reached(
    context: BrowserContext, server: LiveServer, job_id: str
) -> None:
    page = context.new_page()
    sign_in(page, server)
    page.route("**/session", lambda route: route.abort())
    page.get_by_role("button", name="Sign out").click()
    page.get_by_text("You are still signed in").wait_for()
    page.unroute("**/session")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    wait_until(lambda: context.cookies() == [], "the cookie to be deleted")
