"""A short version of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.views import JobState
from tests.chaos import plan, report
from tests.chaos.ground import Ground
from tests.chaos.kinds import kinds
from tests.chaos.plan import Strike, Turn
from tests.chaos.turn import ENDED, FROM_CHECKPOINT, IN_PLACE, UNTOUCHED, Runner
from tests.integration.harness import Service
from tests.marks import SOAK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SEED = 5
TURNS = (
    Turn(
        number=0,
        victim="two ranks",
        bystander="fails",
        strikes=(
            Strike(("rank 0 killed",), 0.05),
            Strike(("rank stopped",), 0.15),
            Strike(("supervisor killed",), 0.25),
            Strike(("service killed",), 0.35),
        ),
        seed=SEED,
    ),
    Turn(
        number=1,
        victim="two ranks",
        bystander="cancelled",
        strikes=(Strike(("rank killed", "service killed"), 0.05),),
        seed=SEED,
    ),
)

STOPPED = Turn(
    number=2,
    victim="long script",
    bystander="fails",
    strikes=(
        Strike(("gateway stopped",), 0.01),
        Strike(("supervisor stopped", "node agent stopped", "cancelled meanwhile"), 0.02),
    ),
    seed=SEED,
)

OUTSIDE = Turn(
    number=3,
    victim=plan.OUTSIDE,
    bystander="fails",
    strikes=(
        Strike(("client killed",), 0.1),
        Strike(("client killed", "rank killed"), 0.3),
        Strike(("client stopped",), 0.5),
        Strike(("client killed", "service killed"), 0.6),
    ),
    seed=SEED,
)


@SOAK
def test_rounds_of_clients_that_are_killed_and_stopped_count_each_update_once(
    embedded: Service, tmp_path: Path
) -> None:
    result = Runner(Ground(plan.EMBEDDED, embedded), kinds(tmp_path), {}).play(OUTSIDE)
    print(report.table([result]))
    assert result.breaches == []
    hows = [blown.how for blown in result.blown]
    assert hows == [UNTOUCHED, FROM_CHECKPOINT, UNTOUCHED, UNTOUCHED], result.missed


@SOAK
@pytest.mark.parametrize("method", plan.TUNED)
def test_fine_tuning_has_the_same_weights_whatever_is_killed(
    embedded: Service, tmp_path: Path, method: str
) -> None:
    turn = Turn(
        number=4,
        victim=method,
        bystander="fails",
        strikes=(
            Strike(("rank killed",), 0.05),
            Strike(("supervisor killed",), 0.15),
            Strike(("service killed",), 0.3),
        ),
        seed=SEED,
    )
    result = Runner(Ground(plan.EMBEDDED, embedded), kinds(tmp_path), {}).play(turn)
    print(report.table([result]))
    assert result.breaches == []
    hows = {blown.blow: blown.how for blown in result.blown}
    assert hows[("rank killed",)] == IN_PLACE
    assert hows[("supervisor killed",)] == FROM_CHECKPOINT
    assert len(hows) == 3, f"some blows came too late: {result.missed}"


@SOAK
def test_jobs_come_through_faults_and_no_promise_is_broken(
    embedded: Service, tmp_path: Path
) -> None:
    runner = Runner(Ground(plan.EMBEDDED, embedded), kinds(tmp_path), {})
    results = [runner.play(turn) for turn in TURNS]
    assert [breach for result in results for breach in result.breaches] == []
    print(report.table(results))
    hows = {blown.blow: blown.how for result in results for blown in result.blown}
    assert hows[("rank 0 killed",)] == hows[("rank stopped",)] == IN_PLACE
    assert hows[("supervisor killed",)] == FROM_CHECKPOINT
    assert len(hows) == 5, f"some blows came too late: {[result.missed for result in results]}"
    with embedded.client as client:
        victims = [job.id for job in client.jobs() if job.name == TURNS[0].victim]
        told = [hang for job_id in victims for hang in client.hangs(job_id) if hang.culprits]
    assert told, "users were not notified of the stopped rank"
    assert all(rank.stack and rank.phase for hang in told for rank in hang.ranks)


@SOAK
def test_stopped_processes_are_told_of_and_replaced_and_a_job_is_cancelled_meanwhile(
    tmp_path: Path,
) -> None:
    service = Service(tmp_path / "home", {"DRAY_LOCAL_SLOTS": "4", "DRAY_SILENCE_LIMIT_S": "8"})
    try:
        service.start()
        result = Runner(Ground(plan.EMBEDDED, service), kinds(tmp_path), {}).play(STOPPED)
        with service.client as client:
            (job,) = [job for job in client.jobs() if job.state is JobState.CANCELLED]
            events = list(client.events(job.id))
    finally:
        service.stop()
    print(report.table([result]))
    assert result.breaches == []
    assert [blown.how for blown in result.blown] == [UNTOUCHED, ENDED], result.missed
    told = {event.data["process"] for event in events if event.code == "not_answering"}
    assert "supervisor" in told
