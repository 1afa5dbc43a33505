"""What must hold of the rounds of federated jobs: each breach is a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dray import Client
from dray.views import FederatedClientPage, Hang, Job, JobState, LogLine, Series
from tests.chaos.ground import Ground, patiently
from tests.chaos.kinds import Kind
from tests.integration.silos import CANARY, everything_shown, files_with

UPDATES = "federated/updates"
FRAME = 'File "'
"""In each line of a stack; instead of one the node's agent says that it stays there."""
AGGREGATOR = 0
"""The rank without data of a silo."""


def breaches(
    ground: Ground, client: Client, job: Job, kind: Kind, series: Mapping[str, Series]
) -> Iterator[str]:
    """Of a job that has ended."""
    is_done = job.state is JobState.SUCCEEDED
    yield from of_updates(series, kind, is_done=is_done)
    storage = ground.service.home / "storage" / "jobs" / job.id
    if kind.tables:
        page = patiently(lambda: client.federated_clients(job.id))
        yield from of_sent(series, page, kind, is_done=is_done)
        if is_done and (left := [str(path) for path in storage.glob("rounds/**/*")]):
            yield f"files of rounds are left: {left[:10]}"
    if kind.silos:
        logs = [ground.service.home / "service.log", *storage.rglob("*")]
        if ground.raylets is not None:
            logs += ground.raylets.logs.rglob("*")
        yield from of_canaries(patiently(lambda: everything_shown(client, job.id)), logs)
        lines = patiently(lambda: list(client.logs(job.id)))
        yield from of_told(lines, patiently(lambda: client.hangs(job.id)))


def of_updates(series: Mapping[str, Series], kind: Kind, *, is_done: bool) -> Iterator[str]:
    """I5: a round is there once, and counts an update of each client at most, and no fewer than its
    quorum. is_done: whether it is the series of a job that came to its end."""
    if not kind.federated or UPDATES not in series:
        return
    rounds = _values(series[UPDATES])
    if is_done and list(rounds) != list(range(1, kind.num_steps + 1)):
        missing = sorted(set(range(1, kind.num_steps + 1)) - set(rounds))
        yield f"I5: {len(rounds)} of {kind.num_steps} rounds are there; missing {missing[:10]}"
    most = len(kind.silos) or kind.federated["clients"]
    least = kind.federated.get("quorum", 0)
    for number, updates in rounds.items():
        if not least <= updates <= most:
            yield f"I5: round {number} counts {updates:g} updates, and not {least} to {most}"
    told = Counter(
        step for name in kind.silos for step in _values(series.get(f"silo/{name}/train/loss"))
    )
    for number, updates in rounds.items() if kind.silos else ():
        if told[number] != updates:
            yield f"I5: round {number} counts {updates:g} updates, and {told[number]} silos"


def of_sent(
    series: Mapping[str, Series], page: FederatedClientPage, kind: Kind, *, is_done: bool
) -> Iterator[str]:
    """I5: no more updates count than clients have sent, and all rounds are over."""
    counted = sum(_values(series.get(UPDATES)).values())
    sent = {one.client: one.num_sent for one in page.items}
    if counted > sum(sent.values()):
        yield f"I5: {counted:g} updates count, and the clients have sent {sent}"
    if is_done and (page.round, page.is_open) != (kind.num_steps, False):
        yield f"the newest round is {page.round}, open: {page.is_open}"


def of_canaries(shown: str, files: Iterable[Path]) -> Iterator[str]:
    """I13: names of a silo's data are in nothing that is shown, logged or stored."""
    if CANARY in shown:
        at = shown.index(CANARY)
        yield f"I13: the name of a silo's data is shown: {shown[max(0, at - 200) : at + 50]}"
    if found := files_with(files, CANARY):
        yield f"I13: the name of a silo's data is in {found}"


def of_told(lines: Iterable[LogLine], hangs: Iterable[Hang]) -> Iterator[str]:
    """I13: no line and no stack of a silo leaves its node."""
    told = [(line.rank, line.text) for line in lines]
    stacks = ((rank.rank, rank.stack or "") for hang in hangs for rank in hang.ranks)
    told += [(rank, stack) for rank, stack in stacks if FRAME in stack]
    for rank, text in told:
        if rank != AGGREGATOR:
            yield f"I13: rank {rank} is a silo, and this has left its node: {text[:500]}"
            return


def _values(series: Series | None) -> dict[int, float]:
    """By step."""
    if series is None:
        return {}
    return {step: float(value) for step, value in zip(series.steps, series.values, strict=True)}
