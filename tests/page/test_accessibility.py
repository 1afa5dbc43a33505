"""axe finds nothing serious in any view of the page, in light and dark mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.marks import IN_BROWSER, SOAK
from tests.page import usage_days
from tests.page.conftest import TOKEN, Watched
from tests.page.site import Site
from tests.page.test_models import registered
from tests.page.test_report_pages import text_of, written
from tests.unit.api.serving import LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ColorScheme, Page

pytestmark = [IN_BROWSER, SOAK]

SERIOUS = ("serious", "critical")
IS_IN_SIGHT = """() => {
  const bar = document.querySelector('nav').getBoundingClientRect();
  const link = document.querySelector('nav [aria-current]')?.getBoundingClientRect();
  return !link || (link.left >= bar.left - 1 && link.right <= bar.right + 1);
}"""


@pytest.fixture(scope="module")
def places(site: Site, server: LiveServer) -> list[tuple[str, str]]:
    """Each view with a selector of an element that exists once everything is shown."""
    job = f"jobs/{site.everything(6)}"
    registered(server, "digits")
    usage_days.fill(server.hands)

    def ids(query: str) -> list[str]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        items = server.ask("GET", f"/v1/jobs?{query}", headers=headers).json()["items"]
        return [each["array_id"] or each["id"] for each in items]

    baselines = ids("text=baseline")
    report = written(server, "Losses", text_of(baselines))
    return [
        ("jobs", ".jobs tbody tr"),
        ("jobs?text=nothing", ".empty"),
        ("jobs?where=x", ".where pre"),
        (job, ".panel .plot"),
        (f"{job}?more=1", "#details .timeline"),
        *((f"{job}?tab={tab}", f"#panel {at}") for tab, at in TABS.items()),
        *((f"jobs/{one}?more=1", ".notes h4") for one in baselines[-1:]),
        *((f"jobs/{one}", ".why") for one in ids("text=onerror")),
        ("cluster", ".forecast .when"),
        ("cluster?tab=usage&by=user", ".stack .part"),
        ("cluster?tab=webhooks", "#panel p"),
        ("submit", ".verdict.right"),
        ("experiments?metric=val/loss", "tbody tr"),
        ("experiments/rates", ".leaders tr"),
        (f"diff?jobs={','.join(baselines[:2])}", ".differs"),
        ("models", "tbody tr"),
        ("models/digits", ".notes"),
        ("reports", "tbody tr"),
        (f"reports/{report}", ".panel .plot"),
        (f"reports/{report}?edit=1", ".preview .plot"),
        (f"compare?jobs={','.join(baselines)}", ".panel .plot"),
        (f"compare?sweep={ids('text=digits-sweep')[0]}", ".lines svg"),
        (
            f"compare?sweep={ids('text=digits-sweep')[0]}&brush=:0.01:train.optimizer.lr&sc=model.width",
            ".dot",
        ),
        (f"compare?jobs={','.join(baselines)}&group=name&x=samples&smooth=0.5", ".panel .plot"),
        ("jobs?sort=-val/accuracy&columns=state,val/accuracy,train.optimizer.lr", ".value"),
        ("jobs?group=experiment&sort=-val/accuracy", ".groups td"),
        (
            f"jobs?columns=train/loss&owner=ann&pinned={baselines[0]}&baseline={baselines[-1]}",
            ".pinned td",
        ),
        ("views/ann/missing", ".failure"),
        ("none", "h1"),
    ]


TABS = {
    "logs": ".line",
    "logs&wrap=1&find=step": ".line",
    "logs&side=0,1": ".line.side",
    "ranks": ".panel .plot",
    "files": "figure img",
    "events": "tbody tr",
    "document": "pre",
    "lineage": "p",
}


RULES = {"light": [], "dark": ["color-contrast"]}
"""The views to check for each scheme; all if none is named."""


def violations(page: Page, rules: list[str]) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    found = Axe().run(page, options=options).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Browser, server: LiveServer, places: list[tuple[str, str]], scheme: ColorScheme
) -> None:
    pytest.importorskip(
        "axe_playwright_python", reason="the extra 'dev' is not installed: axe-playwright-python"
    )
    context = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
    tab = Watched(context.new_page(), server, statuses={401, 404, 422})
    page = tab.open()
    page.get_by_role("heading", name="Sign in").wait_for()
    found = {"sign in": violations(page, RULES[scheme])}
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    for place, selector in places:
        tab.open(place)
        page.locator(selector).first.wait_for()
        for summary in page.locator("main summary").all():
            summary.click()
        found[place] = violations(page, RULES[scheme])
    context.close()
    assert not {place: said for place, said in found.items() if said}
    assert not tab.wrong


def test_a_phone_shows_all_without_scrolling_sideways(
    site: Site, server: LiveServer, places: list[tuple[str, str]], tab: Watched
) -> None:
    tab.statuses |= {404, 422}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    server.ask("PUT", f"/v1/views/{'v' * 63}", json={"query": {}}, headers=headers)
    written(server, "t" * 200, "")
    long = site.submit("x" * 63, labels={"k" * 63: "v" * 63}, owner="o" * 60)
    tab.page.set_viewport_size({"width": 320, "height": 640})
    beside = {}
    for place, selector in [
        *places,
        (f"jobs/{long}", ".fact"),
        (f"jobs?view=ann/{'v' * 63}", ".view"),
    ]:
        page = tab.open(place)
        page.locator(selector).first.wait_for(state="attached")
        beside[place] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert page.evaluate(IS_IN_SIGHT), f"{place}: the link of the current place is not in sight"
    assert not {place: pixels for place, pixels in beside.items() if pixels}
