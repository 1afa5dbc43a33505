"""What is kept of tables of runs: saved views, pinned jobs, the baseline, files, and moved jobs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dray.saved_views import SavedViewRequest
from ray_workers.shared.contracts import Cause
from service.tracking.saved_views import SavedViews
from tests.marks import IN_BROWSER
from tests.page.conftest import TOKEN, Watched
from tests.page.site import Site, run
from tests.page.test_accessibility import violations
from tests.page.test_table import cells, names
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.service.helpers import metrics, resumed

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = IN_BROWSER

VALUES = (0.5, 0.9, 0.7, None)
EXPERIMENT = "kept/tables"
LISTED = "jobs?text=kept-&columns=state,val/accuracy,queue&sort=-val/accuracy"
OF_EXPERIMENT = f"jobs?label=experiment={EXPERIMENT}&columns=val/accuracy&sort=val/accuracy"


@pytest.fixture(scope="module")
def jobs(site: Site) -> list[str]:
    found = []
    for number, value in enumerate(VALUES):
        job_id = site.submit(f"kept-{number}", 1, labels={"experiment": EXPERIMENT})
        site.claim(job_id, "cpu-a", 1)
        values = {"train/loss": 1.0} | ({} if value is None else {"val/accuracy": value})
        frames = [resumed(0), metrics(1, values, at=site.hands.now)]
        site.hands.end(job_id, 1, Cause.SUCCEEDED, "trained to its end", frames)
        found.append(job_id)
    return found


def in_order(page: Page, numbers: list[int]) -> None:
    expected = [f"kept-{number}" for number in numbers]
    wait_until(lambda: names(page) == expected, f"the order {numbers}")


def ask(server: LiveServer, method: str, path: str, **options: Any) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    response = server.ask(method, path, headers=headers, **options)
    assert response.is_success, response.text
    return response.json()


def views(server: LiveServer) -> dict[str, dict[str, Any]]:
    return {view["name"]: view for view in ask(server, "GET", "/v1/views?owner=ann")["items"]}


def test_a_view_is_saved_changed_renamed_and_deleted(
    jobs: list[str], tab: Watched, server: LiveServer
) -> None:
    page = tab.open(LISTED)
    in_order(page, [1, 2, 0, 3])
    page.get_by_role("button", name="Views").click()
    page.get_by_label("Save this list as").fill("kept-best")
    page.get_by_label("for the project (optional)").fill("vision")
    page.keyboard.press("Enter")
    page.get_by_text("ann/kept-best").wait_for()
    saved = views(server)["kept-best"]
    assert saved["project"] == "vision"
    assert saved["query"] == {
        "text": "kept-",
        "sort": "-val/accuracy",
        "columns": "state,val/accuracy,queue",
    }
    page.get_by_role("button", name="val/accuracy", exact=True).click()
    in_order(page, [0, 2, 1, 3])
    page.get_by_text("not saved: order").wait_for()
    page.get_by_role("link", name="Undo the changes").click()
    in_order(page, [1, 2, 0, 3])
    page.get_by_role("button", name="Ended").click()
    page.get_by_text("not saved: states").wait_for()
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("not saved").wait_for(state="detached")
    assert len(views(server)["kept-best"]["query"]["state"]) == 3
    page.get_by_role("button", name="Views").click()
    page.get_by_role("button", name="Rename kept-best").wait_for()
    assert violations(page, []) == []
    page.get_by_role("button", name="Rename kept-best").click()
    page.get_by_label("New name of kept-best").fill("kept-last")
    page.keyboard.press("Enter")
    wait_until(lambda: views(server).keys() == {"kept-last"}, "the new name")
    page.get_by_role("link", name="kept-last").wait_for()
    page.get_by_role("button", name="Delete kept-last").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    wait_until(lambda: not views(server), "no view")
    page.get_by_text("You have saved no views").wait_for()


def test_an_address_opens_the_view_of_another_user(
    site: Site, jobs: list[str], tab: Watched
) -> None:
    query = {"name_glob": "kept-?", "sort": "val/accuracy", "columns": "val/accuracy"}
    wanted = SavedViewRequest.model_validate({"query": query})
    run(SavedViews(site.hands.database).put("shared", wanted, owner="dr/bert"))
    page = tab.open("views/dr%2Fbert/shared")
    in_order(page, [0, 2, 1, 3])
    page.get_by_text("dr/bert/shared").wait_for()
    assert page.get_by_text("not saved").count() == 0
    page.get_by_role("button", name="Remove the filter name like kept-?").click()
    page.get_by_text("not saved: name like").wait_for()
    page.go_back()
    in_order(page, [0, 2, 1, 3])
    page.get_by_label("Leave the view shared").click()
    in_order(page, [0, 2, 1, 3])
    tab.statuses.add(404)
    tab.open("views/ann/missing")
    page.get_by_text("ann has no view missing").wait_for()


def test_pinned_jobs_come_first_in_any_order(jobs: list[str], tab: Watched) -> None:
    page = tab.open(LISTED)
    in_order(page, [1, 2, 0, 3])
    page.get_by_label("Choose kept-0").check()
    page.get_by_role("button", name="Pin", exact=True).click()
    in_order(page, [0, 1, 2, 3])
    page.get_by_label("Choose kept-2").check()
    page.get_by_role("button", name="Baseline", exact=True).click()
    in_order(page, [2, 0, 1, 3])
    accuracy = [cells(page, f"kept-{number}")[3] for number in range(4)]
    assert accuracy == ["0.5 -0.2", "0.9 +0.2", "0.7", "\N{EN DASH}"]
    page.get_by_role("button", name="val/accuracy", exact=True).click()
    in_order(page, [2, 0, 1, 3])
    page.reload()
    in_order(page, [2, 0, 1, 3])
    page.get_by_role("button", name="Unpin kept-0").click()
    in_order(page, [2, 0, 1, 3])
    page.get_by_role("button", name="kept-2 is no longer the baseline").click()
    in_order(page, [0, 2, 1, 3])
    page.go_back()
    wait_until(lambda: cells(page, "kept-1")[3] == "0.9 +0.2", "the baseline")


def test_an_experiment_keeps_its_pins_and_baseline(
    jobs: list[str], tab: Watched, server: LiveServer
) -> None:
    page = tab.open(OF_EXPERIMENT)
    in_order(page, [0, 2, 1, 3])
    page.get_by_label("Choose kept-1").check()
    page.get_by_role("button", name="Pin", exact=True).click()
    in_order(page, [1, 0, 2, 3])
    page.get_by_role("button", name="Baseline", exact=True).click()
    wait_until(lambda: cells(page, "kept-0")[2] == "0.5 -0.4", "the difference")

    def kept() -> tuple[object, object]:
        found = ask(server, "GET", f"/v1/experiments/{EXPERIMENT}")
        return found["pinned"], found["baseline"]

    assert kept() == ([jobs[1]], jobs[1])
    # Another user pins a job in the meantime. Neither change is lost.
    change = {"pinned": [jobs[1], jobs[3]]}
    ask(server, "PATCH", f"/v1/experiments/{EXPERIMENT}", json=change)
    page.get_by_label("Choose kept-1").uncheck()
    page.get_by_label("Choose kept-0").check()
    page.get_by_role("button", name="Pin", exact=True).click()
    in_order(page, [1, 3, 0, 2])
    assert kept() == ([jobs[1], jobs[3], jobs[0]], jobs[1])
    tab.open("jobs?group=experiment&sort=val/accuracy&text=kept-&columns=val/accuracy")
    page.get_by_role("button", name=EXPERIMENT).click()
    inner = page.locator(".inner li")
    expected = ["kept-1", "kept-3", "kept-0", "kept-2"]
    links = page.locator(".inner li > a")
    wait_until(lambda: links.all_inner_texts() == expected, "the pins of the group")
    assert "-0.4" in inner.nth(2).inner_text()
    change = {"pinned": [], "baseline": None}
    ask(server, "PATCH", f"/v1/experiments/{EXPERIMENT}", json=change)


@pytest.mark.parametrize(
    ("button", "suffix"), [("Save as CSV", "csv"), ("Save as Parquet", "parquet")]
)
def test_the_table_is_saved_as_a_file(
    jobs: list[str], tab: Watched, button: str, suffix: str
) -> None:
    page = tab.open(LISTED.replace("queue", "queue,loss,progress"))
    in_order(page, [1, 2, 0, 3])
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    assert download.value.suggested_filename == f"jobs.{suffix}"
    content = Path(download.value.path()).read_bytes()
    if suffix == "csv":
        head, *rows = csv.reader(io.StringIO(content.decode()))
        found = [[row[0], row[4]] for row in rows]
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(io.BytesIO(content))
        head = table.column_names
        found = [[row["job"], str(row["val/accuracy"] or "")] for row in table.to_pylist()]
    columns = ["name", "variant", "state", "val/accuracy", "queue", "progress"]
    assert head == ["job", *columns, "values_as_of"]
    assert found == [[jobs[n], str(VALUES[n] or "")] for n in (1, 2, 0, 3)]


def test_jobs_are_moved_after_a_dry_run(site: Site, tab: Watched, server: LiveServer) -> None:
    ask(server, "PUT", "/v1/queues/night", json={})
    waiting = [site.submit(f"moved-{n}") for n in range(2)]
    site.ended("moved-ended", Cause.SUCCEEDED)
    page = tab.open("jobs?text=moved-")
    page.get_by_label("Choose all").check()
    page.get_by_role("button", name="Move", exact=True).click()
    page.get_by_label("Queue", exact=True).last.select_option("night")
    plan = page.locator(".plan")
    wait_until(lambda: "2 jobs would change" in plan.inner_text(), "the plan")
    assert "refused: " in plan.inner_text()
    assert [run(site.hands.jobs.get(one)).queue for one in waiting] == ["default"] * 2
    page.get_by_role("button", name="Move 2 jobs").click()
    page.get_by_role("alert").wait_for()
    assert [run(site.hands.jobs.get(one)).queue for one in waiting] == ["night"] * 2
