"""One turn: two jobs, one of which is hit by several faults, followed by checks of every
promise."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from dray import Client
from dray.views import Event, Job, JobState
from tests.chaos import crowding, promises
from tests.chaos.faults import CROWDED, HARMLESS, UNDISTURBED, strike
from tests.chaos.ground import Ground, patiently
from tests.chaos.kinds import Kind
from tests.chaos.outside import OutsideClients, of_exits
from tests.chaos.plan import Blow, Turn
from tests.chaos.promises import Learned, Onlooker
from tests.chaos.scene import Missed, Scene
from tests.chaos.stopping import (
    NOT_REPLACED,
    REPLACED_WITHIN_S,
    TELLER_OF,
    TELLERS,
    TOLD_AS,
    let_go,
)
from tests.integration.harness import eventually

MENDED_WITHIN_S = 150.0
ENDS_WITHIN_S = 240.0
STRIKE_TRIES = 3
GATEWAY_LOST = frozenset({"gateway killed", "gateway stopped"})
IN_PLACE = "in place"
FROM_CHECKPOINT = "from the checkpoint"
UNTOUCHED = "training went on"
ENDED = "ended meanwhile"


@dataclass(frozen=True)
class Blown:
    """A blow that found a target, and its effect on the job."""

    ground: str
    blow: Blow
    kind: str
    how: str
    """One of the constants above."""
    recovery_s: float | None = None
    """Seconds from the blow to the next step, according to the service's events. If training went
    on, seconds until the service accepted jobs again."""
    steps_lost: int | None = None


@dataclass
class Result:
    """The results of a turn."""

    turn: Turn
    blown: list[Blown] = field(default_factory=list)
    missed: list[Blow] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    num_jobs: int = 0


class Runner:
    """Runs turns on one ground."""

    def __init__(
        self, ground: Ground, kinds: Mapping[str, Kind], learned: dict[str, Learned | None]
    ) -> None:
        """learned: results of runs without faults, by kind. Missing ones are added by running the
        kind. None for a kind whose results come only from its trials."""
        self._ground = ground
        self._kinds = kinds
        self._learned = learned
        self._scenes: list[Scene] = []

    def play(self, turn: Turn) -> Result:
        result = Result(turn)
        self._ground.await_nodes()
        with self._ground.service.client as client:
            self._ensure_learned(client, turn.victim)
            self._ensure_learned(client, turn.bystander)
            with Onlooker(self._ground.service) as onlooker:
                try:
                    self._play(client, turn, result, onlooker)
                except Exception:
                    result.breaches.append(traceback.format_exc())
                    self._clear(client)
                finally:
                    for scene in self._scenes:
                        let_go(scene)
                    self._scenes.clear()
            result.breaches += dict.fromkeys(onlooker.breaches)
        return result

    def _play(self, client: Client, turn: Turn, result: Result, onlooker: Onlooker) -> None:
        jobs = [each for kind in self._kinds_of(turn) for each in submit(client, kind)]
        onlooker.job_ids += [job_id for job_id, _ in jobs]
        onlooker.sweeps += sweeps_of(client, [job_id for job_id, kind in jobs if kind.is_trial])
        job_id, kind = jobs[0]
        rng = random.Random(turn.seed)
        scene = Scene(self._ground, client, job_id, kind, rng, self._kinds)
        self._scenes.append(scene)
        with outside_clients(client, job_id, kind) as scene.outside:
            self._play_scene(scene, jobs, turn, result)
        result.breaches += [
            breach for sweep_id in onlooker.sweeps for breach in promises.of_sweep(client, sweep_id)
        ]

    def _play_scene(
        self, scene: Scene, jobs: list[tuple[str, Kind]], turn: Turn, result: Result
    ) -> None:
        client, kind = scene.client, scene.kind
        cancelled = False
        blows: list[tuple[Blown, Mark]] = []
        for each in turn.strikes:
            struck = self._strike(scene, each.blow, int(each.at * kind.num_steps), result)
            if struck is None:
                result.missed.append(each.blow)
                continue
            blown, before = struck
            result.blown.append(blown)
            blows.append((blown, before))
            cancelled |= "cancelled meanwhile" in each.blow
            result.breaches += self._of_damage(scene)
        jobs += scene.came
        result.num_jobs = len(jobs)
        ended = [self._await_end(client, job_id, kind) for job_id, kind in jobs]
        if scene.outside is not None:
            result.breaches += of_exits(scene.outside.exit_codes(), ended[0])
        result.breaches += of_telling(scene, blows)
        result.breaches += of_stopped(scene)
        let_go_at = time.time() if scene.stopped else 0.0
        let_go(scene)
        for (job_id, kind), state in zip(jobs, ended, strict=True):
            if kind.is_trial or (cancelled and kind is scene.kind):
                kind = cancelled_kind(kind, state)
            result.breaches += self._of_end(client, job_id, kind, state, let_go_at)

    def _kinds_of(self, turn: Turn) -> tuple[Kind, Kind]:
        return self._kinds[turn.victim], self._kinds[turn.bystander]

    def _strike(
        self, scene: Scene, blow: Blow, at_step: int, result: Result
    ) -> tuple[Blown, Mark] | None:
        """Strike the job. Return None if the job ended first or the blow never found a target."""
        for _ in range(STRIKE_TRIES):
            if not await_step(scene, at_step):
                return None
            before = Mark(scene)
            try:
                struck_at, blow = strike(scene, blow)
            except Missed as missed:
                print(f"  missed: {missed}", flush=True)
                time.sleep(1.0)  # the target may still be starting
                continue
            blown = follow(scene, blow, before, struck_at)
            result.breaches += of_blow(scene, blown, before)
            return blown, before
        return None

    def _await_end(self, client: Client, job_id: str, kind: Kind) -> JobState:
        """Wait for the end of a job, after cancelling it if its kind is meant to be cancelled."""
        if kind.cancel and not patiently(lambda: client.get(job_id)).state.is_terminal:
            patiently(lambda: client.cancel(job_id))
        return await_end(client, job_id)

    def _of_end(
        self, client: Client, job_id: str, kind: Kind, ended: JobState, let_go_at: float
    ) -> list[str]:
        """Find breaches for a job that has ended."""
        found = list(promises.breaches(self._ground, client, job_id, kind, let_go_at=let_go_at))
        found += crowding.breaches(client, job_id)
        undisturbed = self._learned.get(kind.name)
        if ended is JobState.SUCCEEDED and undisturbed is not None:
            found += promises.of_learned(promises.learned(client, job_id, kind), undisturbed)
        return [f"{job_id} ({kind.name}): {breach}" for breach in found]

    def _of_damage(self, scene: Scene) -> list[str]:
        """I6: a damaged checkpoint is skipped on resume."""
        damaged, scene.damaged_step = scene.damaged_step, 0
        if not damaged:
            return []
        newest = patiently(lambda: scene.client.attempts(scene.job_id))[-1]
        if newest.resume_step >= damaged:
            return [f"I6: resumed at {newest.resume_step}, from a damaged checkpoint"]
        return []

    def _ensure_learned(self, client: Client, name: str) -> None:
        kind = self._kinds[name]
        has_model = kind.is_recipe or kind.saves_model
        has_weights = has_model and kind.keeps_weights and not kind.cancel
        if not has_weights or name in self._learned:
            return
        for job_id, each in submit(client, to_the_end(kind)):
            with outside_clients(client, job_id, each):
                state = await_end(client, job_id)
            assert state is JobState.SUCCEEDED, client.get(job_id).reason
            self._learned[each.name] = promises.learned(client, job_id, each)
        self._learned.setdefault(name, None)

    def _clear(self, client: Client) -> None:
        """Clean up after a failure, so that the next turn has its slots and a service."""
        self._ground.ensure_service()
        for job in patiently(lambda: list(client.jobs())):
            if not job.state.is_terminal:
                patiently(lambda job=job: client.cancel(job.id))
                await_end(client, job.id)


def submit(client: Client, kind: Kind) -> list[tuple[str, Kind]]:
    """Submit a job. Return its ID and kind, or the IDs and kinds of an array's jobs or a sweep's
    trials."""
    job = client.submit(kind.spec)
    if kind.is_array:
        return [(each.id, kind) for each in client.jobs(array=job.array_id)]
    if not kind.is_sweep:
        return [(job.id, kind)]
    assert job.array_id is not None
    return [(each.job_id, kind.trial(each.index)) for each in client.trials(job.array_id)]


def outside_clients(
    client: Client, job_id: str, kind: Kind
) -> contextlib.AbstractContextManager[OutsideClients | None]:
    """Run the job's clients, if it has any, inside a `with` block."""
    if not kind.tables:
        return contextlib.nullcontext()
    return OutsideClients(client, job_id, kind.tables)


