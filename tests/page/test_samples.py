"""The texts that a model generated at its evaluations, in a real Chromium."""

from __future__ import annotations

from typing import Any

from tests.marks import IN_BROWSER
from tests.page.conftest import Watched
from tests.page.site import EVIL, Site
from tests.page.test_topologies import reported
from tests.unit.service.ingest.test_text_samples import TUNING, texts

pytestmark = IN_BROWSER


def test_texts_are_shown_over_time_and_are_no_markup(site: Site, tab: Watched) -> None:
    given: dict[str, Any] = {**TUNING}
    job_id = reported(site, 1, {"train/loss": 1.0}, **given)
    page = tab.open(f"jobs/{job_id}?tab=samples")
    page.get_by_text("No texts have been generated yet").wait_for()
    site.hands.report(job_id, 1, [texts(4, " sees", EVIL), texts(8, " likes\n  you", "hi")])
    page.get_by_text("likes").wait_for()
    cards = page.locator("#panel .card").all_inner_texts()
    assert len(cards) == 2
    assert "the cat" in cards[0]
    assert cards[0].index("sees") < cards[0].index("likes")
    assert "user: hello" in cards[1]
    assert EVIL in cards[1]
    other = reported(site, 1, {"train/loss": 1.0})
    page = tab.open(f"jobs/{other}")
    page.get_by_role("tab", name="Logs").wait_for()
    assert page.get_by_role("tab", name="Samples").count() == 0
