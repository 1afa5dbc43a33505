"""Runs as a reader tells them apart: names, colours, and curves that are hidden or marked."""

from __future__ import annotations

import re
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from api.page.static_files import load
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import Watched
from tests.page.site import Site, run
from tests.unit.api.serving import wait_until
from tests.unit.service.helpers import metrics, resumed

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = IN_BROWSER

NUM_COLOURS = 20
LEAST_CONTRAST = 3.0
"""Contrast that WCAG 2.2 requires of graphics."""
LEAST_DIFFERENCE = 15.0
"""Least distance of two colours in CIELAB; 2.3 is just noticeable."""


@pytest.fixture(scope="module")
def sweep_id(site: Site) -> str:
    return site.sweep(8)


def trials(site: Site, sweep_id: str) -> list[str]:
    page = run(site.hands.jobs.sweeps.trials(sweep_id, limit=100, cursor=None))
    return [trial.job_id for trial in page.items]


def rgb(page: Page, selector: str, of: str = "color") -> tuple[float, ...]:
    found = page.evaluate(
        """([name, of]) => {
            const probe = document.createElement('span');
            probe.className = name;
            document.body.append(probe);
            const canvas = document.createElement('canvas').getContext('2d');
            canvas.fillStyle = getComputedStyle(probe)[of];
            probe.remove();
            return canvas.fillStyle;
        }""",
        [selector, of],
    )
    return tuple(int(found[n : n + 2], 16) / 255 for n in (1, 3, 5))


def linear(colour: tuple[float, ...]) -> list[float]:
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]


def luminance(colour: tuple[float, ...]) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: tuple[float, ...]) -> tuple[float, float, float]:
    """Return the colour in CIELAB (D65)."""
    r, g, b = linear(colour)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_twenty_colours_are_told_apart(tab: Watched, scheme: str) -> None:
    page = tab.open("none")
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    colours = [rgb(page, f"colour-{n}") for n in range(NUM_COLOURS)]
    card = rgb(page, "card-colour")
    assert min(contrast(colour, card) for colour in colours) >= LEAST_CONTRAST
    labs = [lab(colour) for colour in colours]
    differences = {
        (n, m): sum((a - b) ** 2 for a, b in zip(labs[n], labs[m], strict=True)) ** 0.5
        for n, m in combinations(range(NUM_COLOURS), 2)
    }
    assert min(differences.values()) >= LEAST_DIFFERENCE, min(differences, key=differences.get)  # type: ignore[arg-type]


COLOURS = """async ([path, views]) => {
    const { coloursOf } = await import(path);
    return views.map((runs) => [...coloursOf(runs)]);
}"""


@SOAK
def test_colours_are_distinct_in_a_view_and_the_same_in_all(tab: Watched) -> None:
    page = tab.open("none")
    module = f"./page/{load().version}/lib/colours.js"
    runs = [{"id": f"job-{n:026d}"} for n in range(60)]
    mine = {"id": "job-mine", "colour": 7}
    views = [runs[:20], runs[10:15], [mine, *runs[:10]], runs[:60], [mine], runs[:20]]
    found = [dict(view) for view in page.evaluate(COLOURS, [module, views])]
    assert sorted(found[0].values()) == list(range(NUM_COLOURS))
    assert found[1] == {job: n for job, n in found[0].items() if job in found[1]}
    assert found[2]["job-mine"] == found[4]["job-mine"] == 7
    assert len(set(found[2].values())) == 11
    assert set(found[3].values()) == set(range(NUM_COLOURS))
    assert found[5] == found[0]
    page.reload()
    again = dict(page.evaluate(COLOURS, [module, [runs[:20]]])[0])
    assert len(set(again.values())) == NUM_COLOURS
    page.evaluate("sessionStorage.removeItem('dray.colours')")
    neighbours = [{"id": f"job-{n}", "array_id": "array-1", "array_index": n} for n in range(20)]
    (one,) = page.evaluate(COLOURS, [module, [neighbours[::-1]]])
    assert sorted(number for _, number in one) == list(range(NUM_COLOURS))