def sweeps_of(client: Client, job_ids: list[str]) -> list[str]:
    """Return the sweeps that the trials belong to, without duplicates."""
    found = [patiently(lambda id_=id_: client.get(id_)).array_id for id_ in job_ids]
    return [array for array in dict.fromkeys(found) if array is not None]


def to_the_end(kind: Kind) -> Kind:
    """Return the kind without early stopping of trials."""
    if not kind.is_sweep:
        return kind
    sweep = {key: value for key, value in kind.spec["sweep"].items() if key != "early_stopping"}
    return replace(kind, spec={**kind.spec, "sweep": sweep})


def of_stopped(scene: Scene) -> list[str]:
    """I11: after the jobs have ended, no replaced process is still stopped."""
    replaced = [one for one in scene.stopped if one.kind not in NOT_REPLACED]
    limits = (REPLACED_WITHIN_S.get(one.kind, promises.NOTHING_LEFT_WITHIN_S) for one in replaced)
    try:
        eventually(
            lambda: not any(one.is_still for one in replaced),
            within_s=max(limits, default=promises.NOTHING_LEFT_WITHIN_S),
        )
    except AssertionError:
        return [f"I11: {one.kind} {one.pid} is still stopped" for one in replaced if one.is_still]
    return []


def of_blow(scene: Scene, blown: Blown, before: Mark) -> list[str]:
    """I12: users are not charged for processes that didn't respond or for preemption, and brief
    stops have no effect."""
    if blown.how == ENDED or not any("stopped" in n or n in CROWDED for n in blown.blow):
        return []
    found = []
    events = patiently(lambda: list(scene.client.events(scene.job_id)))
    since = [event for event in events if event.seq > before.seq and not is_late(event, blown)]
    if set(blown.blow) <= HARMLESS and (blown.how != UNTOUCHED or since):
        found.append(f"{blown.blow} was not harmless: {[event.message for event in since]}")
    attempts = patiently(lambda: scene.client.attempts(scene.job_id))
    for each in attempts[before.attempt - 1 :]:
        if each.reason is not None and each.reason.code == "user_error":
            found.append(f"I12: {blown.blow} was charged to the user: {each.reason.message}")
    return found


