"""Jobs that arrive while others hold the slots, and take precedence over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dray import Client
from dray.views import JobState
from tests.chaos.ground import MIN_RUN_S, patiently
from tests.chaos.kinds import ALL, SOME
from tests.chaos.scene import Scene
from tests.integration.harness import eventually

GUARANTEED = "guaranteed"
"""A queue that may use every slot of the cluster."""
ASKED_WITHIN_S = 60.0
ASKED = "makes_room"


def outrank(scene: Scene) -> None:
    """Submit a job with a higher priority than any other."""
    come(scene, ALL, priority=99)


def claim_quota(scene: Scene) -> None:
    """Submit a job with a guaranteed quota, so that all other jobs only borrow their slots."""
    num_slots = scene.known[ALL].num_ranks
    patiently(lambda: scene.client.set_queue(GUARANTEED, quota={"CPU": float(num_slots)}))
    come(scene, ALL, queue=GUARANTEED)


def recall(scene: Scene) -> None:
    """Submit a job that needs only a few slots, which an elastic group can release."""
    come(scene, SOME, priority=99)


def come(scene: Scene, name: str, **fields: Any) -> None:
    """Submit a job of a kind. Return when the victim has been asked to release slots, or holds
    none."""
    # With fewer nodes the job would be rejected, because it could never run.
    scene.ground.await_nodes()
    kind = scene.known[name]
    client = scene.client
    coming = patiently(lambda: client.submit({**kind.spec, **fields})).id
    scene.came.append((coming, kind))

    def is_asked() -> bool:
        victim = patiently(lambda: client.get(scene.job_id))
        holds = victim.state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
        has_started = patiently(lambda: client.get(coming)).state is not JobState.QUEUED
        return not holds or has_started or bool(_asked_for(client, scene.job_id, coming))

    eventually(is_asked, within_s=ASKED_WITHIN_S, why=f"no job made room for {coming}")


def breaches(client: Client, job_id: str) -> Iterator[str]:
    """Find breaches for a job that has ended and may have been preempted."""
    attempts = {each.attempt: each for each in patiently(lambda: client.attempts(job_id))}
    for event in patiently(lambda: list(client.events(job_id))):
        if event.code == ASKED and event.attempt in attempts:
            held_s = (event.time - attempts[event.attempt].created_at).total_seconds()
            if held_s < MIN_RUN_S:
                yield f"it was asked to release its slots after {held_s:.1f} s"
        if event.code == "preempted" and event.data.get("charged_to") != "free":
            yield f"I12: a retry was charged for making room: {event.data}"


def _asked_for(client: Client, job_id: str, coming: str) -> list[str]:
    events = patiently(lambda: list(client.events(job_id)))
    return [e.message for e in events if e.code == ASKED and coming in e.message]
