"""Incorrect rounds are detected."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.views import FederatedClientPage, JobState, Series
from tests.chaos.kinds import Kind
from tests.chaos.outside import of_exits
from tests.chaos.promises import Learned, of_learned
from tests.chaos.rounds import of_canaries, of_sent, of_told, of_updates
from tests.integration.silos import CANARY, job_of

NUM_ROUNDS = 4
SILOS = Kind("silos", job_of({"north": "file:///n", "south": "file:///s", "public": "x"}), 4)
OUTSIDE = Kind(
    "clients outside",
    {"federated": {"clients": 2, "quorum": 2}},
    NUM_ROUNDS,
    tables=(Path("a.csv"), Path("b.csv")),
)


def series(**changes: dict[int, float]) -> dict[str, Series]:
    """Return the series of four rounds of two clients, with changed values. NaN removes a step."""
    names = ("federated/updates", "silo/north/train/loss", "silo/south/train/loss")
    found = {}
    for name in names:
        values = dict.fromkeys(range(1, NUM_ROUNDS + 1), 2.0) | changes.get(name, {})
        values = {step: value for step, value in values.items() if value == value}
        found[name] = Series(steps=list(values), values=list(values.values()))
    return found


GONE = float("nan")
STACK = 'Thread 0x1 (most recent call first):\n  File "loop.py", line 1 in _step\n'


def test_rounds_in_which_nothing_is_wrong_are_no_breach() -> None:
    for kind in (SILOS, OUTSIDE):
        assert not list(of_updates(series(), kind, is_done=True))
    assert not list(of_updates({}, Kind("script", {}, 4), is_done=True))
    cut_short = series(**{name: {4: GONE} for name in series()})
    assert not list(of_updates(cut_short, SILOS, is_done=False))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"federated/updates": {3: 3.0}}, "round 3 counts 3 updates, not 2 to 2"),
        ({"federated/updates": {3: 1.0}}, "round 3 counts 1 updates, not 2 to 2"),
        ({"federated/updates": {2: GONE}}, "3 of 4 rounds exist; missing [2]"),
        ({"silo/north/train/loss": {2: GONE}}, "round 2 counts 2 updates, but 1 silos"),
    ],
)
def test_a_round_that_counts_an_update_twice_or_lacks_one_is_a_breach(
    changes: dict[str, dict[int, float]], told: str
) -> None:
    (breach, *_) = of_updates(series(**changes), SILOS, is_done=True)
    assert breach == f"I5: {told}"


def page(*num_sent: int, newest: int = NUM_ROUNDS, is_open: bool = False) -> FederatedClientPage:
    now = datetime.now(UTC)
    items = [
        {"client": number, "invited_by": "x", "created_at": now, "num_sent": num}
        for number, num in enumerate(num_sent)
    ]
    return FederatedClientPage.model_validate({"items": items, "round": newest, "is_open": is_open})


def test_more_updates_than_were_sent_are_a_breach() -> None:
    for sent in (page(4, 4), page(9, 4)):  # an update may be sent again when a round is repeated
        assert not list(of_sent(series(), sent, OUTSIDE, is_done=True))
    (breach,) = of_sent(series(), page(4, 3), OUTSIDE, is_done=True)
    assert "8 updates are counted, but the clients sent {0: 4, 1: 3}" in breach
    for ended in (page(4, 4, newest=3), page(4, 4, is_open=True)):
        assert len(list(of_sent(series(), ended, OUTSIDE, is_done=True))) == 1
        assert not list(of_sent(series(), ended, OUTSIDE, is_done=False))


def test_what_has_left_a_silo_is_a_breach(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text("a job of north")
    gone = tmp_path / "gone.log"
    assert not list(of_canaries("north", [log, gone, tmp_path]))
    log.write_text(f"file:///{CANARY}/north.npz")
    shown, stored = of_canaries(f"bad data: {CANARY}", [log])
    assert "is shown: bad data: Kanarie" in shown
    assert "service.log" in stored


def test_lines_and_stacks_of_silos_are_a_breach() -> None:
    def of(line: int, stack: str | None) -> list[str]:
        ranks = [SimpleNamespace(rank=0, stack=STACK), SimpleNamespace(rank=1, stack=stack)]
        lines: Any = [SimpleNamespace(rank=line, text="a line")]
        hangs: Any = [SimpleNamespace(ranks=ranks)]
        return list(of_told(lines, hangs))

    assert not of(0, None)
    assert not of(0, "the stacks of silo north are only available on the silo's node")
    assert len(of(1, None)) == len(of(0, STACK)) == 1


def test_another_series_than_that_of_a_run_without_faults_is_a_breach() -> None:
    undisturbed = Learned("a", {"train/loss": ([1, 2], [0.5, 0.25])})
    assert not list(of_learned(Learned("a", dict(undisturbed.series)), undisturbed))
    others: list[Any] = [{"train/loss": ([1, 2], [0.5, 0.2])}, {"train/loss": ([1], [0.5])}, {}]
    for other in others:
        (breach,) = of_learned(Learned("a", other), undisturbed)
        assert breach == "train/loss differs from a run without faults"
    assert len(list(of_learned(Learned("b", undisturbed.series), undisturbed))) == 1


def test_a_client_that_does_not_end_as_its_job_is_a_breach() -> None:
    assert not list(of_exits([0, 0], JobState.SUCCEEDED))
    assert not list(of_exits([1, 1], JobState.CANCELLED))
    told = list(of_exits([0, None, -9, 1], JobState.SUCCEEDED))
    assert [breach.split(",")[0] for breach in told] == [
        "client 1 ended with None",
        "client 2 ended with -9",
        "client 3 ended with 1",
    ]
