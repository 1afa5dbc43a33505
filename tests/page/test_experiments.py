"""Experiments, changes between two jobs, and lineages in a real Chromium."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dray import Client
from dray.experiment_requests import ExperimentRequest
from ray_workers.shared.contracts import Cause, FrameKind
from tests.marks import IN_BROWSER
from tests.page.conftest import TOKEN, Watched
from tests.page.site import EVIL, Site, run
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.service.helpers import frame, metrics, resumed

pytestmark = IN_BROWSER

NAME = "width/lr ü"
PLACE = "experiments/width%2Flr%20%C3%BC"
VALUES = (0.5, 0.9, 0.7, None, 0.95)
"""The accuracy of each job; the last job has failed."""


@pytest.fixture(scope="module")
def jobs(site: Site) -> list[str]:
    found = []
    for number, value in enumerate(VALUES):
        train = {"optimizer": {"lr": 10.0 ** -(number + 1)}}
        labels = {"experiment": NAME}
        job_id = site.submit(f"wide-{number}", 1, labels=labels, train=train, max_retries=0)
        site.claim(job_id, "cpu-a", 1)
        values = {"train/loss": 1.0 + number} | ({} if value is None else {"val/accuracy": value})
        frames = [resumed(0), metrics(1, values, at=site.hands.now)]
        cause = Cause.USER_ERROR if number == 4 else Cause.SUCCEEDED
        site.hands.end(job_id, 1, cause, "ended", frames)
        found.append(job_id)
    return found


def change(site: Site, **fields: Any) -> None:
    """Change the experiment as another user."""
    wanted = ExperimentRequest.model_validate(fields)
    run(site.experiments.change(NAME, wanted, actor="bert"))


def rows(tab: Watched) -> list[list[str]]:
    return [
        [cell.strip() for cell in row.locator("td").all_inner_texts()]
        for row in tab.page.locator(".leaders tbody tr").all()
    ]


def first(tab: Watched) -> str:
    """The name of the first run; empty while the runs are loaded."""
    return next((row[1].split()[0] for row in rows(tab) if len(row) > 1), "")


def test_an_experiment_is_found_with_its_best_run(
    site: Site, tab: Watched, jobs: list[str]
) -> None:
    page = tab.open("experiments")
    row = page.locator("tbody tr").filter(has_text=NAME)
    assert "5" in row.locator("td").nth(1).inner_text()
    assert "4 SUCCEEDED" in row.inner_text()
    page.get_by_label("best of the metric").fill("val/accuracy")
    page.keyboard.press("Enter")
    row.get_by_role("link", name="0.9", exact=True).wait_for()
    page.get_by_role("link", name=NAME).click()
    page.get_by_role("heading", name=NAME).wait_for()
    page.locator(".leaders tbody tr").first.wait_for()
    found = rows(tab)
    assert [row[0] for row in found] == ["1", "2", "3", "4", "\N{EN DASH}"]
    assert [row[1].split()[0] for row in found] == [
        "wide-4",
        "wide-1",
        "wide-2",
        "wide-0",
        "wide-3",
    ]
    heads = page.locator(".leaders th").all_inner_texts()
    assert "lr" in heads
    assert found[1][heads.index("lr")] == "0.01"
    # A failed run is not the best.
    best = page.locator(".fact").filter(has_text="Best val/accuracy")
    assert "0.9 of wide-1" in " ".join(best.inner_text().split())
    resubmit = page.get_by_role("link", name="Edit and resubmit the best")
    assert resubmit.get_attribute("href") == f"#/submit?from={jobs[1]}"
    page.get_by_label("Better if").select_option("1")
    wait_until(lambda: first(tab) == "wide-0", "the smallest comes first")
    page.get_by_label("Metric", exact=True).select_option("train/loss")
    wait_until(lambda: [row[1][:6] for row in rows(tab)][-1:] == ["wide-4"], "by loss")
    page.go_back()
    page.go_back()
    wait_until(lambda: first(tab) == "wide-4", "Back undoes the choices")
    assert page.title() == f"{NAME} - dray"
    page.get_by_role("link", name="All experiments").click()
    page.get_by_role("heading", name="Experiments").wait_for()
    wait_until(lambda: page.title() == "Experiments - dray", "the list has its own title")


def test_runs_are_pinned_and_compared_with_the_baseline(
    site: Site, tab: Watched, jobs: list[str]
) -> None:
    page = tab.open(f"{PLACE}?metric=val%2Faccuracy")
    page.get_by_role("button", name="Pin wide-3").click()
    wait_until(lambda: first(tab) == "wide-3", "a pinned run comes first")
    page.get_by_role("button", name="Make wide-0 the baseline").click()
    page.get_by_role("link", name="What changed since the baseline").click()
    lr = page.locator("tr").filter(has=page.get_by_text("/train/optimizer/lr", exact=True))
    lr.wait_for()
    assert lr.locator("td").all_inner_texts()[1:] == ["0.1", "0.01"]
    assert page.url.endswith(f"jobs={jobs[0]}%2C{jobs[1]}")
    page.get_by_role("link", name="Swap").click()
    wait_until(lambda: lr.locator("td").all_inner_texts()[1:] == ["0.01", "0.1"], "swapped")
    page.go_back()
    page.go_back()
    page.get_by_role("button", name="Remove the baseline").click()
    page.locator(".fact").filter(has_text="none").wait_for()
    page.get_by_role("button", name="Pin wide-3").click()
    wait_until(lambda: first(tab) == "wide-4", "unpinned")


def test_two_users_who_pin_at_once_lose_nothing(site: Site, tab: Watched, jobs: list[str]) -> None:
    tab.statuses = {412}
    page = tab.open(f"{PLACE}?metric=val%2Faccuracy")
    page.get_by_role("button", name="Pin wide-3").wait_for()
    change(site, pinned=[jobs[2]])
    page.get_by_role("button", name="Pin wide-3").click()
    wait_until(lambda: first(tab) == "wide-2", "the other user's pin comes first")
    assert run(site.experiments.get(NAME)).pinned == [jobs[2], jobs[3]]
    assert page.locator(".failure").count() == 0
    change(site, pinned=[])


def test_notes_are_edited_and_another_users_notes_are_not_lost(
    site: Site, tab: Watched, jobs: list[str]
) -> None:
    tab.statuses = {412}
    page = tab.open(PLACE)
    page.get_by_role("button", name="Write notes").click()
    page.get_by_label("Notes, in Markdown").fill(f"# Why\n**wide** {EVIL}")
    change(site, layout={"charts": ["val/accuracy"]})  # another field, so there is no conflict
    page.get_by_role("button", name="Save the notes").click()
    notes = page.get_by_role("region", name="Notes", exact=True)
    notes.wait_for()
    assert page.locator(":focus").inner_text() == "Edit notes"
    assert notes.locator("strong").inner_text() == "wide"
    assert EVIL in notes.inner_text()
    page.get_by_role("button", name="Edit notes").click()
    page.get_by_label("Notes, in Markdown").fill("mine")
    change(site, notes="theirs")
    page.get_by_role("button", name="Save the notes").click()
    page.get_by_text("The notes have been changed in the meantime").wait_for()
    assert page.get_by_role("button", name="Save the notes").is_disabled()
    page.get_by_role("button", name="Replace them with mine").click()
    page.get_by_role("button", name="Save the notes").click()
    wait_until(lambda: notes.inner_text() == "mine", "the notes are replaced")
    found = run(site.experiments.get(NAME))
    assert (found.notes, found.layout) == ("mine", {"charts": ["val/accuracy"]})
    assert jobs


@pytest.fixture(scope="module")
def pair(site: Site, server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two jobs with different code, packages and documents; the second was edited from the
    first."""
    folder = tmp_path_factory.mktemp("code")
    jobs: list[str] = []
    git = {"commit": "1a" * 20, "dirty": True, "branch": "main"}
    with Client(server.url, token=TOKEN) as client:
        for number in range(2):
            (folder / "train me.py").write_text(f"lr = 0.{number + 1}\nprint('☃')\n")
            (folder / "data.bin").write_bytes(b"\0" + bytes([number]))
            (folder / f"only{number}.py").write_text("")
            (folder / f"only{1 - number}.py").unlink(missing_ok=True)
            code = client.upload_code(folder).id
            document: dict[str, Any] = {
                "name": f"coded-{number}",
                "script": {"entrypoint": "train me.py", "code": code},
                "origin": {"git": git, **({"job": jobs[0]} if jobs else {})},
            }
            job = client.submit(document)
            jobs.append(job.id)
            site.claim(job.id, "cpu-a", 1)
            packages = {"packages": {"numpy": f"2.3.{number}", "torch": "2.13.0"}}
            reported = [resumed(0), frame(FrameKind.PACKAGES, packages, at=site.hands.now)]
            site.hands.end(job.id, 1, Cause.SUCCEEDED, "ended", reported)
    return jobs


