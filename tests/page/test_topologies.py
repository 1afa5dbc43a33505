"""Jobs whose ranks have different tasks, on the page: servers, silos, and outside clients."""

from __future__ import annotations

import re
from typing import Any

from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.round_files import round_name
from service.federation.client_rounds import ClientRounds
from service.federation.invitations import Invitations
from tests.marks import IN_BROWSER, SOAK
from tests.page.conftest import Watched
from tests.page.site import Site, run
from tests.unit.service.helpers import frame, hang, log, metrics

pytestmark = [IN_BROWSER, SOAK]

SHA = "0" * 64


def reported(site: Site, workers: int, values: dict[str, float], **fields: Any) -> str:
    """A job that has reported this about its first step."""
    job_id = site.submit("topology", workers, **fields)
    site.claim(job_id, "cpu-a", workers)
    site.hands.report(job_id, 1, [metrics(1, values, at=site.hands.now, total_steps=9)])
    return job_id


def test_a_server_is_told_from_workers_and_staleness_is_one_panel(site: Site, tab: Watched) -> None:
    names = ("mean", "p50", "p95", "p99", "max")
    values = {f"sync/staleness_{name}": float(n) for n, name in enumerate(names)}
    values |= {"train/loss": 1.0, "sync/clock": 7.0, "sync/staleness": 2.5}
    values |= {"sync/staleness_count/000": 9.0, "sync/staleness_count/003_004": 3.0}
    sync = {"kind": "parameter_server", "servers": 1, "mode": "asynchronous"}
    optimizer = {"optimizer": {"name": "sgd", "lr": 0.1}}
    job_id = reported(site, 3, values, sync=sync, train=optimizer)
    page = tab.open(f"jobs/{job_id}")
    panel = page.get_by_role("region", name="sync/staleness of all workers")
    panel.scroll_into_view_if_needed()  # curves are drawn when they are seen
    panel.locator("canvas").wait_for()
    assert " ".join(panel.locator(".keys").inner_text().split()) == "max 4 mean 0 p50 1 p95 2 p99 3"
    assert page.locator(".panel").count() == 5
    assert "1 parameter server, asynchronous" in page.locator(".facts").first.inner_text()
    page.get_by_role("tab", name="Ranks").click()
    page.locator("#panel tbody tr").nth(2).wait_for()
    ranks = page.locator("#panel table").first.locator("tbody tr")
    rows = [row.split("\t") for row in ranks.all_inner_texts()]
    assert [row[0].strip() for row in rows] == ["0", "1", "2 server 0"]
    assert rows[0][4:6] == ["7", "2.5"]
    histogram = page.get_by_role("table", name="Staleness of updates").locator("tbody tr")
    assert [row.split() for row in histogram.all_inner_texts()] == [["0", "9"], ["3-4", "3"]]


def test_silos_have_their_names_and_a_panel_for_each_metric(site: Site, tab: Watched) -> None:
    silos = [{"name": name, "node_labels": {"hospital": name}} for name in ("north", "south")]
    federated = {"rounds": 9, "silos": silos, "metrics": ["val/loss"]}
    values = {"train/loss": 1.0, "silo/north/val/loss": 0.5, "silo/south/val/loss": 0.75}
    more = {"federated/updates": 2.0, "federated/dropped_out": 0.0}
    job_id = reported(site, 3, {**values, **more}, federated=federated)
    page = tab.open(f"jobs/{job_id}?keys=silo")
    panel = page.get_by_role("region", name="val/loss of each silo")
    panel.locator("canvas").wait_for()
    assert " ".join(panel.locator(".keys").inner_text().split()) == "north 0.5 south 0.75"
    page.get_by_label("Metrics whose name contains").fill("federated")
    page.get_by_role("region", name="federated/clients of a round").wait_for()
    page.locator('.progress .numeric[title="1 of 9 rounds"]').wait_for()
    page.get_by_role("tab", name="Logs").click()
    options = page.get_by_label("Rank").locator("option").all_inner_texts()
    assert options == [
        *("all ranks", "rank 0 (aggregator)", "rank 1 (silo north)", "rank 2 (silo south)")
    ]
    assert page.get_by_role("tab", name="Clients").count() == 0