def is_late(event: Event, blown: Blown) -> bool:
    """Whether an event is about a process stopped by an earlier blow."""
    told_of = {TOLD_AS.get(name.removesuffix(" briefly")) for name in blown.blow}
    return event.type == "silence" and event.data.get("process") not in told_of


def of_telling(scene: Scene, blows: list[tuple[Blown, Mark]]) -> Iterator[str]:
    """I11: users were notified of processes that didn't respond.

    Checked after the job has ended, because a rank may be replaced before users are notified of the
    process that was stopped at the same time. blows: all blows of the turn, in order.
    """
    events = patiently(lambda: list(scene.client.events(scene.job_id)))
    for number, (blown, before) in enumerate(blows):
        blow = blown.blow
        if blown.how == ENDED or TELLERS & set(blow):
            continue
        since_then = set(blow).union(*(later.blow for later, _ in blows[number:]))
        expected = {
            process
            for name, process in TOLD_AS.items()
            if name in blow and not since_then & TELLER_OF.get(name, frozenset())
        }
        told = {
            event.data["process"]
            for event in events
            if event.seq > before.seq and event.code == "not_answering"
        }
        if expected and not told & expected:
            yield f"I11: after {blow} users were only notified of {told}"


def cancelled_kind(kind: Kind, ended: JobState) -> Kind:
    """Return the expected result of a cancelled job, which may have ended first."""
    as_cancelled = JobState.SUCCEEDED if ended is JobState.SUCCEEDED else JobState.CANCELLED
    return replace(kind, ends_as=as_cancelled)


@dataclass
class Mark:
    """The state of a job before a blow."""

    seq: int
    attempt: int
    step: int
    furthest_step: int
    """The last step that the attempt reported: its progress when the blow struck."""
    gateway: int
    """Pid of the gateway. A blow may kill it, and another one must replace it."""

    def __init__(self, scene: Scene) -> None:
        self.gateway = eventually(partial(gateway_of, scene), why="there is no gateway")
        events = patiently(lambda: list(scene.client.events(scene.job_id)))
        job = patiently(lambda: scene.client.get(scene.job_id))
        self.seq, self.attempt = events[-1].seq, job.attempt
        self.step = self.furthest_step = job.progress.step if job.progress else 0


