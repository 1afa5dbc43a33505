"""The table of runs: columns, order, groups, completion, actions on many jobs, and the history."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from api.page.static_files import load
from ray_workers.shared.contracts import Cause
from service.db.repositories import jobs as jobs_repository
from service.domain.errors import InvalidSearch
from service.domain.tracking.search import parse_search
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import Watched
from tests.page.site import Site, run
from tests.unit.api.serving import wait_until
from tests.unit.service.helpers import metrics, resumed

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = IN_BROWSER

VALUES = (0.5, 0.9, 0.7, None, 0.8)
"""The accuracy of each job; None for a job that has not reported one."""
BY_VALUE = [1, 4, 2, 0, 3]


@pytest.fixture(scope="module")
def jobs(site: Site) -> list[str]:
    found = []
    for number, value in enumerate(VALUES):
        labels = {"experiment": f"table-{number % 2}", "arm": "ab"[number % 2]}
        train = {"optimizer": {"lr": 10.0 ** -(number + 1)}}
        job_id = site.submit(f"table-{number}", 1, labels=labels, train=train)
        site.claim(job_id, "cpu-a", 1)
        values = {"train/loss": 1e-5} | ({} if value is None else {"val/accuracy": value})
        frames = [resumed(0), metrics(1, values, at=site.hands.now)]
        site.hands.end(job_id, 1, Cause.SUCCEEDED, "trained to its end", frames)
        found.append(job_id)
    return found


LISTED = (
    "jobs?text=table-&columns=state,val/accuracy,best:val/accuracy,train.optimizer.lr,labels.arm"
)


def names(page: Page) -> list[str]:
    return page.locator(".jobs .name > a").all_inner_texts()


def cells(page: Page, name: str) -> list[str]:
    link = page.get_by_role("link", name=name, exact=True)
    return page.locator(".jobs tbody tr").filter(has=link).locator("td").all_inner_texts()


def in_order(page: Page, numbers: list[int]) -> None:
    expected = [f"table-{number}" for number in numbers]
    wait_until(lambda: names(page) == expected, f"the order {numbers}")


def test_chosen_columns_are_shown_and_sorted_by(jobs: list[str], tab: Watched) -> None:
    page = tab.open(LISTED)
    in_order(page, [4, 3, 2, 1, 0])
    row = cells(page, "table-1")
    assert row[2:] == ["SUCCEEDED", "0.9", "0.9", "0.01", "b"]
    missing = cells(page, "table-3")
    assert missing[3:5] == ["\N{EN DASH}"] * 2
    heading = page.get_by_role("button", name="val/accuracy", exact=True)
    heading.click()
    in_order(page, BY_VALUE)
    assert page.locator("th", has_text="↓").get_attribute("aria-sort") == "descending"
    heading.click()
    in_order(page, [*BY_VALUE[-2::-1], BY_VALUE[-1]])
    page.reload()
    in_order(page, [*BY_VALUE[-2::-1], BY_VALUE[-1]])
    page.go_back()
    in_order(page, BY_VALUE)
    page.go_back()
    in_order(page, [4, 3, 2, 1, 0])


def test_columns_are_added_and_removed(jobs: list[str], tab: Watched) -> None:
    page = tab.open("jobs?text=table-")
    in_order(page, [4, 3, 2, 1, 0])
    page.get_by_role("button", name="Columns").click()
    page.get_by_label("Add a metric, a parameter or a label").fill("val/accuracy")
    assert "train.optimizer.lr" in page.locator("#columns option").evaluate_all(
        "all => all.map((one) => one.value)"
    )
    page.keyboard.press("Enter")
    page.get_by_label("Remove Progress").click()
    page.get_by_label("Move Loss to the left").click()
    page.keyboard.press("Escape")
    shown = page.locator(".jobs th").all_inner_texts()
    assert shown[1:4] == ["Name", "Loss", "State"]
    assert shown[-1] == "val/accuracy"
    assert "Progress" not in shown
    loss = page.locator(".jobs td.loss").first
    assert loss.inner_text() == "0.00001"


def test_a_column_that_is_no_column_is_told(jobs: list[str], tab: Watched) -> None:
    tab.statuses.add(422)
    page = tab.open("jobs?columns=state,best:")
    page.locator(".failure", has_text="column").wait_for()


def test_groups_have_the_best_and_a_spread(jobs: list[str], tab: Watched) -> None:
    page = tab.open("jobs?text=table-&group=experiment&sort=-val/accuracy")
    rows = page.locator(".groups tbody tr")
    rows.nth(1).wait_for()
    first = rows.nth(0).locator("td").all_inner_texts()
    assert first[0].endswith("table-1")
    assert first[1:3] == ["2", "0.9"]
    second = rows.nth(1).locator("td").all_inner_texts()
    assert second[1:4] == ["3", "0.8", "0.6667"]
    assert second[5] == "0.5 to 0.8"
    page.get_by_role("button", name="table-0").click()
    inner = page.locator(".inner li > a")
    wait_until(lambda: inner.all_inner_texts() == ["table-4", "table-2", "table-0"], "its jobs")
    page.get_by_role("button", name="Show only these jobs").click()
    in_order(page, [4, 2, 0])


def test_a_group_is_shown_within_a_search(site: Site, jobs: list[str], tab: Watched) -> None:
    site.submit("not-in-the-group", owner="bert")
    texts = [f'name = "{name}"' for name in ("not-in-the-group", "table-0", "table-1")]
    page = tab.open(f"jobs?group=user&sort=-best:val/accuracy&where={quote(' or '.join(texts))}")
    page.get_by_role("button", name="ann").click()
    page.get_by_role("columnheader", name="Best val/accuracy", exact=True).wait_for()
    page.get_by_role("button", name="Show only these jobs").click()
    in_order(page, [1, 0])


def test_groups_are_not_compared_by_text(jobs: list[str], tab: Watched) -> None:
    page = tab.open("jobs?text=table-&sort=name")
    in_order(page, [0, 1, 2, 3, 4])
    page.get_by_label("group by").select_option("experiment")
    page.locator(".groups tbody tr").nth(1).wait_for()


def test_the_direction_of_a_long_heading_is_visible(jobs: list[str], tab: Watched) -> None:
    page = tab.open(f"{LISTED}&sort=-train.optimizer.lr")
    in_order(page, [0, 1, 2, 3, 4])
    assert page.locator("th[aria-sort]").inner_text() == "↓ train.optimizer.lr"


def test_back_undoes_filters_searches_and_selections(jobs: list[str], tab: Watched) -> None:
    page = tab.open("jobs?text=table-")
    in_order(page, [4, 3, 2, 1, 0])
    page.get_by_role("button", name="Ended").click()
    field = page.get_by_label("Expression; Enter searches")
    field.fill("train.optimizer.lr < 0.001")
    field.press("Enter")
    in_order(page, [4, 3])
    page.get_by_label("Choose table-4").check()
    page.get_by_label("Choose table-3").check()
    page.get_by_text("2 jobs chosen").wait_for()
    page.go_back()
    page.get_by_text("1 job chosen").wait_for()
    page.go_back()
    page.locator(".actions").wait_for(state="detached")
    page.go_back()
    in_order(page, [4, 3, 2, 1, 0])
    assert field.input_value() == ""
    assert "state=" in page.url
    page.go_back()
    wait_until(lambda: "state=" not in page.url, "the filter undone")
    page.go_forward()
    assert "state=" in page.url


def test_what_is_typed_at_once_is_one_entry(jobs: list[str], tab: Watched) -> None:
    page = tab.open()
    page.get_by_label("Name or id").press_sequentially("table-3", delay=60)
    wait_until(lambda: names(page) == ["table-3"], "the job")
    page.go_back()
    wait_until(lambda: "text=" not in page.url, "nothing typed")
    assert page.get_by_label("Name or id").input_value() == ""


def test_tabs_are_undone(jobs: list[str], tab: Watched) -> None:
    page = tab.open(f"jobs/{jobs[0]}")
    page.get_by_role("tab", name="Events").click()
    page.get_by_role("tab", name="Document").click()
    page.locator("pre.document").wait_for()
    page.go_back()
    page.get_by_role("tab", name="Events", selected=True).wait_for()
    page.go_back()
    page.get_by_role("tab", name="Curves", selected=True).wait_for()


def test_an_action_shows_first_what_it_would_change(site: Site, tab: Watched) -> None:
    waiting = [site.submit(f"bulk-{n}") for n in range(2)]
    other = site.submit("bulk-of-bert", owner="bert")
    ended = site.ended("bulk-ended", Cause.SUCCEEDED)
    page = tab.open("jobs?text=bulk-")
    page.get_by_label("Choose all").check()
    page.get_by_role("button", name="Cancel", exact=True).click()
    plan = page.locator(".plan")
    wait_until(lambda: "3 jobs would change" in plan.inner_text(), "the plan")
    assert "refused: " in plan.inner_text()
    page.get_by_role("button", name="Keep them").click()
    states = [run(site.hands.jobs.get(one)).state for one in (*waiting, other)]
    assert states == ["QUEUED"] * 3
    page.get_by_role("button", name="Tag", exact=True).click()
    page.get_by_label("Add tags").fill("reviewed, good")
    page.get_by_role("button", name="Change 4 jobs").click()
    page.get_by_role("link", name="#reviewed").nth(3).wait_for()
    page.locator(".actions").wait_for(state="detached")
    tags = site.hands.database.read_sync(lambda s: jobs_repository.tags(s, [other, ended]))
    assert list(tags.values()) == [["good", "reviewed"]] * 2
    page.get_by_label("Choose bulk-0").check()
    page.get_by_role("button", name="Hold", exact=True).click()
    page.get_by_role("button", name="Hold them").click()
    page.locator("tr", has_text="bulk-0").get_by_text("HELD").wait_for()
    page.get_by_label("Choose bulk-ended").check()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete them").click()
    wait_until(lambda: "bulk-ended" not in names(page), "the job gone")


def test_an_expression_is_completed(jobs: list[str], tab: Watched) -> None:
    page = tab.open("jobs?text=table-")
    in_order(page, [4, 3, 2, 1, 0])
    field = page.get_by_label("Expression; Enter searches")
    field.press_sequentially("val/a")
    page.get_by_role("option", name="val/accuracy").wait_for()
    field.press("ArrowDown")
    field.press("Enter")
    assert field.input_value() == "val/accuracy "
    field.press_sequentially("> 0.75 ")
    page.get_by_role("option", name="and").click()
    field.press_sequentially("labels.arm = a")
    page.get_by_role("option", name='"a"').click()
    field.press("Escape")
    field.press("Enter")
    in_order(page, [4])


def error_of(text: str) -> str:
    try:
        parse_search(text)
    except InvalidSearch as error:
        return error.message
    return ""


KNOWN = {
    "metrics": ["val/loss", "loss", "my metric", 'a"b'],
    "labels": ["team", "a/b"],
    "fields": ["train.optimizer.lr", "model.name"],
    "tags": ["good"],
    "values": {"state": ["FAILED", "RUNNING"], "queue": ["default"]},
}


@SOAK
def test_whatever_is_taken_from_the_completions_is_an_expression(tab: Watched) -> None:
    """Walk through the completions, with a literal where none is offered."""
    page = tab.open("none")
    module = f"./page/{load().version}/lib/completion.js"
    code = """async ([path, known]) => {
        const { completions } = await import(path);
        const all = new Set();
        const literal = (text) => {
            if (/exists\\($/.test(text)) return 'val/loss)';
            if (/ in \\($/.test(text)) return '"x") ';
            if (/_at [<>=!]+ $/.test(text)) return '"2026-11-01" ';
            const isText = /(name|queue|owner|project|experiment|id|labels\\S*) !?= $/.test(text);
            return isText ? '"x" ' : '1 ';
        };
        const walk = (text, depth) => {
            const { from, options } = completions(text, text.length, known);
            if (depth > 3) return;
            if (!options.length) {
                all.add(text + literal(text));
                return;
            }
            for (const option of options) {
                const next = text.slice(0, from) + option;
                all.add(next);
                if (depth < 3 || /[<>=] $/.test(next)) walk(next, depth + 1);
            }
        };
        walk('', 0);
        return [...all];
    }"""
    found = page.evaluate(code, [module, KNOWN])
    assert len(found) > 100
    errors = {text: message for text in found if (message := error_of(text))}
    assert not {text: one for text, one in errors.items() if "found the end" not in one}
    assert len(found) - len(errors) > 50
    assert 'state = "FAILED" ' in found
