"""Plots of runs: lines over their values, of which a reader selects some, dots, and importances."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.marks import IN_BROWSER
from tests.page.conftest import Watched
from tests.page.site import Site
from tests.page.test_charts import called
from tests.unit.api.serving import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = IN_BROWSER


@pytest.fixture(scope="module")
def sweep_id(site: Site) -> str:
    """A sweep of 24 trials, of which 22 have succeeded, one has failed, and one waits."""
    return site.sweep(24)


def trials(page: Page) -> Locator:
    return page.get_by_role("listbox", name="Trials, the best first").get_by_role("option")


def rows(page: Page) -> Locator:
    return page.locator(".trials tbody tr")


def test_an_axis_selects_trials_by_the_pointer_and_by_the_keyboard(
    sweep_id: str, tab: Watched
) -> None:
    page = tab.open(f"compare?sweep={sweep_id}")
    trials(page).first.wait_for()
    everything = trials(page).count()
    assert everything == 24
    grip = page.locator(".brush .grip").first
    box = grip.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 9, box["y"] + 0.55 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 9, box["y"] + 0.2 * box["height"], steps=4)
    page.mouse.up()
    page.get_by_text(re.compile(r"^\d+ trials of 24 selected")).wait_for()
    some = trials(page).count()
    assert 0 < some < everything
    assert "brush=" in page.url
    dots = page.get_by_role("listbox", name=re.compile("^Runs by")).get_by_role("option")
    # The trial that waits has no metric, so it has no dot.
    assert some - 1 <= dots.count() <= some
    page.reload()
    page.get_by_text(re.compile(r"^\d+ trials of 24 selected")).wait_for()
    assert trials(page).count() == some
    page.get_by_role("button", name="Select all").click()
    wait_until(lambda: trials(page).count() == everything, "all trials")
    page.go_back()
    wait_until(lambda: trials(page).count() == some, "the selection again")
    page.get_by_role("button", name="Select all").click()
    handle = page.get_by_role("slider", name="Least val/accuracy")
    handle.focus()
    for _ in range(16):
        handle.press("ArrowUp")
    wait_until(lambda: 0 < rows(page).count() < 20, "only the best trials")
    least = float(handle.get_attribute("aria-valuenow") or 0)
    assert 75 <= least <= 85
    handle.press("Home")
    wait_until(lambda: trials(page).count() == everything, "all trials")
    choices = page.get_by_role("slider", name="Largest train.optimizer.name")
    choices.focus()
    choices.press("ArrowDown")
    wait_until(lambda: choices.get_attribute("aria-valuetext") == "sgd", "only sgd")
    cells = page.locator(".trials tbody tr td:nth-child(6)").all_inner_texts()
    assert set(cells) == {"sgd"}


def test_the_dots_show_any_two_values_and_a_third(sweep_id: str, tab: Watched) -> None:
    page = tab.open(f"compare?sweep={sweep_id}")
    plot = page.get_by_role("listbox", name="Runs by train.optimizer.lr and val/accuracy")
    dots = plot.get_by_role("option")
    wait_until(lambda: dots.count() == 23, "a dot for each trial that has a value")
    before = dots.locator("circle").evaluate_all("all => all.map(one => one.getAttribute('cx'))")
    page.get_by_label("log x").check()
    wait_until(
        lambda: (
            dots.locator("circle").evaluate_all("all => all.map(one => one.getAttribute('cx'))")
            != before
        ),
        "another scale",
    )
    page.get_by_label("Value of the x axis").select_option("train.optimizer.name")
    page.get_by_label("Value of the colour").select_option("model.width")
    plot = page.get_by_role("listbox", name="Runs by train.optimizer.name and val/accuracy")
    plot.wait_for()
    assert page.locator(".scatter .gradient").is_visible()
    assert page.get_by_label("log x").is_disabled()
    assert "sx=train.optimizer.name" in page.url
    dots = plot.get_by_role("option")
    dots.first.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    described = page.locator(".scatter p.soft").inner_text()
    assert re.match(
        r"^#\d+ \w+: train.optimizer.name \w+, val/accuracy [\d.]+, model.width", described
    )
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Curves").wait_for()


def test_the_importance_is_estimated_on_request(sweep_id: str, tab: Watched) -> None:
    page = tab.open(f"compare?sweep={sweep_id}")
    button = page.get_by_role("button", name="Estimate the importance of the parameters")
    button.wait_for()
    assert not any("/importance?" in one for one in tab.asked)
    button.click()
    table = page.locator(".importances")
    table.wait_for()
    assert page.get_by_text("left out: 1 failed, 1 not finished").is_visible()
    names = table.locator("tbody td:first-child").all_inner_texts()
    assert set(names) == {"train.optimizer.lr", "train.optimizer.name", "model.width"}
    assert names[0] == "train.optimizer.lr"
    page.reload()
    table.wait_for()
    page.get_by_label("include trials that were stopped early").check()
    wait_until(lambda: any("include_stopped=true" in one for one in tab.asked), "another request")
    table.wait_for()


def test_few_runs_have_no_importances(site: Site, tab: Watched) -> None:
    page = tab.open(f"compare?sweep={site.sweep(6)}&importance=1")
    page.get_by_text("There are no importances: too few runs: 4 of at least 20").wait_for()


def test_compared_jobs_are_plotted_and_selected(site: Site, tab: Watched) -> None:
    jobs = [
        site.trains(f"plot-{n}", n, "cpu-a", train={"optimizer": {"lr": 10.0 ** -(n + 1)}})
        for n in range(4)
    ]
    page = tab.open(f"compare?jobs={','.join(jobs)}")
    lines = page.get_by_role("listbox", name="Jobs").get_by_role("option")
    wait_until(lambda: lines.count() == 4, "a line of each job")
    handle = page.get_by_role("slider", name="Largest train.optimizer.lr")
    handle.focus()
    for _ in range(8):
        handle.press("ArrowDown")
    page.get_by_text("2 jobs of 4 selected; the charts show only these.").wait_for()
    keys = page.get_by_role("region", name="train/loss", exact=True).locator(".keys > span")
    wait_until(lambda: keys.count() == 2, "the curves of the selected jobs")


def selected(values: list[Any], low: float | None, high: float | None) -> list[bool]:
    """Return which of the values are within the limits, by comparing them."""
    return [
        isinstance(value, float)
        and (low is None or value >= low - abs(low) * 1e-5)
        and (high is None or value <= high + abs(high) * 1e-5)
        for value in values
    ]


SELECT = """(() => {
  const axis = m.axisOfValues('v', v[0], v[1]);
  const range = m.rangeOf(axis, v[2]);
  const params = new URLSearchParams();
  for (const one of m.brushTexts(new Map([['v', range]]))) params.append('brush', one);
  const brushes = m.brushesIn(params);
  const values = [...v[0], null, 'x'];
  return [range, values.map((value) => m.isWithin({ v: value }, [axis], brushes))];
})()"""


def test_ranges_select_the_values_between_their_ends(tab: Watched) -> None:
    page = tab.open("none")
    chance = random.Random(46)
    for _ in range(40):
        values: list[Any] = [10 ** chance.uniform(-4, 3) for _ in range(chance.randint(2, 20))]
        shares = sorted(chance.choice([0, 1, chance.random()]) for _ in range(2))
        log = chance.choice([True, False])
        (low, high), found = called(page, "lib/run_axes.js", SELECT, values, log, shares)
        if low is None and high is None:
            assert all(found)
            continue
        assert found == selected([*values, None, "x"], low, high), (values, low, high)
