"""Checks of the promises for the rounds of federated jobs. Each breach is a sentence."""

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
"""Part of every line of a stack. For a silo, the node's agent sends a note instead of the stack."""
AGGREGATOR = 0
"""The rank that has no silo's data."""


def breaches(
    ground: Ground, client: Client, job: Job, kind: Kind, series: Mapping[str, Series]
) -> Iterator[str]:
    """Find breaches for a job that has ended."""
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
    """I5: every round exists once, with at most one update of each client and at least its quorum.

    is_done: whether the job has completed."""
    if not kind.federated or UPDATES not in series:
        return
    rounds = _values(series[UPDATES])
    if is_done and list(rounds) != list(range(1, kind.num_steps + 1)):
        missing = sorted(set(range(1, kind.num_steps + 1)) - set(rounds))
        yield f"I5: {len(rounds)} of {kind.num_steps} rounds exist; missing {missing[:10]}"
    most = len(kind.silos) or kind.federated["clients"]
    least = kind.federated.get("quorum", 0)
    for number, updates in rounds.items():
        if not least <= updates <= most:
            yield f"I5: round {number} counts {updates:g} updates, not {least} to {most}"
    told = Counter(
        step for name in kind.silos for step in _values(series.get(f"silo/{name}/train/loss"))
    )
    for number, updates in rounds.items() if kind.silos else ():
        if told[number] != updates:
            yield f"I5: round {number} counts {updates:g} updates, but {told[number]} silos"


def of_sent(
    series: Mapping[str, Series], page: FederatedClientPage, kind: Kind, *, is_done: bool
) -> Iterator[str]:
    """I5: not more updates are counted than clients have sent, and all rounds are closed."""
    counted = sum(_values(series.get(UPDATES)).values())
    sent = {one.client: one.num_sent for one in page.items}
    if counted > sum(sent.values()):
        yield f"I5: {counted:g} updates are counted, but the clients sent {sent}"
    if is_done and (page.round, page.is_open) != (kind.num_steps, False):
        yield f"the newest round is {page.round}, open: {page.is_open}"


def of_canaries(shown: str, files: Iterable[Path]) -> Iterator[str]:
    """I13: names of a silo's data are not shown, logged or stored anywhere."""
    if CANARY in shown:
        at = shown.index(CANARY)
        yield f"I13: the name of a silo's data is shown: {shown[max(0, at - 200) : at + 50]}"
    if found := files_with(files, CANARY):
        yield f"I13: the name of a silo's data is in {found}"


def of_told(lines: Iterable[LogLine], hangs: Iterable[Hang]) -> Iterator[str]:
    """I13: log lines and stacks of a silo don't leave its node."""
    told = [(line.rank, line.text) for line in lines]
    stacks = ((rank.rank, rank.stack or "") for hang in hangs for rank in hang.ranks)
    told += [(rank, stack) for rank, stack in stacks if FRAME in stack]
    for rank, text in told:
        if rank != AGGREGATOR:
            yield f"I13: rank {rank} is a silo, but this has left its node: {text[:500]}"
            return


def _values(series: Series | None) -> dict[int, float]:
    """Return the values by step."""
    if series is None:
        return {}
    return {step: float(value) for step, value in zip(series.steps, series.values, strict=True)}
