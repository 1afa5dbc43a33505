"""Report the usage of queues and users, as the scheduler compares it to their shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from service.db.repositories.scheduling import queues as queues_repository
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.slots import total_of
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.shares import HALF_LIFE_S, Standings, UsageShare, UserStanding
from service.domain.scheduling.rules.tree import QueueTree
from service.outlook.answers import NO_FORECAST, Answers
from service.queues.service import not_found

MIN_SHOWN_S = 1.0
"""Users without active jobs are shown if they have used at least this many cluster-seconds."""

NO_NODES = views.Reason(
    code="no_nodes",
    message="usage can't be compared, because the cluster is not connected or has no usable node",
)


def report(
    session: Session, answers: Answers, now: datetime, *, queue: str | None, owner: str | None
) -> views.ShareReport:
    """Return the shares of all queues and their users, or only of this queue and the queues under
    it, or only of this user. Raises
    QueueNotFound if the queue does not exist."""
    queues = {each.name: each for each in queues_repository.every(session)}
    if queue is not None and queue not in queues:
        raise not_found(queue)
    newest = answers.situation(session, now)
    if newest is None:
        return _nothing(NO_FORECAST)
    if not newest[1].nodes:
        return _nothing(NO_NODES)
    return of_situation(queues, *newest, queue=queue, owner=owner)


def of_situation(
    queues: Mapping[str, Queue],
    made_at: datetime,
    situation: Situation,
    *,
    queue: str | None = None,
    owner: str | None = None,
) -> views.ShareReport:
    """Return the shares in a situation. `queues` contains the current rules of all queues."""
    used_s = situation.snapshot.used_s
    standings = Standings(queues.values(), used_s, situation.active_accounts())
    of_queues: defaultdict[str, float] = defaultdict(float)
    tree = QueueTree(queues.values())
    for (name, _), seconds in used_s.items():
        for above in tree.path(name):
            of_queues[above] += seconds
    users: defaultdict[str, list[views.UserShare]] = defaultdict(list)
    recent = {account for account, seconds in used_s.items() if seconds >= MIN_SHOWN_S}
    for name, user in sorted(recent | standings.of_users.keys()):
        if owner in (None, user) and name in queues:
            share = standings.of_users.get((name, user))
            weight, seconds = queues[name].weight_of(user), used_s.get((name, user), 0.0)
            users[name].append(_user(user, weight, seconds, share, made_at))
    return views.ShareReport(
        made_at=made_at,
        half_life_s=HALF_LIFE_S,
        cluster=total_of(node.total for node in situation.nodes),
        queues=[
            _queue(each, of_queues[name], standings, made_at, users[name])
            for name, each in sorted(queues.items())
            if queue is None or queue in tree.path(name)
        ],
    )


def _nothing(why: views.Reason) -> views.ShareReport:
    return views.ShareReport(half_life_s=HALF_LIFE_S, cluster={}, queues=[], warnings=[why])


def _user(
    owner: str, weight: float, used_s: float, share: UsageShare | None, at: datetime
) -> views.UserShare:
    standing = None if share is None else share.standing.name.lower()
    return views.UserShare(
        owner=owner,
        weight=weight,
        used_s=used_s,
        standing=standing,
        until=_until(share, at),
        **_fields(share),
    )


def _queue(
    queue: Queue, used_s: float, standings: Standings, at: datetime, users: list[views.UserShare]
) -> views.QueueShare:
    share = standings.of_queues.get(queue.name)
    is_ahead = share is not None and share.standing is UserStanding.AHEAD
    return views.QueueShare(
        name=queue.name,
        parent=queue.parent,
        weight=queue.weight,
        quota=dict(queue.quota),
        used_s=used_s,
        tier=None if share is None else standings.tier(queue.name).name.lower(),
        until=_until(share, at) if is_ahead else None,
        users=users,
        **_fields(share),
    )


def _fields(share: UsageShare | None) -> dict[str, Any]:
    if share is None:
        return {}
    return {
        "share": share.of_all,
        "due_s": share.due_s,
        "difference_s": share.excess_s,
        "margin_s": share.slack_s,
    }


def _until(share: UsageShare | None, at: datetime) -> datetime | None:
    even_in_s = None if share is None else share.even_in_s
    return None if even_in_s is None else at + timedelta(seconds=even_in_s)