def test_clients_outside_of_the_cluster_are_listed(site: Site, tab: Watched) -> None:
    federated = {"clients": 3, "clients_per_round": 2, "rounds": 9, "quorum": 1, "http": {}}
    job_id = reported(site, 1, {"train/loss": 1.0}, federated=federated)
    page = tab.open(f"jobs/{job_id}?tab=clients")
    page.get_by_text("No clients have been invited yet").wait_for()
    page.get_by_text("No round has started").wait_for()
    invitations = Invitations(site.hands.database)
    invited = run(invitations.invite(job_id, 2, by="bert")).items
    files = {"model_sha256": SHA, "model_size_bytes": 1, "form_sha256": SHA, "form_size_bytes": 1}
    opened = {"number": 4, "name": round_name(4, SHA), "is_open": True, "clients": [0, 1]}
    sizes = {"quorum": 1, "deadline_s": 60.0, "num_elements": 1, "update_bytes": 4}
    body = {**opened, **files, **sizes, "received": [], "awaits": "update"}
    site.hands.report(job_id, 1, [frame(FrameKind.ROUND, body, at=site.hands.now)])
    client = ClientRounds(site.hands.database, site.hands.storage, job_id, invited[0].token)
    run(client.look())
    page.get_by_text("has not answered").wait_for()
    rows = page.locator("#panel tbody tr")
    told = [row.split("\t")[:2] for row in rows.all_inner_texts()]
    assert told == [["0 has not answered", "0"], ["1 has not joined", "0"]]
    round_ = page.locator("#panel p")
    assert re.match("Round 4 is open, with updates of 0 of 2 clients so far", round_.inner_text())
    ended = {**body, "is_open": False}
    site.hands.report(job_id, 1, [frame(FrameKind.ROUND, ended, at=site.hands.now)])
    page.get_by_text("has ended, with updates of 0 of 2 clients").wait_for()


def test_ranks_of_a_script_are_named_by_their_roles(site: Site, tab: Watched) -> None:
    roles = {"chief": {"resources": {}}, "worker": {"num_workers": 2}, "ps": {}}
    script = {"entrypoint": "/train.py", "framework": "tensorflow", "roles": roles}
    job_id = reported(site, 4, {"loss": 1.0}, recipe=None, script=script)
    site.hands.report(job_id, 1, [log(0, "serves", rank=3), hang(3, num_ranks=4)])
    page = tab.open(f"jobs/{job_id}?tab=ranks&more=1")
    assert "1 chief, 2 worker, 1 ps" in page.locator(".facts").first.inner_text()
    page.locator("#panel tbody tr").nth(3).wait_for()
    rows = [row.split("\t") for row in page.locator("#panel tbody tr").all_inner_texts()]
    assert [row[0].strip() for row in rows] == ["0 chief 0", "1 worker 0", "2 worker 1", "3 ps 0"]
    page.locator("#panel details > summary").first.click()
    page.get_by_text("rank 3 (ps 0) (it kept them waiting)").wait_for()
    page.get_by_role("tab", name="Logs").click()
    page.get_by_text("serves").wait_for()
    options = page.get_by_label("Rank").locator("option").all_inner_texts()
    assert options[4] == "rank 3 (ps 0)"
    whose = page.locator(".line .from").first.get_attribute("title")
    assert whose
    assert ", rank 3 (ps 0), " in whose


def test_the_rank_that_computes_for_longest_is_named(site: Site, tab: Watched) -> None:
    job_id = reported(site, 2, {"perf/step_time_s": 0.4, "perf/compute_time_s": 0.1})
    slow = {"perf/step_time_s": 0.4, "perf/compute_time_s": 0.4}
    site.hands.report(job_id, 1, [metrics(1, slow, rank=1)])
    page = tab.open(f"jobs/{job_id}?tab=ranks")
    page.locator("#panel tbody tr").nth(1).wait_for()
    rows = page.locator("#panel tbody tr").all_inner_texts()
    assert ["slower than the others" in row for row in rows] == [False, True]
