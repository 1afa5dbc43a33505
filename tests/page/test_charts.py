"""Charts: their axes, zoom, combinations, smoothing, and what is saved of them."""

from __future__ import annotations

import csv
import io
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from api.page.static_files import load
from tests.marks import FRESH_SEEDS, IN_BROWSER, SOAK
from tests.page.conftest import Watched
from tests.page.site import Site
from tests.unit.api.serving import wait_until
from tests.unit.service.helpers import metrics, resumed

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = IN_BROWSER

SEED = random.SystemRandom().randrange(10**9) if FRESH_SEEDS else 46


@pytest.fixture(scope="module")
def jobs(site: Site) -> list[str]:
    names = {"experiment": "charts"}
    return [
        site.trains(f"chart-{n}", n, "cpu-a", labels={**names, "arm": "ab"[n % 2]})
        for n in range(4)
    ]


def panel(page: Page, name: str) -> Locator:
    found = page.get_by_role("region", name=name, exact=True)
    found.scroll_into_view_if_needed()
    found.locator("canvas").wait_for()
    return found


def tool(page: Page, name: str, button: str) -> None:
    panel(page, name).get_by_label(f"Tools of {name}").click()
    page.get_by_role("button", name=button, exact=True).click()


def headings(page: Page) -> list[str]:
    return page.locator(".panel-head h2").all_inner_texts()


def called(page: Page, module: str, expression: str, *values: Any) -> Any:
    """Return the value of an expression of a module `m` of the page and of these values `v`."""
    path = f"./page/{load().version}/{module}"
    code = f"async ([path, v]) => {{ const m = await import(path); return {expression}; }}"
    return page.evaluate(code, [path, list(values)])


def test_the_zoom_is_in_the_address_and_back_undoes_it(jobs: list[str], tab: Watched) -> None:
    page = tab.open(f"compare?jobs={','.join(jobs[:2])}")
    over = panel(page, "train/loss").locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
    with page.expect_response(lambda response: "until_step" in response.url):
        page.mouse.up()
    wait_until(lambda: "range=" in page.url, "the range in the address")
    zoomed = page.url
    page.get_by_label("log scale").check()
    wait_until(lambda: "log=1" in page.url, "the scale in the address")
    page.go_back()
    assert page.url == zoomed
    assert not page.get_by_label("log scale").is_checked()
    page.reload()
    page.get_by_role("button", name="Show all").wait_for()
    page.go_back()
    wait_until(lambda: "range=" not in page.url, "the zoom undone")
    page.get_by_role("button", name="Show all").wait_for(state="detached")


def test_curves_are_drawn_over_what_the_data_has(site: Site, tab: Watched) -> None:
    job_id = site.submit("counts", 1, train={"global_batch_size": 32, "epochs": 4})
    site.claim(job_id, "cpu-a", 1)
    points = [
        metrics(n, {"loss": 1.0 / n, "tokens": 100.0 * n}, at=site.hands.now, total_steps=40)
        for n in range(1, 21)
    ]
    site.hands.report(job_id, 1, [resumed(0), *points])
    page = tab.open(f"jobs/{job_id}?keys=loss")
    panel(page, "loss")
    axis = page.get_by_label("x axis")
    offered = axis.locator("option").all_inner_texts()
    assert offered == ["steps", "epochs", "samples", "tokens", "time", "seconds"]
    for name, last in (("epochs", "epoch 2"), ("samples", "640 samples"), ("tokens", "2,000 tok")):
        axis.select_option(label=name)
        curve = panel(page, "loss").get_by_role("application")
        curve.focus()
        curve.press("End")
        keys = panel(page, "loss").locator(".keys")
        wait_until(lambda keys=keys, last=last: last in keys.inner_text(), last)
    page = tab.open(f"jobs/{job_id}?keys=loss&x=bytes")
    page.get_by_text("The job's data has no bytes: the curves are drawn by steps.").wait_for()