def test_the_code_of_two_jobs_is_compared(tab: Watched, pair: list[str]) -> None:
    page = tab.open(f"compare?jobs={','.join(pair)}")
    page.get_by_role("link", name="What changed, with code and packages").click()
    page.get_by_role("heading", name="Code", exact=True).wait_for()
    lines = page.get_by_role("region", name="Changed lines of train me.py")
    assert lines.locator(".removed").inner_text().strip() == "-lr = 0.1"
    assert lines.locator(".added").inner_text().strip() == "+lr = 0.2"
    assert "a binary file" in page.locator(".changed").filter(has_text="data.bin").inner_text()
    assert page.locator(".changed").count() == 4
    packages = page.get_by_role("region", name="Packages")
    assert packages.locator("tbody tr").all_inner_texts() == ["numpy\t2.3.0\t2.3.1"]
    commit = page.locator("tr").filter(has=page.get_by_text("commit", exact=True))
    assert "1a1a1a1a1a1a (main), with changes that were not committed" in commit.inner_text()


def test_a_lineage_leads_to_the_job_from_which_a_job_was_edited(
    site: Site, tab: Watched, pair: list[str]
) -> None:
    page = tab.open(f"jobs/{pair[1]}?tab=lineage")
    graph = page.get_by_role("group", name="Lineage")
    own = graph.get_by_role("link", name="coded-1; SUCCEEDED")
    assert "was edited from coded-0" in (own.get_attribute("aria-label") or "")
    graph.get_by_role("link", name="coded-0; SUCCEEDED").click()
    page.locator("h1").filter(has_text="coded-0").wait_for()
    alone = site.submit("alone")
    page = tab.open(f"jobs/{alone}?tab=lineage")
    page.get_by_text("was made from no other job").wait_for()


def test_a_copy_names_the_job_from_which_it_was_edited(tab: Watched, pair: list[str]) -> None:
    page = tab.open(f"submit?from={pair[1]}")
    page.locator(".verdict").first.wait_for()
    wait_until(lambda: page.locator("textarea").input_value() != "", "the document is loaded")
    document = json.loads(page.locator("textarea").input_value())
    assert document["origin"]["job"] == pair[1]
    assert document["origin"]["git"]["commit"] == "1a" * 20


@pytest.mark.parametrize("place", [PLACE, "experiments", "diff", "lineage"])
def test_a_phone_shows_all_without_scrolling_sideways(
    tab: Watched, jobs: list[str], pair: list[str], place: str
) -> None:
    known = {"diff": f"diff?jobs={','.join(pair)}", "lineage": f"jobs/{pair[1]}?tab=lineage"}
    tab.page.set_viewport_size({"width": 390, "height": 800})
    page = tab.open(known.get(place, place))
    page.locator(".card").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert jobs
