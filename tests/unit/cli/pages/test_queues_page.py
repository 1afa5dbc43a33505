"""docs/guides/queues.md is correct: its commands are run, on a server on which jobs only wait."""

from __future__ import annotations

import re
from pathlib import Path

from dray.queue_requests import QueueRequest
from service.domain.scheduling.outlook.situation import Situation
from tests.integration.tour import blocks_of, run_tour
from tests.unit.api.serving import serving
from tests.unit.service.domain.scheduling import snapshots

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "queues.md").read_text()
TOUR_TAKES_S = 200


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        used_s = {("default", "bob"): 7200.0}
        server.sees(Situation(snapshots.snapshot([], used_s=used_s)), for_s=TOUR_TAKES_S)
        said = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    made, changed, weighted, shared, filled, refused, placed, *said = said
    ranked, many, unconfirmed, by_http, deleted = said
    assert re.search(r"^night +0 +0 +- +8 CPU, 64.0 GiB of memory", made, flags=re.MULTILINE)
    assert "limit      8 CPU\n" in changed
    assert "priority   up to 60\n" in changed
    assert "weights    ann 2, bob 0.5; other users 1\n" in weighted
    assert "weights    ann 2; other users 1\n" in weighted
    assert re.search(r"^default +bob +1 +- +- +2.00 +-", shared, flags=re.MULTILINE)
    assert re.search(r"^night +- +1 +- +- +0.00", shared, flags=re.MULTILINE)
    assert "1 is the use of 4 GPU for 1 hour" in shared
    assert "limit      8 CPU, 0 running\n" in filled
    assert "waiting    2\n" in filled
    assert "there is no queue 'nigth'; the queues are default, night (at /queue)" in refused
    assert "is 90, but the maximum of the queue 'night' is 60 (at /priority)" in refused
    assert (
        "2 jobs of default wait in the queue 'night', which is the maximum that a user may have"
        in refused
    )
    assert "is held by anonymous; `dray release" in placed
    assert (
        "moved ahead of all other jobs of priority 50 in the queue 'night', by anonymous" in placed
    )
    assert ranked.startswith("position 1 in the queue\n")
    assert re.search(r"^priority +60 +priority 60$", ranked, flags=re.MULTILINE)
    assert many.startswith("hold: 2 jobs would be changed\n")
    assert re.findall(r"^\w+: 2 jobs changed$", many, flags=re.MULTILINE) == [
        *("hold: 2 jobs changed", "priority: 2 jobs changed", "release: 2 jobs changed")
    ]
    assert "the number of jobs to change, 2, must be confirmed" in unconfirmed
    assert "{'code': 'held'" in by_http
    assert '"num_held": 1' in by_http
    assert "1 job in the queue 'night' has not ended" in deleted
    assert deleted.endswith("night deleted\n")


def test_its_table_has_every_rule() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == QueueRequest.model_fields.keys()