def test_trials_are_named_by_what_differs(site: Site, sweep_id: str, tab: Watched) -> None:
    jobs = trials(site, sweep_id)
    page = tab.open(f"jobs?text={sweep_id}")
    row = page.locator(".jobs tbody tr").first
    row.locator(".variant").wait_for()
    variant = run(site.hands.jobs.get(jobs[-1])).variant
    assert variant is not None
    assert re.fullmatch(r"#7 lr [\d.e-]+, name \w+, width \d+", variant)
    assert row.locator(".variant").inner_text() == variant
    page = tab.open(f"jobs/{jobs[-1]}")
    page.locator(".head .variant").wait_for()
    assert page.title() == f"digits-sweep {variant} - dray"
    page = tab.open(f"compare?jobs={','.join(jobs[:3])}")
    names = page.locator(".compared tbody tr td:nth-child(2) > a")
    names.first.wait_for()
    expected = [run(site.hands.jobs.get(one)).variant for one in jobs[:3]]
    assert names.all_inner_texts() == expected
    legend = page.get_by_role("region", name="val/accuracy").locator(".keys > span")
    legend.nth(2).wait_for()
    assert [text.rsplit(" ", 1)[0] for text in legend.all_inner_texts()] == expected


def test_curves_are_hidden_marked_and_coloured(site: Site, tab: Watched) -> None:
    jobs = [site.trains(f"marked-{n}", n, "cpu-a") for n in range(3)]
    page = tab.open(f"compare?jobs={','.join(jobs)}")
    panel = page.get_by_role("region", name="train/loss", exact=True)
    panel.locator("canvas").wait_for()
    rows = page.locator(".compared tbody tr")
    assert panel.locator(".keys b").count() == 3
    page.get_by_label("Show the curves of marked-1").click()
    wait_until(lambda: panel.locator(".keys b").count() == 2, "a curve less")
    assert f"hide={jobs[1]}" in page.url
    assert page.get_by_label("Show the curves of marked-1").get_attribute("aria-pressed") == "false"
    page.go_back()
    wait_until(lambda: panel.locator(".keys b").count() == 3, "the curve again")
    # The pointer near a curve marks its row.
    over = panel.locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    height = int(box["height"])

    def marked() -> str:
        for y in range(2, height, 6):
            page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + y)
            if page.locator(".compared tr.pointed").count() == 1:
                return page.locator(".compared tr.pointed a").first.inner_text()
        return ""

    wait_until(marked, "a row that is marked")
    page.mouse.move(2, 2)
    page.locator(".compared tr.pointed").wait_for(state="detached")
    # A row that is pointed at fades the other curves.
    canvas = "panel => panel.querySelector('canvas').toDataURL()"
    before = panel.evaluate(canvas)
    rows.nth(2).hover()
    wait_until(lambda: panel.evaluate(canvas) != before, "the other curves faded")
    page.get_by_label("Colour of marked-2").click()
    page.get_by_role("button", name="Colour 13, dashed").click()
    page.locator(".compared .look .menu > summary .colour-13").wait_for()
    assert run(site.hands.jobs.get(jobs[2])).colour == 13
    page.reload()
    page.locator(".compared .look .menu > summary .colour-13").wait_for()


def test_a_short_job_beside_a_long_one_keeps_its_last_value(site: Site, tab: Watched) -> None:
    names = []
    for steps in (3, 3000):
        job_id = site.submit(f"of-{steps}", 1)
        site.claim(job_id, "cpu-a", 1)
        points = [metrics(n, {"loss": 0.5}, at=site.hands.now) for n in range(1, steps + 1)]
        site.hands.report(job_id, 1, [resumed(0), *points])
        names.append(job_id)
    page = tab.open(f"compare?jobs={','.join(names)}")
    values = page.get_by_role("region", name="loss", exact=True).locator(".keys b")
    values.nth(1).wait_for()
    assert values.all_inner_texts() == ["0.5", "0.5"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.00012345, "0.0001234"), (3.2e-5, "0.000032"), (4.5e-9, "4.5e-9")]
)
def test_small_numbers_are_written_in_full(tab: Watched, value: float, text: str) -> None:
    page = tab.open("none")
    module = f"./page/{load().version}/lib/format.js"
    found = page.evaluate("([path, x]) => import(path).then((m) => m.number(x))", [module, value])
    assert found in (text, "0.0001235")
