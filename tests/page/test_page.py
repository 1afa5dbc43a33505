"""The page in a real Chromium. Each tab is watched: it complains of nothing, and asks for nothing
but its files and the public API."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import httpx
import pytest

from api.page.static_files import load
from dray.requests import MAX_NOTES
from ray_workers.shared.contracts import Cause, Phase
from ray_workers.shared.names import attempt_prefix
from service.db.repositories import jobs
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import TOKEN, Watched
from tests.page.site import EVIL, OTHER_FILES, STUCK, Site, run
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.service.helpers import metrics, resumed

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = IN_BROWSER

HOSTILE = (
    EVIL,
    "<script>document.title=2</script>",
    "[go](javascript:document.title=3) [go](JaVaScRiPt:x) [go](data:text/html,x) [go](//x.example)",
    "![picture](https://example.org/picture.png) ![](javascript:x)",
    '[a](https://example.org/"onclick="document.title=5)',
    "<https:javascript:x> &lt;b&gt; <b onmouseover=x>*bold*</b> `<i>` **<u>**",
    "> - <style>* { display: none }</style>",
    "```html\n<iframe src=//x.example></iframe>\n```",
    "{{7*7}} ${document.title=6} the end of it",
)


@pytest.fixture(scope="module")
def job_id(site: Site) -> str:
    """The most detailed job, among jobs in every state."""
    return site.everything(6)


def names(page: Page) -> list[str]:
    return page.locator(".jobs .name > a").all_inner_texts()


def goes_to(page: Page, place: str) -> None:
    """Wait until the address contains this."""
    wait_until(lambda: page.evaluate("place => location.hash.endsWith(place)", place), place)


def is_shown(page: Page, text: str | re.Pattern[str], within: str = "main") -> None:
    """Wait until it is shown."""
    page.locator(within).get_by_text(text).first.wait_for()


@SOAK
def test_the_list_moves_by_itself(site: Site, job_id: str, tab: Watched) -> None:
    page = tab.open()
    row = page.locator("tr", has_text="gpt-small-pretrain")
    row.locator(".state-running").wait_for()
    newcomer = site.trains("newcomer", 3, "cpu-a", labels={"team": "new"})
    row = page.locator("tr", has_text="newcomer")
    row.locator(".state-running").wait_for()
    assert "team new" in row.inner_text()
    assert names(page)[0] == "newcomer"
    site.hands.end(newcomer, 1, Cause.SUCCEEDED, "trained to its end")
    row.locator(".state-succeeded").wait_for()


@SOAK
def test_filters_are_kept_in_the_address(job_id: str, tab: Watched) -> None:
    page = tab.open()
    page.get_by_role("button", name="Failed").click()
    goes_to(page, "#/jobs?state=FAILED")
    page.locator(".state-failed").first.wait_for()
    assert names(page) == ["digits-sweep", "diverging-lr"]
    page.reload()
    page.locator(".state-failed").first.wait_for()
    assert names(page) == ["digits-sweep", "diverging-lr"]
    page.get_by_role("button", name="All").click()
    page.get_by_label("Name or id").fill("UNET")
    goes_to(page, "#/jobs?text=UNET")
    is_shown(page, "unet-cells-0")
    wait_until(lambda: all(name.startswith("unet") for name in names(page)), "the others gone")


@SOAK
def test_an_expression_is_searched_for_and_its_fault_is_pointed_at(
    job_id: str, tab: Watched
) -> None:
    tab.statuses.add(422)
    page = tab.open("jobs?text=baseline")
    field = page.get_by_label("Expression; Enter searches")
    field.fill("experiment = 'rates' and train.optimizer.lr < 0.0015")
    field.press("Enter")
    wait_until(lambda: names(page) == ["baseline-ann"], "the others gone")
    field.fill("'é' in tags and train.optimizer.lr <")
    field.press("Enter")
    place = page.locator(".where .before")
    place.wait_for(state="attached")
    assert place.text_content() == "'é' in tags and train.optimizer.lr <"
    assert "expected a number, found the end" in page.get_by_role("alert").inner_text()
    assert field.evaluate("field => field.selectionStart") == 36
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("link", name="#good").click()
    wait_until(lambda: names(page) == ["baseline-ann"], "the jobs with the tag alone")
    assert field.input_value() == '"good" in tags'


@SOAK
def test_tags_and_notes_are_changed_and_nobodys_are_lost(site: Site, tab: Watched) -> None:
    tab.statuses.add(412)
    job_id = site.submit("annotated")
    page = tab.open(f"jobs/{job_id}?more=1")
    page.get_by_label("A tag to add").fill("review/me")
    page.keyboard.press("Enter")
    page.locator(".annotations").get_by_role("link", name="#review/me").wait_for()
    page.get_by_role("button", name="Write notes").click()
    page.get_by_label("Notes, in Markdown").fill(f"mine {EVIL}")
    site.annotate(job_id, notes="theirs", add_tags=["theirs"])
    page.get_by_role("button", name="Save the notes").click()
    is_shown(page, "The notes have been changed in the meantime:")
    is_shown(page, "theirs", ".annotations .failure .source")
    page.get_by_role("button", name="Replace them with mine").click()
    page.get_by_role("button", name="Save the notes").click()
    is_shown(page, f"mine {EVIL}", ".annotations > .notes")
    page.get_by_label("Remove the tag review/me").click()
    tags = page.locator(".annotations").get_by_role("link", name="#review/me")
    tags.wait_for(state="detached")
    found = run(site.tracking.annotations(job_id))
    assert (found.tags, found.notes, found.updated_by) == (["theirs"], f"mine {EVIL}", "ann")


@SOAK
def test_notes_are_shown_as_markdown(job_id: str, tab: Watched) -> None:
    page = tab.open("jobs?text=baseline-ann")
    page.get_by_role("link", name="baseline-ann").click()
    page.get_by_role("button", name="Timeline, tags, notes and all facts").click()
    notes = page.get_by_role("region", name="Notes", exact=True)
    notes.wait_for()
    assert notes.locator("h4").inner_text() == "What was tried"
    assert notes.locator("p > code").inner_text() == "3e-3"
    assert notes.locator("em").all_inner_texts() == ["sweep", "no"]
    assert notes.locator("p > strong").inner_text() == "bf16"
    assert notes.locator("ol > li > ul > li").all_inner_texts() == [
        "recovered in 0.41 s",
        "no step was lost",
    ]
    assert notes.locator("td").all_inner_texts() == ["1e-3", "0.61", "3e-3", "0.52"]
    links = notes.locator("a")
    hrefs = [one.get_attribute("href") for one in links.all()]
    assert hrefs == ["https://arxiv.org/abs/2001.08361", "https://example.org/runs?id=7"]
    assert links.first.get_attribute("rel") == "noopener noreferrer"
    assert links.first.inner_text() == "the paper"


def test_nothing_in_notes_runs_or_loads(site: Site, tab: Watched) -> None:
    job_id = site.submit("hostile-notes")
    site.annotate(job_id, notes="\n\n".join(HOSTILE))
    page = tab.open(f"jobs/{job_id}?more=1")
    notes = page.locator(".notes")
    notes.get_by_text("the end of it").wait_for()
    for text in (EVIL, "<script>document.title=2</script>", "[go](javascript:document.title=3)"):
        is_shown(page, text, ".notes")
    assert page.title() == "hostile-notes - dray"
    used = notes.evaluate("at => [...new Set([...at.querySelectorAll('*')].map(e => e.localName))]")
    assert set(used) <= {"p", "a", "em", "strong", "code", "blockquote", "ul", "li", "pre"}
    names = notes.evaluate(
        "at => [...new Set([...at.querySelectorAll('*')].flatMap(e => e.getAttributeNames()))]"
    )
    assert set(names) == {"href", "target", "rel"}
    hrefs = [one.get_attribute("href") or "" for one in notes.locator("a").all()]
    assert hrefs == [
        "https://example.org/picture.png",
        "https://example.org/%22onclick=%22document.title=5",
    ]


@SOAK
@pytest.mark.parametrize(
    "hostile",
    ["*a ", "**", "[", "![](", "`", "> ", "- ", "|\n-|", "http://[", "_a_", "~~~\n", "\\", "`` ` "],
)
def test_notes_that_would_take_a_pattern_for_ever_are_shown(
    site: Site, tab: Watched, hostile: str
) -> None:
    job_id = site.submit("hostile-notes")
    text = hostile * ((MAX_NOTES - 20) // len(hostile))
    site.annotate(job_id, notes=f"{text}\n\n# shown\n")
    page = tab.open(f"jobs/{job_id}?more=1")
    is_shown(page, "shown", ".notes")


@SOAK
def test_jobs_that_are_chosen_are_changed_and_cancelled(
    site: Site, job_id: str, tab: Watched
) -> None:
    waiting = [site.submit(f"to-cancel-{n}") for n in range(2)]
    page = tab.open("jobs?text=to-cancel")
    for name in ("to-cancel-0", "to-cancel-1"):
        page.get_by_label(f"Choose {name}").check()
    page.get_by_role("button", name="Change priority").click()
    page.get_by_label("Priority, 0 to 100").fill("70")
    page.get_by_role("button", name="Change 2 jobs").click()
    page.locator(".actions").wait_for(state="detached")
    database = site.hands.database
    rows = [database.read_sync(lambda s, n=n: jobs.get(s, n)) for n in waiting]
    assert [row.priority for row in rows if row] == [70, 70]
    page.get_by_label("Choose all").check()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel them").click()
    page.locator(".state-cancelled").nth(1).wait_for()


def test_a_job_is_followed_live(site: Site, job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?more=1")
    panel = page.get_by_role("region", name="train/loss")
    panel.locator("canvas").wait_for()
    page.locator(".goodput").wait_for()
    page.locator(".timeline .mark").nth(3).wait_for(state="attached")
    before = panel.locator(".keys").inner_text()
    site.hands.report(job_id, 2, site.steps(1101, 1106, total=2000, seed=77))
    wait_until(lambda: panel.locator(".keys").inner_text() != before, "the newest loss")


ODD_NAMES = ["precision, recall", "a\"b'c", "größe/ä", "50% & more=?#", "<b>x</b>", "val/loss_D"]


def test_metrics_with_odd_names_are_drawn_and_chosen_by_the_address(
    site: Site, tab: Watched
) -> None:
    job_id = site.submit("odd-names", 1)
    site.claim(job_id, "cpu-a", 1)
    values = {name: float(number) for number, name in enumerate(ODD_NAMES)}
    site.hands.report(job_id, 1, [metrics(n, values, at=site.hands.now) for n in range(1, 6)])
    page = tab.open(f"jobs/{job_id}")
    for number, name in enumerate(ODD_NAMES):
        panel = page.get_by_role("region", name=name, exact=True)
        panel.scroll_into_view_if_needed()
        assert panel.locator(".keys b").inner_text() == str(number)
    for name in ODD_NAMES:
        page = tab.open(f"jobs/{job_id}?{urlencode({'keys': name})}")
        page.get_by_role("region", name=name, exact=True).locator("canvas").wait_for()


@SOAK
def test_steps_that_are_done_again_replace_the_ones_before(site: Site, tab: Watched) -> None:
    job_id = site.submit("resumes", 1)
    site.claim(job_id, "cpu-a", 1)
    hands = site.hands
    hands.report(job_id, 1, [metrics(n, {"loss": 5.0}, at=hands.now) for n in range(1, 101)])
    page = tab.open(f"jobs/{job_id}?keys=loss")
    last = page.get_by_role("region", name="loss").locator(".keys b")
    wait_until(lambda: last.inner_text() == "5", "the loss of the first attempt")
    hands.end(job_id, 1, Cause.NODE_LOST, "the node vanished")
    site.claim(job_id, "cpu-a", 1)
    again = [metrics(n, {"loss": 2.0}, at=hands.now) for n in range(51, 61)]
    hands.report(job_id, 2, [resumed(50), *again])
    wait_until(lambda: last.inner_text() == "2", "the loss of the second attempt")


@SOAK
def test_a_part_that_is_drawn_over_is_asked_for_in_detail(job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?smooth=0.5&log=1")
    over = page.get_by_role("region", name="train/loss").locator(".u-over")
    over.wait_for()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    with page.expect_response(re.compile("until_step=")) as asked:
        page.mouse.up()
    steps = asked.value.json()["series"]["train/loss"]["steps"]
    assert 300 < steps[0] < 400
    assert 600 < steps[-1] < 700
    page.get_by_role("button", name="Show all").click()
    with page.expect_response(re.compile("times=true")) as timed:
        page.get_by_label("x axis").select_option("time")
    goes_to(page, "x=time")
    times = timed.value.json()["series"]["train/loss"]["times"]
    assert times == sorted(times)


def test_logs_are_text_with_colours(site: Site, job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?tab=logs&attempt=1&rank=0")
    is_shown(page, f"loading {EVIL}", ".log")
    ready = page.locator(".log .ansi-bold.ansi-green", has_text="ready")
    ready.wait_for()
    line = page.locator(".log .line", has_text="the cache is cold").inner_text()
    assert "\x1b" not in line
    assert "title" not in line
    module = f"./page/{load().version}/lib/ansi.js"
    pieces = page.evaluate(
        "([path, text]) => import(path).then((ansi) => ansi.pieces(text))",
        [module, "txt.\u202e\x1b[31mfdp\u2069"],
    )
    assert [piece["text"] for piece in pieces] == [r"txt.\u202e", r"fdp\u2069"]
    page.get_by_label("Search the log").fill("CACHE IS")
    is_shown(page, "1 hit")
    page.keyboard.press("Enter")
    page.locator(".log .line.hit").wait_for()


@SOAK
def test_every_tab_of_a_job_has_its_part(job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?tab=ranks")
    is_shown(page, re.compile("rank 1 kept the others waiting"))
    page.get_by_text("rank 1 kept").click()
    page.get_by_text(re.compile(r"^rank 1 \(it kept")).click()
    page.locator("pre:visible", has_text="next_batch").wait_for()
    page.get_by_role("tab", name="Files").click()
    page.locator("figure img").nth(5).wait_for()
    page.get_by_role("tab", name="Events").click()
    is_shown(page, "rank 2 was killed by SIGKILL", "table")
    page.keyboard.press("ArrowRight")
    document = json.loads(page.locator("pre.document").inner_text())
    assert document["resources"] == {"num_workers": 4}


def saved(page: Page, button: str) -> tuple[str, bytes]:
    """Return the name and content of what a click saves. The link does not work again."""
    with page.expect_download() as download:
        page.get_by_label(button).click()
    url = download.value.url
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1/downloads/[\w-]{43}", url)
    content = Path(download.value.path()).read_bytes()
    assert httpx.get(url, trust_env=False).json()["code"] == "download_link_not_found"
    return download.value.suggested_filename, content


@SOAK
def test_files_and_logs_are_downloaded_by_links_that_work_once(
    site: Site, job_id: str, tab: Watched
) -> None:
    tab.statuses.add(404)
    page = tab.open(f"jobs/{job_id}?tab=files")
    assert saved(page, "Download notes.txt") == ("notes.txt", b"hello\n" * 50)
    page.get_by_role("tab", name="Logs").click()
    page.get_by_label("Rank").select_option("1")
    name, content = saved(page, "Download the log")
    assert name == f"{job_id}-rank-1.log"
    assert content.count(b"\n") == 23
    assert f"loading {EVIL}".encode() in content
    page.get_by_role("tab", name="Files").click()
    page.get_by_label("Download samples/3.png").wait_for()
    site.hands.storage.delete_tree(f"{attempt_prefix(job_id, 2)}/artifacts/samples")
    page.get_by_label("Download samples/3.png").click()
    is_shown(page, re.compile("its file is not in the storage"))


@SOAK
def test_ranks_show_what_they_use(site: Site, job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?tab=ranks")
    is_shown(page, "GPU memory", "th")
    row = page.locator("#panel tbody tr").nth(2).inner_text()
    uses = r"cores\t3\.30 GiB\t[89]\d\.\d%\t20\.0 GiB\t\d{3} W\t\d\d °C"
    assert re.search(uses, row), row
    for name, num_curves in (("system/cpu", 4), ("system/node/cpu", 1)):
        panel = page.get_by_role("region", name=name, exact=True)
        panel.scroll_into_view_if_needed()
        panel.locator("canvas").wait_for()
        assert panel.locator(".keys b").count() == num_curves


def test_a_value_that_is_not_finite_is_the_newest_one(site: Site, tab: Watched) -> None:
    job_id = site.submit("endless", 1)
    site.claim(job_id, "cpu-a", 1)
    values = [-9.22e18, math.inf]
    frames = [metrics(n, {"train/x": value}) for n, value in enumerate(values, 1)]
    site.hands.report(job_id, 1, frames, phase=Phase.RUNNING)
    page = tab.open(f"jobs/{job_id}?tab=curves")
    panel = page.get_by_role("region", name="train/x", exact=True)
    panel.scroll_into_view_if_needed()
    panel.locator("canvas").wait_for()
    assert "last Infinity" in panel.inner_text()
    assert "1 of the values shown is not finite" in panel.inner_text()
    label = panel.get_by_role("application").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("train/x, last Infinity.")


@SOAK
def test_rays_dashboard_is_a_click_away(job_id: str, tab: Watched) -> None:
    page = tab.open(f"jobs/{job_id}?tab=ranks")
    ray = "http://127.0.0.1:8265/#"

    def leads(link: Locator) -> tuple[str | None, str | None]:
        return link.get_attribute("href"), link.get_attribute("title")

    assert leads(page.get_by_role("link", name="Ray dashboard")) == (
        f"{ray}/actors",
        f"Its actors are called dray:{job_id}:…",
    )
    row = page.locator("#panel tbody tr").nth(2)
    assert leads(row.get_by_role("link", name="Ray")) == (
        f"{ray}/actors",
        f"Its actor, if it has one, is called dray:{job_id}:2:worker:2:…",
    )
    node = page.locator("main").get_by_role("link", name="gpu-b.example")
    assert leads(node)[0] == f"{ray}/cluster/nodes/gpu-b"
    tab.open("cluster")
    assert leads(page.get_by_role("link", name="gpu-c.example"))[0] == f"{ray}/cluster/nodes/gpu-c"


@SOAK
def test_a_waiting_job_is_held_and_released(site: Site, tab: Watched) -> None:
    page = tab.open(f"jobs/{site.submit('to-hold')}")
    page.get_by_role("button", name="Hold").click()
    is_shown(page, "HELD")
    page.get_by_role("button", name="Release").click()
    is_shown(page, "QUEUED")


@SOAK
def test_a_waiting_job_says_why(job_id: str, tab: Watched) -> None:
    page = tab.open("jobs?state=QUEUED")
    page.get_by_role("link", name=EVIL).click()
    is_shown(page, re.compile("it needs 2 slots"))
    is_shown(page, re.compile(r"expected to start in \d+ min to \d+ min \("))
    assert page.locator("h1").inner_text() == EVIL
    assert page.title() == f"{EVIL} - dray"


@SOAK
def test_the_cluster_shows_who_holds_what_and_what_is_refused(job_id: str, tab: Watched) -> None:
    page = tab.open("cluster")
    node = page.get_by_role("region", name="gpu-b.example")
    node.get_by_text("gpt-small-pretrain").wait_for()
    assert "4 of 8 GPU" in node.inner_text()
    is_shown(page, OTHER_FILES)
    is_shown(page, re.compile(r"2 slots in quarantine for \d+ min"))
    is_shown(page, STUCK)
    assert "A100-80G" in node.inner_text()
    node.get_by_text("GPUs now").click()
    uses = node.locator(".uses tbody tr")
    uses.nth(4).wait_for()
    assert re.fullmatch(r"3\t[89]\d\.\d%\t21\.0 GiB\t\d{3} W\t\d\d °C", uses.nth(4).inner_text())
    course, disks = sorted(page.locator(".reserved").all_inner_texts(), reverse=True)
    assert re.fullmatch("Reserved for ann, bert, queue nightly: course, .+ to .+", course)
    assert re.fullmatch("Maintenance: disks, until .+", disks)
    gone = page.get_by_role("region", name="gpu-d.example").inner_text()
    assert "lost, L40S" in gone
    assert "Ray has lost this node" in gone
    page.locator(".forecast .waits").nth(4).wait_for()
    is_shown(page, "nightly")


def test_a_document_is_checked_as_one_types(job_id: str, tab: Watched) -> None:
    tab.statuses.add(422)
    page = tab.open("submit")
    is_shown(page, "Valid", ".verdict.right")
    is_shown(page, re.compile(r"^Planned: data 2, about .* per step"))
    editor = page.get_by_label("Job document")
    wrong = {"name": "typed", "recipe": "image_classification", "train": {"epochs": -1}}
    editor.fill(json.dumps(wrong, indent=2))
    is_shown(page, "/train/epochs", ".verdict")
    assert page.locator(".gutter .wrong").inner_text() == "5"
    assert page.get_by_role("button", name="Submit", exact=True).is_disabled()
    editor.fill("{")
    is_shown(page, "This is not JSON yet")
    editor.fill(json.dumps({**wrong, "train": {"epochs": 3}}, indent=2))
    is_shown(page, "Valid", ".verdict.right")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.get_by_role("heading", name="typed").wait_for()
    page.get_by_role("link", name="Edit and resubmit").click()
    is_shown(page, "Valid", ".verdict.right")
    assert json.loads(editor.input_value())["train"]["epochs"] == 3


@SOAK
def test_fields_are_offered_at_the_cursor(job_id: str, tab: Watched) -> None:
    tab.statuses.add(422)
    page = tab.open("submit")
    editor = page.get_by_label("Job document")
    editor.fill('{"recipe": "image_classification", "train": {"opti')
    editor.press("Control+ ")
    page.get_by_role("option", name="optimizer").first.wait_for()
    editor.press("Enter")
    assert editor.input_value().endswith('"train": {"optimizer": ')


@SOAK
def test_jobs_are_compared(site: Site, job_id: str, tab: Watched) -> None:
    page = tab.open("jobs?text=baseline")
    page.get_by_label("Choose baseline-ann").check()
    page.get_by_label("Choose baseline-bert").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("region", name="train/loss").locator("canvas").wait_for()
    row = page.locator(".differs tr", has_text="/train/optimizer/lr")
    assert row.locator("td").all_inner_texts()[1:] == ["0.002", "0.001"]
    assert "baseline-bert" in page.locator(".compared .baseline").inner_text()
    cells = page.locator(".differs tr", has_text="val/accuracy").locator("td").all_inner_texts()
    assert cells[1:] == ["0.6018\nbest 0.6018 at 201", "0.5368 -0.06496\nbest 0.5368 at 151"]
    for name in ("seconds", "samples", "steps"):
        page.get_by_label("x axis").select_option(label=name)
        goes_to(page, "" if name == "steps" else f"&x={name}")
        page.get_by_role("region", name="train/loss").locator(".keys b").nth(1).wait_for()


@SOAK
def test_the_trials_of_a_sweep_are_lines_to_go_through(job_id: str, tab: Watched) -> None:
    page = tab.open("jobs?text=digits-sweep&state=SUCCEEDED")
    page.locator(".jobs .name > a").first.click()
    page.get_by_role("link", name="The sweep").click()
    trials = page.get_by_role("option")
    wait_until(lambda: trials.count() == 12, "a line for each trial")
    first = page.get_by_role("option", selected=True)
    first.focus()
    best = page.locator(".trials .baseline td").all_inner_texts()
    assert first.get_attribute("aria-label") == (
        f"{best[0].removesuffix(' best')}, SUCCEEDED: train.optimizer.lr {best[4]}, "
        f"train.optimizer.name {best[5]}, model.width {best[6]}, val/accuracy {best[2]}"
    )
    page.keyboard.press("ArrowDown")
    second = page.locator(".trials tbody tr").nth(1).locator("a").inner_text()
    is_shown(page, second, ".lines p")
    assert page.locator(".trial.good").count() == 8
    assert "FAILED" not in page.locator(".trials").inner_text()
    page.keyboard.press("Enter")
    page.get_by_role("link", name="The sweep").wait_for()


@SOAK
def test_what_was_lost_is_caught_up_with(site: Site, job_id: str, tab: Watched) -> None:
    tab.breaks = True
    page = tab.open()
    page.locator(".state-running").first.wait_for()
    page.context.set_offline(True)
    page.get_by_text("The server has not answered").wait_for()
    assert "gpt-small-pretrain" in names(page)
    site.trains("came-meanwhile", 4, "cpu-a")
    page.context.set_offline(False)
    is_shown(page, "came-meanwhile")
    page.get_by_text("The server has not answered").wait_for(state="detached")


def test_an_address_of_nothing_is_told(tab: Watched) -> None:
    page = tab.open()
    for place in ("%E0", "constructor", "jobs/%"):
        page.goto(f"{tab.server.url}/#/{place}")
        page.reload()
        is_shown(page, re.compile("There is no"))


def test_a_token_is_asked_for(browser: Browser, server: LiveServer, job_id: str) -> None:
    context = browser.new_context()
    tab = Watched(context.new_page(), server, statuses={401})
    page = tab.open("jobs?text=gpt-small")
    page.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    is_shown(page, re.compile("does not know the token"))
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    is_shown(page, "gpt-small-pretrain")
    page.reload()
    is_shown(page, "gpt-small-pretrain")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    context.close()
    assert not tab.wrong
