"""A real Chromium, and a server for it to look at."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from api.page.static_files import POLICY, load
from tests.page.site import PRICES, Site
from tests.unit.api.serving import DEADLINE_S, LiveServer, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response

TOKEN = "anns-token"
STATUS = re.compile(r"the server responded with a status of (\d+)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    home = tmp_path_factory.mktemp("page")
    (home / "prices.yaml").write_text(PRICES)
    (home / "tokens").write_text(f"ann:{hashlib.sha256(TOKEN.encode()).hexdigest()}:admin\n")
    files = {"prices_file": home / "prices.yaml", "tokens_file": home / "tokens"}
    with serving(home / "home", **files) as server:
        yield server


@pytest.fixture(scope="module")
def site(server: LiveServer) -> Site:
    return Site(server)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A tab, with its requests and its complaints."""

    page: Page
    server: LiveServer
    statuses: set[int] = field(default_factory=set)
    """Statuses of refusals that the test provokes."""
    breaks: bool = False
    """Whether the test breaks connections on purpose."""
    asked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _routes: list[re.Pattern[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        paths = self.server.app.openapi()["paths"]
        self._routes = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in paths]
        self._routes.append(re.compile("/v1/jobs/[^/]+/checkpoints/[^/]+/files/.+"))
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(f"raised: {error}"))
        self.page.on("request", self._asks)
        self.page.on("response", self._answered)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        status = STATUS.search(message.text)
        if status is not None and int(status[1]) in self.statuses:
            return
        if self.breaks and "net::ERR" in message.text:
            return
        self.wrong.append(f"console: {message.text}")

    def _asks(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme == "blob":
            return
        self.asked.append(f"{request.method} {url.path}?{url.query}")
        files = {"/", *(f"/page/{load().version}/{name}" for name in load().files)}
        if f"{url.scheme}://{url.netloc}" != self.server.url:
            self.wrong.append(f"asks another server: {request.url}")
        elif url.path not in files and not any(one.fullmatch(url.path) for one in self._routes):
            self.wrong.append(f"asks for what is not public: {request.url}")
        elif TOKEN in request.url:
            self.wrong.append(f"has a token in an address: {request.url}")

    def _answered(self, response: Response) -> None:
        if urlsplit(response.url).path == "/":
            policy = response.headers.get("content-security-policy")
            if policy != POLICY:
                self.wrong.append(f"the policy is {policy}")

    def open(self, place: str = "jobs") -> Page:
        self.page.goto(f"{self.server.url}/#/{place}")
        self.page.wait_for_selector("h1")
        return self.page


@pytest.fixture
def tab(browser: Browser, server: LiveServer) -> Iterator[Watched]:
    """A signed-in tab. The test fails if it complains or makes a forbidden request."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(f"sessionStorage.setItem('dray.token', '{TOKEN}')")
    page = context.new_page()
    page.set_default_timeout(DEADLINE_S * 1000)
    watched = Watched(page, server)
    yield watched
    # A test's handler may be answering a request, which is gone once the tab is closed.
    page.unroute_all(behavior="ignoreErrors")
    context.close()
    assert not watched.wrong
