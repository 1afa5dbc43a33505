"""The layout of charts that is saved for an experiment, also by two users at once."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

from tests.marks import IN_BROWSER
from tests.page.conftest import TOKEN, Watched
from tests.page.site import Site
from tests.page.test_charts import called, headings, panel, tool
from tests.unit.api.serving import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = IN_BROWSER

SAVE = "Save layout for experiment"


def jobs_of(site: Site, experiment: str) -> list[str]:
    labels = {"experiment": experiment}
    return [site.trains(f"layout-{n}", n, "cpu-a", labels=labels) for n in range(2)]


def save(page: Page) -> None:
    page.get_by_role("button", name=SAVE).click()


def is_saved(page: Page) -> None:
    page.get_by_role("button", name=SAVE).wait_for(state="detached")


def limit(page: Page, name: str, most: str) -> None:
    panel(page, name).get_by_label(f"Tools of {name}").click()
    page.get_by_label("Largest value of y").fill(most)
    page.keyboard.press("Enter")
    wait_until(lambda: f"%3A{most}%3A" in page.url, "the limit in the address")


def test_a_layout_is_shown_to_all_jobs_of_the_experiment(site: Site, tab: Watched) -> None:
    one, other = jobs_of(site, "lay/out ü")
    page = tab.open(f"jobs/{one}")
    panel(page, "train/loss")
    usual = headings(page)
    assert page.get_by_role("button", name=SAVE).count() == 0
    tool(page, "train/lr", "Pin to the top")
    page.get_by_label("log scale").check()
    save(page)
    is_saved(page)
    assert "pin=" not in page.url
    assert headings(page)[0] == "train/lr"
    page = tab.open(f"jobs/{other}")
    panel(page, "train/lr")
    assert headings(page)[0] == "train/lr"
    assert page.get_by_label("log scale").is_checked()
    page = tab.open(f"compare?jobs={one},{other}")
    panel(page, "train/lr")
    assert headings(page)[0] == "train/lr"
    tool(page, "train/lr", "Unpin")
    wait_until(lambda: headings(page)[0] != "train/lr", "the usual order")
    assert page.get_by_label("log scale").is_checked()
    page.reload()
    panel(page, "train/lr")
    assert headings(page)[0] != "train/lr"
    page.get_by_role("button", name="Reset").click()
    wait_until(lambda: headings(page)[0] == "train/lr", "the saved layout")
    page = tab.open(f"jobs/{one}?smooth=0.5")
    panel(page, "train/loss")
    assert headings(page) == usual


def test_a_job_without_an_experiment_has_no_layout(site: Site, tab: Watched) -> None:
    page = tab.open(f"jobs/{site.trains('alone', 1, 'cpu-a')}")
    tool(page, "train/lr", "Pin to the top")
    wait_until(lambda: "pin=" in page.url, "the pin in the address")
    assert page.get_by_role("button", name=SAVE).count() == 0
    assert not any("/v1/experiments" in one for one in tab.asked)


def test_two_who_save_at_once_lose_nothing(site: Site, browser: Browser, tab: Watched) -> None:
    job, _ = jobs_of(site, "both")
    tab.statuses.add(412)
    page = tab.open(f"jobs/{job}")
    panel(page, "train/loss")
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(f"sessionStorage.setItem('dray.token', '{TOKEN}')")
    other = context.new_page()
    other.goto(f"{tab.server.url}/#/jobs/{job}")
    panel(other, "train/loss")
    tool(page, "train/lr", "Pin to the top")
    limit(page, "train/loss", "8")
    save(page)
    is_saved(page)
    # Another chart: both changes are kept without a question.
    tool(other, "val/loss", "Pin to the top")
    save(other)
    is_saved(other)
    wait_until(lambda: set(headings(other)[:2]) == {"train/lr", "val/loss"}, "both pins")
    # The same chart: the page asks, and shows both.
    limit(page, "train/loss", "7")
    limit(other, "train/loss", "9")
    save(other)
    is_saved(other)
    save(page)
    dialog = page.get_by_role("dialog", name="The layout has changed")
    dialog.wait_for()
    text = dialog.inner_text()
    assert "Chart train/loss" in text
    assert "y from what fits to 7" in text
    assert "y from what fits to 9" in text
    assert dialog.get_by_role("button", name="Save").is_disabled()
    dialog.get_by_label("Yours").check()
    dialog.get_by_role("button", name="Save").click()
    is_saved(page)
    assert set(headings(page)[:2]) == {"train/lr", "val/loss"}
    other.reload()
    panel(other, "train/loss").get_by_label("Tools of train/loss").click()
    assert other.get_by_label("Largest value of y").input_value() == "7"
    context.close()


def changed(chance: random.Random, layout: dict[str, Any]) -> dict[str, Any]:
    """Change a layout as a reader does: some charts get another look, are added, or removed."""
    charts = {name: dict(one) for name, one in layout["charts"].items()}
    order = list(layout["order"])
    for _ in range(chance.randint(0, 3)):
        name = chance.choice("abcdef")
        if chance.random() < 0.3:
            charts.pop(name, None)
            order = [one for one in order if one != name]
        else:
            charts[name] = {"limits": [0, chance.randint(1, 3)], "pinned": True}
            if name not in order:
                order.insert(chance.randint(0, len(order)), name)
    tools = dict(layout["tools"])
    if chance.random() < 0.3:
        tools["smooth"] = chance.choice([0.1, 0.5])
    return {"tools": tools, "order": order, "charts": charts}


def test_what_one_has_changed_is_kept_and_what_both_have_is_asked(tab: Watched) -> None:
    page = tab.open("none")
    chance = random.Random(46)
    usual: dict[str, Any] = {"tools": {}, "order": [], "charts": {}}
    cases = []
    for _ in range(300):
        base = changed(chance, changed(chance, usual))
        cases.append([base, changed(chance, base), changed(chance, base)])
    found = called(page, "lib/layout.js", "v[0].map((one) => m.merge(...one))", cases)
    for (base, mine, theirs), merged in zip(cases, found, strict=True):
        layout, conflicts = merged["layout"], {one["id"] for one in merged["conflicts"]}
        for name in "abcdef":
            b, m, t = (one["charts"].get(name) for one in (base, mine, theirs))
            kept = layout["charts"].get(name)
            asked = f"chart {name}" in conflicts
            assert asked == (m != b and t != b and m != t), (base, mine, theirs)
            assert kept == (m if t == b else t), (base, mine, theirs)
        pinned = {name for name, one in layout["charts"].items() if one.get("pinned")}
        assert set(layout["order"]) == pinned
        assert len(layout["order"]) == len(pinned)
        if "order " not in conflicts:
            common = [
                name
                for name in base["order"]
                if name in mine["order"] and name in theirs["order"] and name in pinned
            ]
            for one, two in itertools.combinations(common, 2):
                places = [
                    each["order"].index(one) < each["order"].index(two)
                    for each in (base, mine, theirs, layout)
                ]
                assert places[3] in places[1:3]


def test_charts_are_drawn_after_all_work_was_withdrawn(tab: Watched) -> None:
    page = tab.open()
    drawn = page.evaluate(
        """async () => {
          const app = document.querySelector('script[type="module"]').src;
          const { inTurn, outOfTurn } = await import(new URL('lib/turns.js', app));
          inTurn('gone', () => {});
          outOfTurn('gone');
          await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
          return Promise.race([
            new Promise((resolve) => inTurn('chart', () => resolve(true))),
            new Promise((resolve) => setTimeout(() => resolve(false), 5000)),
          ]);
        }"""
    )
    assert drawn
