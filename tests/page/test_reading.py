"""Logs, failures and numbers as a reader of the page sees them, and the room that they have."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from api.page.static_files import load
from ray_workers.shared.contracts import Cause
from ray_workers.shared.log_rows import row_mark
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import TOKEN, Watched
from tests.page.site import Site
from tests.unit.api.serving import wait_until
from tests.unit.service.helpers import log

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = IN_BROWSER

HEADER_PX = 200
DRAW = """([path, cases]) => import(path).then(({ Terminal }) => cases.map((lines) => {
  const terminal = new Terminal();
  return lines.flatMap((text) => terminal.write({ text }).added).map(({ text }) => text);
}))"""
SGR = re.compile("\x1b\\[[0-9;]*m")


def module(name: str) -> str:
    return f"./page/{load().version}/{name}"


@pytest.fixture(scope="module")
def failed(site: Site) -> str:
    """A failed job of two ranks, with a progress bar, long lines and an error in colour."""
    job_id = site.trains("fails-at-night", 3, "cpu-a", max_retries=0)
    at = site.hands.now
    lines = [f"step {n} of rank 1 " + "x" * (n % 150) for n in range(300)]
    lines[200:200] = [row_mark("a1.1") + f"epoch 1: {n}%" for n in range(0, 101, 10)]
    lines += ["Traceback (most recent call last):", "\x1b[31mValueError\x1b[0m: loss is nan", "end"]
    site.hands.report(job_id, 1, [log(n, text, rank=1, at=at) for n, text in enumerate(lines)])
    site.hands.end(job_id, 1, Cause.USER_ERROR, "rank 1 raised ValueError: loss is nan")
    return job_id


def drawn(rng: random.Random) -> list[str]:
    """Draw the output of a program that moves the cursor."""
    controls = ["\r", "\x08", "\x1b[31m", "\x1b[0m", "\t", "\x1b[J", "\x1b[0J"]
    controls += [f"\x1b[{n}{kind}" for n in ("", 1, 2, 3) for kind in "ABCDEFG"]
    controls += [f"\x1b[{n}K" for n in ("", 0, 1, 2)]
    texts = ["ab", "xyz ", "  ", "0123456", "#"]
    return [
        "".join(rng.choice(rng.choice([controls, texts])) for _ in range(rng.randint(0, 8)))
        for _ in range(rng.randint(1, 12))
    ]


def as_a_terminal_does(lines: list[str]) -> list[str]:
    """Draw on a grid of single characters; the screen is as high as what was drawn (ECMA-48)."""
    grid: dict[int, dict[int, str]] = defaultdict(dict)
    row, last = 0, -1
    for line in lines:
        column, last = 0, max(last, row)
        for part in re.findall(r"\x1b\[[0-9]*[A-Za-z]|.", line, re.DOTALL):
            kind, digits = part[-1], part[2:-1]
            many = int(digits or 1)
            if not part.startswith("\x1b"):
                if part == "\r":
                    column = 0
                elif part == "\x08":
                    column = max(0, column - 1)
                elif part == "\t":
                    column += 8 - column % 8
                else:
                    grid[row][column] = part
                    column += 1
            elif kind in "AF":
                row = max(0, row - many)
            elif kind in "BE":
                row = min(last, row + many)
            elif kind == "C":
                column += many
            elif kind == "D":
                column = max(0, column - many)
            elif kind == "G":
                column = many - 1
            elif kind in "KJ":
                mode = int(digits or 0)
                for at in list(grid[row]):
                    if (mode != 1 and at >= column) or (mode != 0 and at <= column) or mode == 2:
                        del grid[row][at]
                for below in range(row + 1, last + 1) if kind == "J" else ():
                    grid[below].clear()
            if part.startswith("\x1b") and kind in "EF":
                column = 0
        row += 1
    return [
        "".join(grid[at].get(n, " ") for n in range(max(grid[at], default=-1) + 1)).rstrip()
        for at in range(last + 1)
    ]


def test_lines_are_drawn_as_a_terminal_does(tab: Watched) -> None:
    page = tab.open()
    rng = random.Random(46)
    cases = [drawn(rng) for _ in range(600)]
    found = page.evaluate(DRAW, [module("lib/terminal.js"), cases])
    for case, rows in zip(cases, found, strict=True):
        shown = [SGR.sub("", text).expandtabs(8).rstrip() for text in rows]
        assert shown == as_a_terminal_does(case), case


def test_hostile_sequences_are_bounded_and_keep_earlier_lines(tab: Watched) -> None:
    page = tab.open()
    case = [f"kept {n}" for n in range(100)]
    case += [
        "\x1b[999999999A\x1b[J!",
        "\x1b[2J\x1b[3J\x1b[1J",
        "\x1b[999999999Cx",
        "\x1b[9999B" * 99,
    ]
    case += [
        "\x1b[" + "9" * 5000 + "G",
        "\x1b]" + "x" * 5000,
        "\r" * 5000 + "y" * 9000 + "\r",
        "z\rok",
    ]
    (rows,) = page.evaluate(DRAW, [module("lib/terminal.js"), [case]])
    assert rows[:36] == [f"kept {n}" for n in range(36)]
    assert len(rows) <= len(case)
    assert max(len(text) for text in rows) <= 5000 + 100


def test_a_failed_job_leads_to_the_line_of_its_error(failed: str, tab: Watched) -> None:
    page = tab.open("jobs?text=fails-at-night")
    page.locator(".jobs .failed", has_text="rank 1 raised ValueError: loss is nan").wait_for()
    page.get_by_role("link", name="fails-at-night").click()
    assert "rank 1 raised ValueError" in page.locator(".why .reason").inner_text()
    page.get_by_role("link", name=re.compile("^Line 313 of the log of rank 1")).click()
    line = page.locator(".log .line.hit")
    line.wait_for()
    assert line.inner_text().endswith("ValueError: loss is nan")
    wait_until(lambda: is_in_view(page), "the line of the error")
    page.locator(".log").evaluate("(box) => { box.scrollTop = 0; }")
    page.get_by_role("button", name="Go to the error").click()
    wait_until(lambda: is_in_view(page), "the line of the error")


def is_in_view(page: Page) -> bool:
    """Whether the marked line is within the box of the log, and the box within the window."""
    return bool(
        page.evaluate(
            """() => {
      const of = (selector) => document.querySelector(selector)?.getBoundingClientRect();
      const [line, box] = [of('.log .line.hit'), of('.log')];
      if (!line || line.top < box.top) return false;
      return line.bottom <= box.bottom && line.bottom <= innerHeight;
    }"""
        )
    )


def test_a_progress_bar_is_one_line_and_the_search_counts_all(failed: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{failed}?tab=logs&rank=1")
    page.get_by_text(re.compile(r"^304 lines$")).wait_for()
    search = page.get_by_label("Search the log")
    search.fill("EPOCH 1")
    page.get_by_text("11 hits").wait_for()
    page.get_by_label("only hits").check()
    wait_until(lambda: page.locator(".log .line").count() == 11, "only the hits")
    page.get_by_label("only hits").uncheck()
    search.fill("epoch 1: 100%")
    page.get_by_text("1 hit", exact=True).wait_for()
    search.press("Enter")
    page.locator(".log .line.hit", has_text="epoch 1: 100%").wait_for()
    search.fill("of rank 1 x")
    page.get_by_text(re.compile("^298 hits")).wait_for()
    search.press("Enter")
    page.get_by_text("1 of 298 hits").wait_for()
    page.get_by_role("button", name="Previous hit").click()
    page.get_by_text("298 of 298 hits").wait_for()
    page.locator(".log .line.hit", has_text="step 299 of rank 1").wait_for()
    wait_until(lambda: is_in_view(page), "the last hit in view")


@SOAK
def test_lines_wrap_and_a_phone_shows_them(failed: str, tab: Watched) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 844})
    page = tab.open(f"jobs/{failed}?tab=logs&line=1.1.300")
    page.locator(".log .line.hit").wait_for()
    wait_until(lambda: is_in_view(page), "the line in view")
    box = page.locator(".log").bounding_box()
    assert box is not None
    assert box["y"] < 500
    assert page.locator(".log").evaluate("(box) => box.scrollWidth <= box.clientWidth")
    heights = page.locator(".log .line").evaluate_all(
        "(lines) => lines.map((line) => line.getBoundingClientRect().height)"
    )
    assert {height % 19 for height in heights} == {0}
    assert max(heights) > 19
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    page.get_by_label("times").check()
    page.locator(".log .from", has_text=re.compile(r"\d:\d\d")).first.wait_for()
    page.get_by_label("wrap").uncheck()
    wait_until(lambda: "wrap=0" in page.url, "the choice in the address")


@pytest.mark.parametrize("kind", ["runs", "waits", "failed"])
def test_the_header_leaves_room(site: Site, failed: str, tab: Watched, kind: str) -> None:
    many = {f"label-{n}": "v" * 40 for n in range(6)}
    if kind == "runs":
        job_id = site.trains("x" * 63, 1, "cpu-a", labels=many, owner="o" * 60)
    elif kind == "waits":
        job_id = site.waits("y" * 63, 1, labels=many)
    else:
        job_id = site.trains("z" * 63, 1, "cpu-a", max_retries=0, labels=many)
        site.hands.end(job_id, 1, Cause.USER_ERROR, "rank 1 raised ValueError: " + "long " * 300)
    tab.page.set_viewport_size({"width": 1366, "height": 768})
    page = tab.open(f"jobs/{job_id}")
    if kind == "failed":
        page.get_by_role("link", name="Log of rank 1 in attempt 1").wait_for()
    else:
        page.get_by_text("It is expected to").wait_for() if kind == "waits" else None
    first = page.locator(".summary").bounding_box()
    assert first is not None
    assert first["height"] <= HEADER_PX
    page.get_by_role("tab", name="Events").click()
    page.locator("#panel table").wait_for()
    other = page.locator(".summary").bounding_box()
    assert other is not None
    assert other["height"] < first["height"]
    page.get_by_role("button", name=re.compile("^Timeline")).press("Enter")
    page.locator("#details .timeline").wait_for()
    page.get_by_role("button", name="Less").press("Enter")
    page.locator("#details .timeline").wait_for(state="detached")


def test_numbers_have_the_readers_format(browser: Browser, tab: Watched) -> None:
    values = [0, 0.5, 1.0, 12.3456, 999.96, 1234.5, 4172, 12841, 12841.4, 1234567, 2.5e9, 1.23e-5]
    code = """([path, values]) => import(path).then((f) => [
      ...values.map((value) => f.number(value)), f.percent(0.1234), f.duration(1.5),
      f.bytes(1536), f.money(1234.5, 'EUR')])"""
    english = tab.open().evaluate(code, [module("lib/format.js"), values])
    context = browser.new_context(locale="de-DE")
    context.add_init_script(f"sessionStorage.setItem('dray.token', '{TOKEN}')")
    german = Watched(context.new_page(), tab.server)
    found = german.open().evaluate(code, [module("lib/format.js"), values])
    context.close()
    swap = str.maketrans(".,", ",.")
    assert found == [text.translate(swap) for text in english]
    assert english == [
        *("0", "0.5", "1", "12.35", "1,000", "1,235", "4,172", "12,841", "12,841"),
        *("1,234,567", "2.5e+9", "0.0000123", "12.3%", "1.5 s", "1.50 KiB", "1,234.50 EUR"),
    ]


def test_yaml_is_taken_and_its_lines_are_marked(site: Site, tab: Watched) -> None:
    tab.statuses |= {400, 422}
    page = tab.open("submit")
    editor = page.get_by_label("Job document")
    lines = [
        "name: from-yaml",
        "recipe: image_classification",
        "data: {source: 'sklearn://digits'}",
    ]
    editor.fill("\n".join([*lines, "train:", "  epochs: -1"]))
    page.get_by_text("/train/epochs").wait_for()
    assert page.locator(".gutter .wrong").inner_text() == "5"
    page.get_by_role("button", name="Show the position").click()
    chosen = page.evaluate("getSelection().toString()")
    assert chosen == "  epochs: -1"
    editor.fill("\n".join([*lines, "name: again"]))
    page.get_by_text("appears twice").wait_for()
    assert page.locator(".gutter .wrong").inner_text() == "4"
    editor.fill("\n".join(lines))
    page.locator(".verdict.right").get_by_text("Valid").wait_for()
    page.get_by_role("button", name="Submit", exact=True).click()
    page.get_by_role("heading", name="from-yaml").wait_for()


def test_a_job_that_can_never_start_is_red(site: Site, tab: Watched) -> None:
    def never(route: Route) -> None:
        answer = route.fetch()
        body = answer.json() | {"start": None}
        body["reason"] = {"code": "unsatisfiable", "message": "no node of the cluster has a GPU"}
        route.fulfill(response=answer, json=body)

    tab.page.route("**/v1/jobs?dry_run=true", never)
    page = tab.open("submit")
    page.locator(".verdict.wrong").get_by_text("It can never start").wait_for()
    assert page.locator(".verdict.right").count() == 0


@SOAK
def test_a_view_that_was_opened_while_the_server_was_away_is_shown_later(
    failed: str, tab: Watched
) -> None:
    tab.breaks = True
    page = tab.open()
    page.context.set_offline(True)
    page.evaluate(f"location.hash = '#/jobs/{failed}'")
    page.get_by_text("This part of the page will be shown when the server is back").wait_for()
    page.context.set_offline(False)
    page.get_by_role("heading", name="fails-at-night").wait_for()


@SOAK
def test_a_script_without_metrics_is_told_how_to_report_them(site: Site, tab: Watched) -> None:
    site.hands.now -= timedelta(minutes=10)
    job_id = site.submit("silent", 1, script={"entrypoint": "train.py"}, recipe=None)
    site.claim(job_id, "cpu-a", 1)
    site.hands.now += timedelta(minutes=10)
    page = tab.open(f"jobs/{job_id}")
    page.get_by_text("This script has reported no metrics").wait_for()


def test_a_reason_names_jobs_instead_of_their_ids(site: Site, tab: Watched) -> None:
    first, after = site.submit("comes-first", 1), site.submit("comes-second", 1)

    def waits(route: Route) -> None:
        answer = route.fetch()
        reason = {"code": "dependency", "message": f"waits for the success of {first} (QUEUED)"}
        route.fulfill(response=answer, json=answer.json() | {"reason": reason})

    tab.page.route("**/explain", waits)
    page = tab.open(f"jobs/{after}")
    page.locator(".reason").get_by_role("link", name="comes-first").wait_for()
    expected = "waits for the success of comes-first (QUEUED)"
    assert page.locator(".reason").inner_text() == expected


def test_events_and_the_cluster_name_jobs_too(site: Site, tab: Watched) -> None:
    first, after = site.submit("named-first", 1), site.submit("named-second", 1)
    gone = f"job-{'0' * 26}"

    def waits(route: Route) -> None:
        answer = route.fetch()
        reason = {"code": "dependency", "message": f"waits for {first} and {gone}"}
        route.fulfill(response=answer, json=answer.json() | {"reason": reason, "start": None})

    def happened(route: Route) -> None:
        event = {
            "seq": 1,
            "time": "2026-11-30T08:00:00Z",
            "type": "state",
            "message": f"after {first}",
        }
        body = f"event: state\nid: 1\ndata: {json.dumps(event)}\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    tab.page.route("**/explain", waits)
    tab.page.route("**/events", happened)
    page = tab.open(f"jobs/{after}?tab=events")
    page.get_by_role("cell", name="after named-first").get_by_role("link").wait_for()
    page = tab.open("cluster")
    reason = page.get_by_role("cell", name=f"waits for named-first and {gone}").first
    reason.get_by_role("link", name="named-first").wait_for()
    assert first not in page.locator("main").inner_text()


SCALE = """([path, spans, begin, end, times]) => import(path).then(({ scaleOf }) => {
  const { at, isShortened } = scaleOf(spans, begin, end);
  return [times.map(at), isShortened];
})"""


def test_a_long_wait_does_not_squeeze_the_timeline(tab: Watched) -> None:
    page = tab.open()

    def scale(*ends: int) -> tuple[list[float], bool]:
        states = ["QUEUED", "STARTING", "QUEUED", "RUNNING"]
        spans, begin = [], 0
        for state, end in zip(states, ends, strict=False):
            spans.append({"state": state, "from": begin * 1000, "to": end * 1000})
            begin = end
        path = module("views/job/timeline.js")
        asked = [path, spans, 0, ends[-1] * 1000, [0, *(end * 1000 for end in ends)]]
        places, is_shortened = json.loads(json.dumps(page.evaluate(SCALE, asked)))
        assert places == sorted(places)
        return places, is_shortened

    places, is_shortened = scale(36_000, 36_060, 72_000, 73_000)
    assert is_shortened
    waited = places[1] - places[0] + places[3] - places[2]
    assert waited == pytest.approx(1 / 3)
    assert places[-1] == pytest.approx(1)
    places, is_shortened = scale(10, 20, 30, 100)
    assert not is_shortened
    assert places == pytest.approx([0, 0.1, 0.2, 0.3, 1])