def test_metrics_share_a_chart_and_charts_are_pinned(jobs: list[str], tab: Watched) -> None:
    page = tab.open(f"jobs/{jobs[0]}")
    panel(page, "train/loss")
    before = headings(page)
    tool(page, "train/lr", "Pin to the top")
    wait_until(lambda: headings(page)[0] == "train/lr", "the pinned chart first")
    tool(page, "val/loss", "Pin to the top")
    wait_until(lambda: headings(page)[:2] == ["train/lr", "val/loss"], "both")
    tool(page, "val/loss", "Move forward")
    wait_until(lambda: headings(page)[:2] == ["val/loss", "train/lr"], "the other order")
    page.reload()
    panel(page, "val/loss")
    assert headings(page)[:2] == ["val/loss", "train/lr"]
    panel(page, "train/loss").get_by_label("Tools of train/loss").click()
    page.get_by_label("Add a metric").select_option("val/loss")
    both = panel(page, "train/loss, val/loss")
    assert [text.split()[0] for text in both.locator(".keys > span").all_inner_texts()] == [
        "train/loss",
        "val/loss",
    ]
    tool(page, "train/loss, val/loss", "Remove this chart")
    both.wait_for(state="detached")
    for _ in range(5):
        page.go_back()
    wait_until(lambda: headings(page) == before, "everything undone")


def test_the_limits_of_y_are_kept(jobs: list[str], tab: Watched) -> None:
    page = tab.open(f"jobs/{jobs[0]}?keys=val/accuracy")
    found = panel(page, "val/accuracy")
    canvas = "panel => panel.querySelector('canvas').toDataURL()"
    before = found.evaluate(canvas)
    found.get_by_label("Tools of val/accuracy").click()
    page.get_by_label("Largest value of y").fill("9")
    page.keyboard.press("Enter")
    wait_until(lambda: found.evaluate(canvas) != before, "another scale")
    assert "y=%3A9%3Aval%2Faccuracy" in page.url
    changed = found.evaluate(canvas)
    page.reload()
    wait_until(lambda: panel(page, "val/accuracy").evaluate(canvas) == changed, "the same scale")


def test_a_group_is_a_mean_with_a_band(jobs: list[str], tab: Watched) -> None:
    page = tab.open(f"compare?jobs={','.join(jobs)}")
    panel(page, "train/loss")
    page.get_by_label("Group the curves").select_option("label:arm")
    keys = panel(page, "train/loss").locator(".keys > span")
    wait_until(lambda: keys.count() == 2, "a curve of each group")
    assert [text.rsplit(" ", 1)[0] for text in keys.all_inner_texts()] == ["a (2)", "b (2)"]


def saved(page: Page, name: str, kind: str) -> tuple[str, bytes]:
    panel(page, name).get_by_label(f"Tools of {name}").click()
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Save as {kind}").click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_a_chart_is_saved(site: Site, tab: Watched) -> None:
    job_id = site.submit("=saved", 1)
    site.claim(job_id, "cpu-a", 1)
    points = [metrics(n, {"a/b": float(n * n)}, at=site.hands.now) for n in range(1, 6)]
    points.append(metrics(6, {"a/b": float("nan")}, at=site.hands.now))
    site.hands.report(job_id, 1, [resumed(0), *points])
    page = tab.open(f"jobs/{job_id}?smooth=0.5")
    name, content = saved(page, "a/b", "CSV")
    assert name == "a-b.csv"
    rows = list(csv.reader(io.StringIO(content.decode())))
    squares = [[str(n), str(n * n)] for n in range(1, 6)]
    assert rows == [["step", "a/b"], *squares, ["6", "NaN"]]
    name, content = saved(page, "a/b", "PNG")
    assert name == "a-b.png"
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    assert min(picture.size) > 150
    assert len(picture.getcolors(1 << 20) or []) > 10
    name, content = saved(page, "a/b", "SVG")
    assert name == "a-b.svg"
    drawing = page.context.new_page()
    drawing.set_content(content.decode())
    lines = drawing.locator("svg g path")
    assert lines.count() == 2
    assert lines.nth(1).get_attribute("d").count("L") == 4  # type: ignore[union-attr]
    page = tab.open(f"compare?jobs={job_id},{site.submit('other')}")
    _, content = saved(page, "a/b", "CSV")
    assert content.decode().splitlines()[0].startswith("step,'=saved")


def test_a_chart_fills_the_screen(jobs: list[str], tab: Watched) -> None:
    page = tab.open(f"jobs/{jobs[0]}")
    found = panel(page, "train/loss")
    height = found.locator(".plot").bounding_box()["height"]  # type: ignore[index]
    tool(page, "train/loss", "Full screen")
    plot = found.locator(".plot")
    wait_until(lambda: plot.bounding_box()["height"] > 2 * height, "a tall chart")  # type: ignore[index]
    page.evaluate("document.exitFullscreen()")
    wait_until(lambda: plot.bounding_box()["height"] == height, "the chart as before")  # type: ignore[index]


