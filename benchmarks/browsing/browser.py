"""A page in a real Chromium: when it first painted, when it showed its content, what it fetched."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.machine import BenchmarkError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WITHIN_S = 180.0
CHECK_S = 0.1
"""Seconds between two checks of whether a page is ready. The page itself records when it was."""
REST_S = 1.0
"""Seconds from when a page is ready until its bytes are counted, to include late responses."""

_LOOK = """
(() => {
  const look = () => {
    if (%s) window.readyAt = performance.now();
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""


@dataclass(frozen=True)
class Visit:
    """Times in seconds since the navigation began, and the number of fetched bytes."""

    first_s: float
    """Seconds until the first contentful paint."""
    ready_s: float
    """Seconds until the page showed its content."""
    num_bytes: int
    """Bytes of all responses on the wire, including headers."""
    num_requests: int


def lacks_browser() -> bool:
    return shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium in headless mode."""
    if lacks_browser():
        raise BenchmarkError("chromium or playwright is not installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def visit(browser: Browser, url: str, ready: str, height: int) -> Visit:
    """Open a page with nothing cached. ready: a JavaScript condition, evaluated in each frame.

    Raises BenchmarkError if the page is not ready within `WITHIN_S`.
    """
    from playwright.sync_api import Error

    context = browser.new_context(viewport={"width": 1280, "height": height})
    try:
        page = context.new_page()
        fetched: list[int] = []

        def finished(event: Mapping[str, Any]) -> None:
            fetched.append(int(event["encodedDataLength"]))

        network = context.new_cdp_session(page)
        network.send("Network.enable")
        network.on("Network.loadingFinished", finished)
        page.add_init_script(_LOOK % ready)
        page.goto(url, wait_until="commit", timeout=1000 * WITHIN_S)
        deadline = time.monotonic() + WITHIN_S
        while page.evaluate("window.readyAt") is None:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{url} was not ready within {WITHIN_S:g} s")
            page.wait_for_timeout(1000 * CHECK_S)
        page.wait_for_timeout(1000 * REST_S)
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        first_ms, ready_ms = page.evaluate(f"[{paint}, window.readyAt]")
        return Visit(first_ms / 1000, ready_ms / 1000, sum(fetched), len(fetched))
    except Error as error:
        raise BenchmarkError(f"{url} is not shown: {error}") from None
    finally:
        context.close()
