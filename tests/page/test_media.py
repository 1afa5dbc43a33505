"""Media of a job in a real Chromium: by the slider, the keyboard, on a phone, and as no markup."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.marks import IN_BROWSER
from tests.page.conftest import Watched
from tests.page.site import EVIL, Site
from tests.page.test_accessibility import violations
from tests.unit.media import files
from tests.unit.service.helpers import metrics
from tests.unit.service.ingest.test_media import reported

pytestmark = IN_BROWSER

SCRIPT: dict[str, Any] = {"recipe": None, "script": {"entrypoint": "train.py"}}


def job_with(site: Site, *frames: Any) -> str:
    job_id = site.submit("media", 1, **SCRIPT)
    site.claim(job_id, "cpu-a", 1)
    site.hands.report(job_id, 1, [metrics(1, {"loss": 1.0}, at=site.hands.now), *frames])
    return job_id


def all_kinds(site: Site) -> str:
    """A job that has reported each kind at three steps."""
    draw = np.random.default_rng(0)
    frames = []
    for step in (100, 200, 300):
        labels = draw.integers(0, 2, 300)
        scores = np.clip(labels * step / 600 + draw.random(300) * 0.7, 0, 1)
        shades = np.add.outer(np.arange(96), np.arange(128)) * step // 300 % 256
        classes = draw.integers(0, 4, 200)
        said = np.where(draw.random(200) < step / 400, classes, draw.integers(0, 4, 200))
        given: dict[str, tuple[str, Any]] = {
            "image": ("val/sample", shades),
            "histogram": ("grad/layer.0", draw.normal(0, 100 / step, 4000)),
            "confusion_matrix": ("val", (classes, said, ["cat", "dog", "bird", EVIL])),
            "pr_curve": ("val/spam", (labels, scores)),
            "roc_curve": ("val/spam", (labels, scores)),
            "table": ("val/wrong", {"id": range(250), "text": [f"row {n:03}" for n in range(250)]}),
            "audio": ("val/voice", (np.sin(np.arange(8000) / 9), 8000)),
            "text": ("val/answer", f"step {step}: {EVIL}\nthe second line"),
        }
        frames += [reported(step, kind, key, value) for kind, (key, value) in given.items()]
    return job_with(site, *frames)


def test_a_slider_moves_every_series_to_a_step(site: Site, tab: Watched) -> None:
    page = tab.open(f"jobs/{all_kinds(site)}?tab=media")
    picture = page.get_by_role("region", name="Picture val/sample")
    shown = picture.locator("img")
    shown.wait_for()
    assert shown.get_attribute("alt") == "val/sample, step 300"
    newest = shown.get_attribute("src")
    slider = page.get_by_label("Step of val/sample")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.locator('img[alt="val/sample, step 200"]').wait_for()
    assert "at=200" in page.url
    page.wait_for_function("old => document.querySelector('.media img').src !== old", arg=newest)
    page.keyboard.press("Home")
    text = page.get_by_role("region", name="Text val/answer")
    text.scroll_into_view_if_needed()
    text.get_by_text("step 100: ").wait_for()
    assert EVIL in text.inner_text()
    page.go_back()
    page.locator('img[alt="val/sample, step 300"]').wait_for()


def test_each_kind_is_drawn(site: Site, tab: Watched) -> None:
    page = tab.open(f"jobs/{all_kinds(site)}?tab=media")
    histogram = page.get_by_role("region", name="Histogram grad/layer.0")
    histogram.scroll_into_view_if_needed()
    histogram.get_by_role("img", name="Histogram of grad/layer.0: 4,000 values").wait_for()
    assert histogram.locator(".bar").count() == 64
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(Boolean)"
    histogram.locator("canvas").wait_for()
    page.wait_for_function(f"({drawn})(document.querySelector('canvas.heat'))")
    histogram.locator("canvas").hover()
    histogram.get_by_text("step 200,").wait_for()
    matrix = page.get_by_role("region", name="Confusion matrix val")
    matrix.scroll_into_view_if_needed()
    matrix.locator("tbody tr").first.wait_for()
    assert matrix.locator("tbody th").all_inner_texts() == ["cat", "dog", "bird", EVIL]
    assert matrix.locator("tbody td").first.inner_text().endswith("%")
    matrix.get_by_label("share of each true class").uncheck()
    cells = [int(cell) for cell in matrix.locator("tbody td").all_inner_texts()]
    assert sum(cells) == 200
    matrix.locator("tbody td").first.hover()
    matrix.get_by_text(f"cat predicted as cat: {cells[0]},").wait_for()
    for name, area in (
        ("Precision-recall curve", "Average precision"),
        ("ROC curve", "Area under the curve"),
    ):
        curve = page.get_by_role("region", name=f"{name} val/spam")
        curve.scroll_into_view_if_needed()
        curve.get_by_text(area).wait_for()
        curve.locator("svg").hover()
        curve.get_by_text("at scores from").wait_for()
    audio = page.get_by_role("region", name="Audio val/voice")
    audio.scroll_into_view_if_needed()
    audio.locator("audio").wait_for()
    page.wait_for_function("document.querySelector('audio').duration === 1")


def test_a_table_is_sorted_and_has_pages(site: Site, tab: Watched) -> None:
    page = tab.open(f"jobs/{all_kinds(site)}?tab=media")
    table = page.get_by_role("region", name="Table val/wrong")
    table.scroll_into_view_if_needed()
    rows = table.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 100
    table.get_by_role("button", name="Next rows").click()
    table.get_by_text("rows 101 to 200 of 250").wait_for()
    table.get_by_role("button", name="Next rows").click()
    assert rows.count() == 50
    table.get_by_role("button", name="id").click()
    table.get_by_role("button", name="id").click()
    table.get_by_role("button", name="Previous rows").click()
    table.get_by_role("button", name="Previous rows").click()
    assert rows.first.inner_text().split("\t") == ["249", "row 249"]


def test_new_records_appear_and_values_left_out_are_counted(site: Site, tab: Watched) -> None:
    job_id = job_with(site)
    page = tab.open(f"jobs/{job_id}?tab=media")
    page.get_by_text("Nothing has been reported yet").wait_for()
    site.hands.report(job_id, 1, [reported(5, "image", "a", files.picture(), left_out=2)])
    page.locator('img[alt="a, step 5"]').wait_for()
    page.get_by_text("2 values were left out").wait_for()
    site.hands.report(job_id, 1, [reported(6, "image", "a", files.picture(seed=1))])
    page.locator('img[alt="a, step 6"]').wait_for()
    recipe = site.submit("a recipe", 1)
    page = tab.open(f"jobs/{recipe}")
    page.get_by_role("tab", name="Logs").wait_for()
    assert page.get_by_role("tab", name="Media").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_a_phone_shows_all(site: Site, tab: Watched, scheme: Any) -> None:
    tab.page.emulate_media(color_scheme=scheme)
    tab.page.set_viewport_size({"width": 390, "height": 844})
    page = tab.open(f"jobs/{all_kinds(site)}?tab=media")
    for region in page.locator(".media > section").all():
        region.scroll_into_view_if_needed()
        region.locator(".step").wait_for()
    page.locator("audio").wait_for()
    for summary in page.locator("main summary").all():
        summary.click()
    assert not violations(page, [])
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


def test_jobs_are_compared_side_by_side(site: Site, tab: Watched) -> None:
    pictures = [files.picture(seed=seed) for seed in range(4)]
    first = job_with(site, *(reported(n, "image", "a", pictures[n]) for n in (1, 2)))
    other = job_with(site, reported(1, "image", "a", pictures[3]))
    page = tab.open(f"compare?jobs={first},{other}")
    page.get_by_text("Media: pictures").click()
    images = page.locator(".media img")
    images.nth(1).wait_for()
    assert [one.get_attribute("alt") for one in images.all()] == [
        f"a of media (…{first[-4:]}), step 2",
        f"a of media (…{other[-4:]}), step 1",
    ]
    assert "media=1" in page.url
    page.get_by_label(f"Step of a of media (…{first[-4:]})").focus()
    page.keyboard.press("ArrowLeft")
    page.locator(f'img[alt="a of media (…{first[-4:]}), step 1"]').wait_for()
    page.go_back()
    page.locator(f'img[alt="a of media (…{first[-4:]}), step 2"]').wait_for()