def mean_of(curves: list[dict[str, list[float]]], x: float) -> list[float]:
    """Return the values at x of the curves that have begun and not ended."""
    found = []
    for curve in curves:
        known = [(at, y) for at, y in zip(curve["xs"], curve["ys"], strict=True) if y is not None]
        if known and known[0][0] <= x <= known[-1][0]:
            found.append(float(np.interp(x, [at for at, _ in known], [y for _, y in known])))
    return found


@SOAK
def test_a_mean_is_that_of_the_curves_that_are_there(tab: Watched) -> None:
    page = tab.open("none")
    chance = random.Random(SEED)
    for _ in range(30):
        curves = []
        for _ in range(chance.randint(1, 5)):
            xs = sorted(chance.sample(range(1000), chance.randint(1, 40)))
            ys = [None if chance.random() < 0.1 else chance.gauss(0, 1) for _ in xs]
            curves.append({"xs": xs, "ys": ys})
        found = called(page, "lib/series.js", "m.aggregate(v[0], 50)", curves)
        for x, y, low, high in zip(*(found[k] for k in ("xs", "ys", "low", "high")), strict=True):
            expected = mean_of(curves, x)  # type: ignore[arg-type]
            assert (y, low, high) == pytest.approx(
                (sum(expected) / len(expected), min(expected), max(expected))
            ), (SEED, x)


def naive(xs: list[int], ys: list[float | None], weight: float, kind: str) -> list[float | None]:
    half = weight / (1 - weight) * (xs[-1] - xs[0]) / 200
    found: list[float | None] = []
    for x, y in zip(xs, ys, strict=True):
        reach = 3 * half if kind == "gauss" else half
        near = [
            (at, value)
            for at, value in zip(xs, ys, strict=True)
            if value is not None and abs(at - x) <= reach
        ]
        if y is None:
            found.append(None)
        elif kind == "median":
            found.append(float(np.median([value for _, value in near])))
        else:
            weights = [
                np.exp(-0.5 * ((at - x) / half) ** 2) if kind == "gauss" else 1.0 for at, _ in near
            ]
            found.append(float(np.average([value for _, value in near], weights=weights)))
    return found


@SOAK
@pytest.mark.parametrize("kind", ["mean", "gauss", "median"])
def test_smoothing_is_that_of_a_slow_loop(tab: Watched, kind: str) -> None:
    page = tab.open("none")
    chance = random.Random(SEED)
    for _ in range(20):
        xs = sorted(chance.sample(range(2000), chance.randint(2, 60)))
        ys = [None if chance.random() < 0.1 else chance.gauss(0, 1) for _ in xs]
        weight = chance.choice((0.3, 0.9, 0.97, 0.99))
        found = called(page, "lib/smoothing.js", "m.smoothed(...v)", xs, ys, weight, kind)
        assert found == pytest.approx(naive(xs, ys, weight, kind)), SEED


@SOAK
def test_the_steps_of_a_range_are_those_of_a_slow_loop(tab: Watched) -> None:
    page = tab.open("none")
    chance = random.Random(SEED)
    for _ in range(200):
        factor, newest = chance.uniform(0.01, 50), chance.randint(1, 300)
        low = chance.uniform(0, factor * newest)
        high = chance.uniform(low, factor * newest)
        expression = "m.stepsIn((step) => step * v[0], [v[1], v[2]], v[3])"
        first, last = called(page, "lib/series.js", expression, factor, low, high, newest)
        inside = [step for step in range(newest + 1) if low <= step * factor <= high]
        assert first <= min(inside, default=last)
        assert last >= max(inside, default=first)
        assert last - first <= len(inside) + 1


def test_outliers_are_left_out_of_the_limits(site: Site, tab: Watched) -> None:
    job_id = site.submit("spike", 1)
    site.claim(job_id, "cpu-a", 1)
    values = [5.0 if n % 2 else 6.0 for n in range(1, 101)]
    values[40] = 1e6
    points = [metrics(n + 1, {"a": value}, at=site.hands.now) for n, value in enumerate(values)]
    site.hands.report(job_id, 1, [resumed(0), *points])
    page = tab.open(f"jobs/{job_id}?keys=a")
    found = panel(page, "a")
    canvas = "panel => panel.querySelector('canvas').toDataURL()"
    before = found.evaluate(canvas)
    page.get_by_label("ignore outliers").check()
    wait_until(lambda: found.evaluate(canvas) != before, "other limits")
    assert "outliers=1" in page.url
    _, content = saved(page, "a", "SVG")
    texts = re.findall(r'text-anchor="end">([^<]*)<', content.decode())
    assert len(texts) > 1
    assert all(4 < float(text) < 7 for text in texts)
