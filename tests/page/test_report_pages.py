"""Reports in a real Chromium: the editor, live charts, and the exported file."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from service.domain.charts import curves
from tests.marks import IN_BROWSER
from tests.page.conftest import TOKEN, Watched
from tests.page.site import EVIL, Site
from tests.page.test_charts import called
from tests.page.test_page import HOSTILE
from tests.seeds import drawn
from tests.unit.api.serving import LiveServer, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = IN_BROWSER

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
BODY = "\n\n".join(HOSTILE)


@pytest.fixture(scope="module")
def jobs(site: Site) -> list[str]:
    return [
        site.trains(f"report-{n}", n, "cpu-a", labels={"experiment": "reports"}) for n in range(3)
    ]


def text_of(jobs: list[str]) -> str:
    return (
        f"# The runs\n\n**Three** of them.\n\n{BODY}\n\n"
        f"```chart\ntitle: {EVIL!r}\nmetrics: [train/loss, val/loss]\n"
        f"runs: [{', '.join(jobs)}]\n```\n\n"
        '~~~table\nwhere: experiment = "reports"\nsort: name\ncolumns: state,train/loss,lr\n~~~\n'
    )


def written(server: LiveServer, title: str, text: str) -> str:
    body = {"title": title, "text": text}
    answer = server.ask("POST", "/v1/reports", json=body, headers=HEADERS)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    return found


def test_a_report_is_written_with_a_preview(jobs: list[str], tab: Watched) -> None:
    tab.statuses |= {422}
    page = tab.open("reports")
    page.get_by_role("link", name="New report").click()
    page.get_by_label("Title").fill("Losses")
    text = page.get_by_label("Text, in Markdown")
    chart = f"```chart\nmetrics: train/loss\nruns: [{jobs[0]}]\n```"
    text.fill(f"# One\n\n{chart}\nsmoothing: 3\n```chart\nsmoothing: 3\n```")
    page.get_by_text("line 9: metrics: the field 'metrics' is missing").wait_for()
    assert page.get_by_role("button", name="Save").is_disabled()
    page.get_by_role("button", name="Show the line").click()
    assert page.evaluate("getSelection().toString()") == "smoothing: 3"
    text.fill(f"# One\n\n{chart}")
    preview = page.get_by_role("region", name="Preview")
    preview.locator(".panel canvas").wait_for()
    assert preview.get_by_role("heading", name="One").evaluate("at => at.localName") == "h2"
    page.reload()
    preview.locator(".panel canvas").wait_for()
    assert text.input_value().endswith(chart), "the draft is kept"
    page.get_by_role("button", name="Save").click()
    page.get_by_role("heading", name="Losses").wait_for()
    page.locator(".report .panel canvas").wait_for()
    page.get_by_role("link", name="Reports").click()
    page.get_by_role("link", name="Losses").click()
    page.get_by_label("Export or delete").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_role("link", name="New report").wait_for()
    wait_until(lambda: page.get_by_role("link", name="Losses").count() == 0, "no report")


def test_a_report_shows_its_runs(server: LiveServer, jobs: list[str], tab: Watched) -> None:
    report = written(server, EVIL, text_of([*jobs, "job-none"]))
    page = tab.open(f"reports/{report}")
    page.get_by_role("heading", name=EVIL).first.wait_for()
    page.locator(".panel canvas").wait_for()
    names = page.locator(".panel .keys span span").all_inner_texts()
    assert len(page.locator(".panel .keys > span").all()) >= 3, names
    page.get_by_text("No job has the id job-none. It may have been deleted.").wait_for()
    rows = page.locator("tbody tr")
    rows.first.wait_for()
    cells = [row.locator("td").first.inner_text() for row in rows.all()]
    assert [name for name in cells if name.startswith("report-")] == [
        "report-0",
        "report-1",
        "report-2",
    ]
    assert page.title() == f"{EVIL} - dray"
    assert page.get_by_text("<script>document.title=2</script>").count() == 1


def test_the_text_of_another_writer_is_not_lost(server: LiveServer, tab: Watched) -> None:
    tab.statuses |= {412}
    report = written(server, "Two writers", "before")
    page = tab.open(f"reports/{report}?edit=1")
    text = page.get_by_label("Text, in Markdown")
    text.fill("mine")
    path = f"/v1/reports/{report}"
    server.ask("PATCH", path, json={"version": 1, "text": "theirs"}, headers=HEADERS)
    page.get_by_role("button", name="Save").click()
    page.get_by_text("ann has changed the report in the meantime").wait_for()
    assert "theirs" in page.locator(".source").inner_text()
    page.get_by_role("button", name="Replace it with mine").click()
    page.get_by_role("button", name="Save").click()
    page.locator(".prose").get_by_text("mine").wait_for()
    found = server.ask("GET", path, headers=HEADERS).json()
    assert (found["version"], found["text"]) == (3, "mine")


def test_runs_that_are_compared_are_added_to_a_report(
    server: LiveServer, jobs: list[str], tab: Watched
) -> None:
    page = tab.open(f"compare?jobs={','.join(jobs)}&log=1&x=seconds")
    page.locator(".panel canvas").first.wait_for()
    page.get_by_label("Add to a report").click()
    page.get_by_role("button", name="New report").click()
    text = page.get_by_label("Text, in Markdown")
    text.wait_for()
    blocks = text.input_value()
    assert f'runs: ["{jobs[0]}","{jobs[1]}","{jobs[2]}"]' in blocks
    assert 'x: "seconds"\nscale: "log"' in blocks
    page.locator(".preview .panel canvas").first.wait_for()
    page.get_by_role("button", name="Discard changes").click()
    page.get_by_role("heading", name="Reports").wait_for()


def test_the_best_trials_of_a_sweep_are_added_to_a_report(site: Site, tab: Watched) -> None:
    page = tab.open(f"compare?sweep={site.sweep(6)}")
    page.locator(".lines svg").first.wait_for()
    best = page.locator(".trials tbody tr").first.locator("td").first.inner_text()
    page.get_by_label("Add to a report").click()
    page.get_by_role("button", name="New report").click()
    preview = page.get_by_role("region", name="Preview")
    first = preview.locator("tbody tr").first
    first.wait_for()
    assert best.split()[0] in first.inner_text()
    preview.locator(".panel").scroll_into_view_if_needed()
    preview.locator(".panel canvas").wait_for()
    assert page.locator(".verdict.wrong").count() == 0
    page.get_by_role("button", name="Discard changes").click()
    page.get_by_role("heading", name="Reports").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_exported_file_needs_no_script(
    browser: Browser,
    server: LiveServer,
    jobs: list[str],
    tab: Watched,
    tmp_path: Path,
    scheme: Any,
) -> None:
    report = written(server, EVIL, text_of(jobs))
    page = tab.open(f"reports/{report}")
    page.get_by_label("Export or delete").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as HTML with values").click()
    file = tmp_path / "report.html"
    download.value.save_as(file)
    context = browser.new_context(
        java_script_enabled=False, color_scheme=scheme, viewport={"width": 390, "height": 800}
    )
    plain = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    plain.on("console", lambda message: said.append(message.text))
    plain.on("request", lambda request: asked.append(request.url))
    plain.goto(file.as_uri())
    assert plain.locator("h1").inner_text() == EVIL
    assert plain.locator("svg path.c0, svg [class^=c]").count() > 0
    box = plain.locator("svg").bounding_box()
    assert box is not None
    assert 0 < box["width"] <= 390
    assert plain.locator("details").count() == 1
    plain.locator("summary").click()
    assert plain.locator("details td").count() > 30
    back = plain.locator("body").evaluate("at => getComputedStyle(at).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 30)"}[scheme]
    line = plain.locator("svg g path").first.evaluate("at => getComputedStyle(at).stroke")
    assert line.startswith("rgb(")
    plain.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    context.close()
    assert asked == [file.as_uri()]
    assert not said


def test_reports_are_read_and_written_on_a_phone(
    server: LiveServer, jobs: list[str], tab: Watched
) -> None:
    report = written(server, "x" * 300, text_of(jobs))
    tab.page.set_viewport_size({"width": 390, "height": 800})
    for place, selector in (
        ("reports", "tbody a"),
        (f"reports/{report}", ".panel canvas"),
        (f"reports/{report}?edit=1", ".preview .panel"),
    ):
        page = tab.open(place)
        page.locator(selector).first.wait_for()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, place


class Run:
    """A run with random properties."""

    def __init__(self, randomly: random.Random) -> None:
        self.id = f"job-{randomly.randrange(10**9)}"
        self.name = randomly.choice(["", "same", "other"])
        in_array = randomly.random() < 0.6
        self.array_id = f"array-{randomly.randrange(2)}" if in_array else None
        self.array_index = randomly.randrange(30) if in_array else None
        self.variant = f"#{self.array_index} lr {randomly.randrange(3)}" if in_array else None
        self.colour = randomly.randrange(20) if randomly.random() < 0.2 else None

    @property
    def json(self) -> dict[str, Any]:
        return dict(vars(self))


def test_the_export_and_the_page_compute_the_same(server: LiveServer, tab: Watched) -> None:
    page = tab.open("reports")
    for seed in drawn(25):
        randomly = random.Random(seed)
        runs = [Run(randomly) for _ in range(randomly.randint(1, 24))]
        given = [run.json for run in runs]
        page.evaluate("sessionStorage.removeItem('dray.colours')")
        colours = called(page, "lib/colours.js", "[...m.coloursOf(v[0])]", given)
        assert dict(colours) == curves.colours_of(runs)
        names = called(page, "parts/runs.js", "[...m.namesOf(v[0])]", given)
        assert dict(names) == curves.names_of(runs)
        steps = sorted(randomly.sample(range(10_000), randomly.randint(1, 60)))
        values = [randomly.gauss(0, 10) for _ in steps]
        weight = randomly.choice([0.1, 0.5, 0.9, 0.99])
        smooth = called(
            page, "lib/smoothing.js", "m.smoothed(v[0], v[1], v[2])", steps, values, weight
        )
        assert smooth == pytest.approx(curves.smoothed(steps, values, weight))
        spec: dict[str, Any] = {
            "recipe": randomly.choice(["language_model", None]),
            "federated": randomly.choice([None, None, {"clients": 2}]),
            "train": {
                "epochs": 3,
                "global_batch_size": 32,
                "batch_range": randomly.choice([None, [8, 64]]),
                "max_steps": randomly.choice([None, None, 5]),
            },
            "model": randomly.choice(
                [{"name": "gpt", "context_length": 64}, {"name": "cnn"}, None]
            ),
        }
        total = randomly.choice([None, 300])
        known = {
            key: {"steps": steps, "values": values}
            for key in ("epoch", "train/tokens", "sync/sent_bytes")
            if randomly.random() < 0.5
        }
        job = {"spec": spec, "progress": {"total_steps": total}}
        for axis in ("epoch", "samples", "tokens", "bytes"):
            at = [0, steps[0], steps[-1], 777, 20_000]
            code = "(() => { const f = m.placesOn(v[0], v[1], v[2]); return f && v[3].map(f); })()"
            wanted = called(page, "lib/axes.js", code, axis, known, job, at)
            series = {key: (one["steps"], one["values"]) for key, one in known.items()}
            position = curves.position_on(axis, series, spec, total)
            assert (position is None) == (not wanted), (axis, spec)
            if position is not None:
                found = [position(step) for step in at]
                assert all(map(math.isfinite, found))
                assert found == pytest.approx(wanted)
