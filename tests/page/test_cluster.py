"""The usage over time, queues, webhooks and drills in a real Chromium."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.marks import IN_BROWSER
from tests.page import usage_days
from tests.page.conftest import TOKEN, Watched
from tests.page.site import Site
from tests.unit.api.serving import DEADLINE_S, LiveServer, serving
from tests.unit.service.helpers import drilled

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = IN_BROWSER

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def ask(server: LiveServer, path: str) -> Any:
    response = server.ask("GET", path, headers=HEADERS)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def used(server: LiveServer) -> None:
    usage_days.fill(server.hands)


@pytest.mark.usefixtures("used")
def test_the_usage_is_drawn_and_written(tab: Watched, tmp_path: Path, server: LiveServer) -> None:
    page = tab.open("cluster")
    page.get_by_role("tab", name="Now").focus()
    page.keyboard.press("ArrowRight")
    chart = page.get_by_role("region", name="GPU hours", exact=True)
    chart.locator(".stack .part").first.wait_for()
    assert "tab=usage" in page.url
    assert chart.locator(".stack").count() in (7, 8)
    page.get_by_label("By", exact=True).select_option("user")
    chart.get_by_text("bert").first.wait_for()
    chart.get_by_text("Numbers").click()
    with page.expect_download() as download:
        chart.get_by_role("button", name="Save as CSV").click()
    saved = tmp_path / "usage.csv"
    download.value.save_as(saved)
    rows = list(csv.DictReader(saved.open()))
    zone = page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")
    since, until = rows[0]["start"], rows[-1]["start"]
    path = f"/v1/usage?by=user&since={since}&until={until}&time_zone={zone}"
    report = ask(server, path)
    for series in report["series"]:
        shown = [float(row[series["name"]]) for row in rows[:-1]]
        assert shown == pytest.approx(series["gpu_hours"]), series["name"]
    first = chart.locator("tbody tr").first.locator("td")
    heads = chart.locator("thead th").all_inner_texts()
    assert heads == ["Begin", "ann", "bert", "chen", "dora", "Total", "Capacity"]
    assert float(first.nth(5).inner_text().replace(",", "")) == pytest.approx(
        report["total"]["gpu_hours"][0], rel=0.01
    )
    page.get_by_label("Show", exact=True).select_option("cost-EUR")
    page.get_by_role("region", name="Cost in EUR", exact=True).wait_for()
    page.go_back()
    chart.wait_for()
    page.go_back()
    page.wait_for_url(lambda url: "by=" not in url)
    waits = page.get_by_role("region", name="Why jobs waited")
    assert "waiting for slots" in waits.inner_text()
    page.get_by_label("Periods").select_option("hour")
    chart.locator(".stack").nth(20).wait_for()


@pytest.mark.usefixtures("used")
def test_the_usage_is_read_on_a_phone(tab: Watched) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 800})
    page = tab.open("cluster?tab=usage&by=user")
    page.locator(".stack .part").first.wait_for()
    for summary in page.locator("main summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    tab.open("cluster?tab=webhooks")
    page.get_by_role("button", name="New webhook").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def row_of(page: Page, queue: str) -> Any:
    named = page.get_by_role("link", name=queue, exact=True)
    return page.locator("tbody tr").filter(has=named)


def test_an_admin_creates_changes_and_deletes_a_queue(tab: Watched, server: LiveServer) -> None:
    page = tab.open("cluster")
    tab.statuses.add(422)
    page.get_by_role("button", name="New queue").click()
    page.get_by_label("Name", exact=True).fill("lab")
    page.get_by_label("Weight", exact=True).fill("-1")
    page.get_by_role("button", name="Create").click()
    wrong = page.locator("#wrong-weight")
    wrong.wait_for()
    assert page.get_by_label("Weight", exact=True).get_attribute("aria-invalid") == "true"
    page.get_by_label("Weight", exact=True).fill("2")
    page.get_by_label("Quota", exact=True).fill("GPU 4, memory 64GiB")
    page.get_by_label("Weights of users").fill("ann 2, bob=0.5")
    page.get_by_label("Default max_runtime_s").fill("2h")
    page.get_by_role("button", name="Create").click()
    row_of(page, "lab").wait_for()
    lab = ask(server, "/v1/queues/lab")
    assert (lab["weight"], lab["quota"]) == (2.0, {"GPU": 4.0, "memory": 64 * 2.0**30})
    assert lab["user_weights"] == {"ann": 2.0, "bob": 0.5}
    assert lab["default_max_runtime_s"] == 7200
    page.get_by_role("button", name="Edit the queue lab").click()
    assert page.get_by_label("Quota", exact=True).input_value() == "GPU 4, memory 64GiB"
    # Another admin changes another rule in the meantime.
    other = server.ask("PATCH", "/v1/queues/lab", json={"max_queued": 7}, headers=HEADERS)
    assert other.status_code == 200
    page.get_by_label("Quota", exact=True).fill("GPU 3")
    page.get_by_label("Running jobs", exact=True).fill("5")
    page.get_by_role("button", name="Save").click()
    page.locator("dialog").wait_for(state="detached")
    lab = ask(server, "/v1/queues/lab")
    assert (lab["quota"], lab["max_running"], lab["max_queued"]) == ({"GPU": 3.0}, 5, 7)
    assert lab["user_weights"] == {"ann": 2.0, "bob": 0.5}
    page.get_by_role("button", name="Edit the queue lab").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    row_of(page, "lab").wait_for(state="detached")
    assert server.ask("GET", "/v1/queues/lab", headers=HEADERS).status_code == 404


@pytest.fixture(scope="module")
def posting(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LiveServer]:
    """A server with two users, which may post to this host."""
    home = tmp_path_factory.mktemp("posting")
    tokens = (("ann", TOKEN, ":admin"), ("bob", "bobs-token", ""))
    lines = [f"{n}:{hashlib.sha256(t.encode()).hexdigest()}{a}" for n, t, a in tokens]
    (home / "tokens").write_text("\n".join(lines))
    with serving(
        home / "home", tokens_file=home / "tokens", webhook_private_hosts=["127.0.0.1"]
    ) as server:
        yield server


def opened(browser: Browser, server: LiveServer, token: str) -> Watched:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(f"sessionStorage.setItem('dray.token', '{token}')")
    page = context.new_page()
    page.set_default_timeout(DEADLINE_S * 1000)
    return Watched(page, server)


def test_webhooks_are_created_tested_and_deleted(browser: Browser, posting: LiveServer) -> None:
    tab = opened(browser, posting, "bobs-token")
    tab.statuses.add(422)
    page = tab.open("cluster?tab=webhooks")
    page.get_by_text("There are no webhooks").wait_for()
    page.get_by_role("button", name="New webhook").click()
    assert page.get_by_text("jobs of all users").count() == 0
    page.get_by_label("URL").fill("ftp://x")
    page.get_by_role("button", name="Create").click()
    page.locator("#wrong-url").wait_for()
    page.get_by_label("URL").fill("http://127.0.0.1:9/hook")
    page.get_by_label("Jobs with the labels").fill("team=vision, stage = prod")
    page.get_by_label("cancelled").uncheck()
    page.get_by_role("button", name="Create").click()
    page.get_by_text("whsec_").wait_for()
    headers = {"Authorization": "Bearer bobs-token"}
    (hook,) = posting.ask("GET", "/v1/webhooks", headers=headers).json()["items"]
    assert hook["states"] == ["SUCCEEDED", "FAILED"]
    assert hook["labels"] == {"team": "vision", "stage": "prod"}
    page.get_by_role("button", name="Send a test message").click()
    page.get_by_text("webhook.test").wait_for()
    page.get_by_role("button", name="Disable").click()
    page.get_by_role("button", name="Enable").wait_for()
    page.get_by_role("button", name=f"Delete {hook['url']}").click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_text("There are no webhooks").wait_for()
    assert not tab.wrong
    page.context.close()


def test_users_who_are_no_admins_see_no_buttons_that_fail(
    browser: Browser, posting: LiveServer
) -> None:
    tab = opened(browser, posting, "bobs-token")
    with tab.page.expect_response("**/v1/caller"):
        page = tab.open("cluster")
    page.get_by_role("link", name="default", exact=True).wait_for()
    assert page.get_by_role("button", name="Edit the queue default").count() == 0
    assert page.get_by_role("button", name="New queue").count() == 0
    assert not tab.wrong
    page.context.close()


def test_a_drill_is_started_and_its_result_is_shown(
    site: Site, server: LiveServer, tab: Watched
) -> None:
    tab.statuses.add(422)
    job_id = server.ask(
        "POST",
        "/v1/jobs",
        json={"recipe": "image_classification", "resources": {"num_workers": 2}, "name": "d"},
        headers=HEADERS,
    ).json()["id"]
    attempt = site.claim(job_id)
    server.hands.report(job_id, attempt, site.steps(0, 10, total=100))
    page = tab.open(f"jobs/{job_id}?tab=ranks")
    page.get_by_role("button", name="Start a drill").click()
    kinds = page.get_by_label("Fault").locator("option").all_inner_texts()
    assert not any("parameter" in kind for kind in kinds), "its replicas are not compared"
    page.get_by_label("Rank", exact=True).fill("7")
    page.get_by_role("button", name="Start", exact=True).click()
    page.locator("#wrong-rank").wait_for()
    page.get_by_label("Rank", exact=True).fill("1")
    page.get_by_role("button", name="Start", exact=True).click()
    drills = page.get_by_role("region", name="The drills of the job")
    drills.get_by_text("kill").wait_for()
    (drill,) = ask(server, f"/v1/jobs/{job_id}/drills")["items"]
    assert (drill["kind"], drill["rank"]) == ("kill", 1)
    passed = drilled(drill["id"], "passed", at=server.hands.now, recovery_s=0.31, step=10)
    server.hands.report(job_id, attempt, [passed])
    drills.get_by_text("passed").first.wait_for()
