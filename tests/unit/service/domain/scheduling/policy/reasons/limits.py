"""The sentences about limits of queues."""

from __future__ import annotations

from service.domain.scheduling.policy import (
    Decision,
)
from tests.unit.service.domain.scheduling.policy.reasons.claims import Claims, says
from tests.unit.service.domain.scheduling.policy.reasons.words import is_about, quantity


@says(
    r"([^;]+); (?:the queue '(\w+)'|(\w+)) (?:holds ([^,;]+?)|runs (\d+) jobs?)(?: in the "
    r"queue '(\w+)')?, and its limit(?: for a user)? is ([^,;]+)(; jobs ahead are also waiting)?"
)
def limited(
    claims: Claims,
    decision: Decision,
    needs: str,
    of_queue: str | None,
    user: str | None,
    amount: str | None,
    number: str | None,
    in_queue: str | None,
    limit: str,
    ahead: str | None,
) -> None:
    claims.check_opening(decision, needs)
    job = claims.job(decision)
    assert job.queue == (of_queue or in_queue)
    rules = claims.queues[job.queue]
    if user is not None:
        assert user == job.owner
    counted = {
        name
        for name, (queue, owner) in claims.account.items()
        if queue == job.queue and user in (None, owner)
    }
    if number is not None:
        most = rules.max_running if user is None else rules.max_running_per_user
        assert int(number) == len(counted)
        assert int(limit) == most
        assert ahead is not None or int(number) >= int(limit)
        return
    assert amount is not None
    resource = quantity(limit)[0]
    limits = rules.limit if user is None else rules.user_limit
    key = next(n for n in limits if n.removeprefix("accelerator_type:") == resource)
    assert is_about(limit, limits[key])
    unit = 0.001 if key.startswith("accelerator_type:") else 1.0
    held = sum(
        bundle.get(key, 0.0) / unit * n for name in counted for _, bundle, n in claims.holding[name]
    )
    assert is_about(amount, held), (amount, held)
    request = job.request
    each = request.bundle.get(key, 0.0) / unit
    if request.roles:
        wanted = sum(
            n * bundle.get(key, 0.0) / unit
            for n, bundle in ((r.number, r.bundle) for r in request.roles)
        ) + each * (request.num_workers - sum(r.number for r in request.roles))
    else:
        wanted = each * claims.least(decision)
    assert ahead or held + wanted > limits[key] - 1e-6
    assert wanted <= limits[key] + 1e-6, "else it could never start"


@says(r"([^;]+); the queue '(\w+)' allows(?: a user)? (.+) at most")
def limited_for_ever(
    claims: Claims, decision: Decision, needs: str, queue: str, limit: str
) -> None:
    claims.check_opening(decision, needs)
    job = claims.job(decision)
    assert job.queue == queue
    rules = claims.queues[queue]
    assert any(
        key.removeprefix("accelerator_type:") == quantity(limit)[0] and is_about(limit, amount)
        for key, amount in (*rules.limit.items(), *rules.user_limit.items())
    )


@says(r"([^;]+); the queue '(\w+)' has used up its budget of 5")
def budget(claims: Claims, decision: Decision, needs: str, queue: str) -> None:
    claims.check_opening(decision, needs)
    assert claims.job(decision).queue == queue in claims.snapshot.used_up