def gateway_of(scene: Scene) -> int:
    """Return the gateway's pid, or 0 while there is none."""
    try:
        return scene.ground.service.gateway_pid()
    except ValueError:  # none, or one that is exiting while its successor runs
        return 0


def await_step(scene: Scene, step: int) -> bool:
    """Wait until the job has reached a step and is training. Return False if it ended first."""

    def there() -> str:
        job = patiently(lambda: scene.client.get(scene.job_id))
        if job.state.is_terminal or job.state is JobState.CANCELLING:
            return "over"
        done = job.progress.step if job.progress else 0
        return "there" if job.state is JobState.RUNNING and done >= step else ""

    return (
        eventually(there, within_s=ENDS_WITHIN_S, why=f"step {step} was never reached") == "there"
    )


def await_end(client: Client, job_id: str) -> JobState:
    """Wait for the end of a job and return its state. There is no time limit while it makes
    progress, because machines differ in speed."""
    step = -1

    def further() -> Job | None:
        job = patiently(lambda: client.get(job_id))
        done = job.progress.step if job.progress else 0
        return job if job.state.is_terminal or done > step else None

    while True:
        job = eventually(further, within_s=ENDS_WITHIN_S, why=f"{job_id} is stuck at step {step}")
        assert job is not None
        if job.state.is_terminal:
            return job.state
        step = job.progress.step if job.progress else 0


def follow(scene: Scene, blow: Blow, before: Mark, struck_at: float) -> Blown:
    """Wait until the job and the service have recovered from the blow."""
    found: list[Blown] = []

    def over() -> bool:
        gateway = gateway_of(scene)
        replaced = gateway != before.gateway or not GATEWAY_LOST & set(blow)
        service_back = bool(gateway) and replaced and scene.ground.service.takes_jobs()
        blown = look(scene, blow, before, struck_at)
        if blown is not None and (service_back or blown.how == ENDED):
            found.append(blown)
        return bool(found)

    eventually(
        over, within_s=MENDED_WITHIN_S, why=f"no recovery from {blow} within {MENDED_WITHIN_S} s"
    )
    return found[0]


def look(scene: Scene, blow: Blow, before: Mark, struck_at: float) -> Blown | None:
    """Return the blow's effect on the job, or None while that is unknown."""
    made = partial(Blown, scene.ground.name, blow, scene.kind.name)
    job = patiently(lambda: scene.client.get(scene.job_id))
    step = job.progress.step if job.progress else 0
    went_on = step > before.step
    if job.attempt == before.attempt:
        before.furthest_step = max(before.furthest_step, step)
    events = patiently(lambda: list(scene.client.events(scene.job_id)))
    since = [event for event in events if event.seq > before.seq]
    back = [event for event in since if trains_again(event, before, blow)]
    # A job that was lost again after a recovery has recovered only when it trains.
    if back and (job.state is JobState.RUNNING or job.state.is_terminal):
        first, last = back[0], back[-1]
        if last.attempt == before.attempt:
            lost = sum(event.data.get("steps_lost") or 0 for event in back)
            return made(IN_PLACE, seconds_of(first, last, struck_at, blow), lost)
        attempts = patiently(lambda: scene.client.attempts(scene.job_id))
        lost = (
            max(0, before.furthest_step - attempts[-1].resume_step)
            if scene.kind.is_recipe
            else None
        )
        return made(FROM_CHECKPOINT, last.time.timestamp() - struck_at, lost)
    if job.state.is_terminal:
        return made(ENDED)
    if set(blow) <= UNDISTURBED and went_on:
        return made(UNTOUCHED, time.time() - struck_at, 0)
    return None


def seconds_of(first: Event, last: Event, struck_at: float, blow: Blow) -> float:
    """Return the time measured by the supervisor if there was a single recovery, else the time
    until the last one.

    The supervisor measures from when it detects the loss, which is late if a rank is only stopped.
    """
    told = first.data.get("recovery_s")
    was_stopped = any(name.endswith(" stopped") for name in blow)
    if first is last and told is not None and not was_stopped:
        return float(told)
    return last.time.timestamp() - struck_at


def trains_again(event: Event, before: Mark, blow: Blow) -> bool:
    if event.code == "recovered" or (event.code == "resized" and blow[0] == "slots recalled"):
        return True
    return event.code == "running" and event.attempt > before.attempt
