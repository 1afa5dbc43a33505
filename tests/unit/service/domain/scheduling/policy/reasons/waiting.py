"""The sentences about jobs that wait, and about groups that do not grow."""

from __future__ import annotations

import re

from service.domain.scheduling.policy import (
    Decision,
    Preempt,
    Shrink,
    Start,
    Wait,
)
from tests.unit.service.domain.scheduling.policy.reasons.claims import Claims, says
from tests.unit.service.domain.scheduling.policy.reasons.words import some_jobs


@says(r"is held by (\S+); `dray release (\S+)` releases it")
def held(claims: Claims, decision: Decision, who: str, name: str) -> None:
    assert claims.waiting[decision.job_id].held == who
    assert name == decision.job_id


@says(r"waits for (the (?:end|success|failure) of .*)")
def after_others(claims: Claims, decision: Decision, words: str) -> None:
    after = claims.waiting[decision.job_id].after
    words, _, more = words.partition(", and ")
    named = re.findall(r"the (end|success|failure) of (\S+) \((\S+)\)", words)
    assert len(named) + int(more.removesuffix(" more") or 0) == len(after)
    for one, (what, name, state) in zip(after, named, strict=False):
        assert (what, name, state) == (one.on, one.id, one.is_now)


@says(r"waits for its retry at (\d\d:\d\d:\d\d) UTC")
def backs_off(claims: Claims, decision: Decision, at: str) -> None:
    until = claims.waiting[decision.job_id].not_before
    assert until is not None
    assert until > claims.now
    assert f"{until:%H:%M:%S}" == at


@says(r"(\d+) jobs? of (\S+) runs?(?:, and (\d+) starts? next)?; at most (\d+) can run at once")
def array_is_full(
    claims: Claims, decision: Decision, number: str, name: str, soon: str | None, most: str
) -> None:
    array = claims.waiting[decision.job_id].array
    assert array is not None
    assert (array.array_id, array.max_running) == (name, int(most))
    of_array = [
        each
        for each in claims.decisions[: claims.decisions.index(decision)]
        if each.job_id in claims.waiting
        and (array := claims.waiting[each.job_id].array) is not None
        and array.array_id == name
    ]
    started = sum(isinstance(each, Start) for each in of_array)
    assert int(number) == claims.snapshot.running_of_arrays.get(name, 0) + started
    coming = sum(isinstance(d, Wait) and d.reason.code == "room_is_made" for d in of_array)
    assert int(soon or 0) == coming
    assert int(number) + int(soon or 0) >= int(most)


@says("its environment is being prepared")
def is_prepared(claims: Claims, decision: Decision) -> None:
    assert claims.waiting[decision.job_id].preparing


@says("waits for the connection to the Ray cluster")
def no_cluster(claims: Claims, decision: Decision) -> None:
    assert not claims.snapshot.connected


@says("waits for free space: the storage holds 2 GB of 2 GB")
def no_storage(claims: Claims, decision: Decision) -> None:
    assert claims.snapshot.storage_problem is not None


@says("waits for a node: dray refuses every node without a silo's data")
def open_nodes_are_refused(claims: Claims, decision: Decision) -> None:
    opened = [n for n in claims.snapshot.nodes if n.total.get("open to all jobs") != 0]
    assert opened
    assert not any(node.accepted for node in opened)


@says(r"waits for a node: (the cluster has no nodes|dray refuses every node of the cluster)")
def no_node(claims: Claims, decision: Decision, which: str) -> None:
    assert not claims.all_nodes
    assert (which == "the cluster has no nodes") == (not claims.snapshot.nodes)
    assert not any(node.is_starting for node in claims.snapshot.nodes)


@says(r"waits for a node: dray's agent is starting on (\d+) nodes?")
def agents_start(claims: Claims, decision: Decision, number: str) -> None:
    assert not claims.all_nodes
    assert sum(node.is_starting for node in claims.snapshot.nodes) == int(number) > 0


@says(
    r"([^;]+); (\d+) (?:is|are) free( \(\d+ more .*\))?, and (jobs? .*) holds? (\d+) slots? on "
    r"suitable nodes"
)
def others_hold(
    claims: Claims, decision: Decision, needs: str, free: str, closed: str | None, jobs: str, n: str
) -> None:
    claims.check_opening(decision, needs)
    claims.check_free(decision, int(free))
    assert int(free) < claims.least(decision)
    claims.check_holders(decision, jobs, int(n))
    check_closed(claims, decision, closed)


@says(
    r"([^;]+); the free slots do not have room for all ranks, and (jobs? .*) holds? (\d+) slots? "
    r"on suitable nodes"
)
def not_together(claims: Claims, decision: Decision, needs: str, jobs: str, number: str) -> None:
    claims.check_opening(decision, needs)
    assert not claims.all_fit(claims.request(decision), claims.whole_free())
    claims.check_holders(decision, jobs, int(number))


@says(
    r"([^;]+); (?:(\d+) (?:is|are) free|the free slots do not have room for all ranks)( \(\d+ "
    r"more .*\))?, and (?:the job already holds all suitable slots of the cluster|(other programs "
    r"use the rest of the cluster)|(some of the other slots are in quarantine))"
)
def none_holds(
    claims: Claims,
    decision: Decision,
    needs: str,
    free: str | None,
    closed: str | None,
    others: str | None,
    stuck: str | None,
) -> None:
    claims.check_opening(decision, needs)
    check_closed(claims, decision, closed)
    request = claims.request(decision)
    if free is None:
        assert not claims.all_fit(request, claims.whole_free())
    else:
        claims.check_free(decision, int(free))
        assert int(free) < claims.least(decision)
    suitable = claims.suitable(request)
    holders = {j for j, slots in claims.holding.items() if any(n in suitable for n, _, _ in slots)}
    assert holders <= {decision.job_id}
    nodes = [claims.nodes[name] for name in suitable]
    used = any(
        node.available_to_us[name] + amount + node.quarantined.get(name, 0.0) < node.total[name]
        for node in nodes
        for name in request.bundle
        if name in node.total
        for amount in [
            sum(
                bundle.get(name, 0.0) * n
                for slots in claims.holding.values()
                for at, bundle, n in slots
                if at == node.id
            )
        ]
    )
    if stuck:
        assert any(node.quarantined for node in nodes)
    elif others:
        assert used
    else:
        own = sum(n for node, _, n in claims.holding[decision.job_id] if node in suitable)
        capacities = claims.capacities(
            request, claims.empty_sizes(request, claims.nodes), claims.nodes
        )
        assert own >= max(capacities.values())


def check_closed(claims: Claims, decision: Decision, words: str | None) -> None:
    request = claims.request(decision)
    is_whole = bool(request.homes or request.roles)
    number = 0 if is_whole else sum(claims.free_sizes(request, opened=True).values())
    told = int(re.findall(r"\d+", words)[0]) if words else 0
    assert told == number, (told, number)


@says(
    r"([^;]+); (\d+) (?:is|are) free, but (?:only (\d+)|none) within (one|its) (\S+?)(?: "
    r"\((\S+)\))?( \(\d+ more .*\))?(?:, and (jobs? .*) holds? (\d+) slots? on suitable "
    r"nodes)?(?:, and other programs use the rest of the cluster|, and the job already holds all "
    r"suitable slots of the cluster|, and some of the other slots are in quarantine)?"
)
def not_in_a_domain(
    claims: Claims,
    decision: Decision,
    needs: str,
    total: str,
    there: str | None,
    which: str,
    level: str,
    place: str | None,
    closed: str | None,
    jobs: str | None,
    number: str | None,
) -> None:
    claims.check_opening(decision, needs)
    check_closed(claims, decision, closed)
    request = claims.request(decision)
    assert request.required_level == level
    sizes = claims.free_sizes(request)
    assert int(total) == sum(sizes.values()) >= claims.least(decision)
    claims.check_free(decision, int(there or 0))
    assert int(there or 0) < claims.least(decision)
    if place is not None and level != "node":
        capacities = claims.capacities(request, sizes, claims.nodes)
        best = [where for where, n in capacities.items() if n == int(there or 0)]
        assert place in [where[-1] if isinstance(where, tuple) else where for where in best]
    if jobs:
        claims.check_holders(decision, jobs, int(number or 0))


@says(
    r"([^;]+); (\d+) (?:is|are) free, but (jobs? .*) (?:comes|come) first and could use the "
    r"same slots"
)
def behind(claims: Claims, decision: Decision, needs: str, free: str, jobs: str) -> None:
    claims.check_opening(decision, needs)
    claims.check_free(decision, int(free))
    assert int(free) >= claims.least(decision)
    names, number = some_jobs(jobs)
    ahead, back_off = claims.blocked_ahead(decision)
    assert set(names) <= ahead | back_off, (names, ahead)
    assert len(ahead) <= number <= len(ahead | back_off), (number, ahead)


@says(r"([^;]+); (jobs? .*) makes? room for this job")
def room_is_made(claims: Claims, decision: Decision, needs: str, jobs: str) -> None:
    claims.check_opening(decision, needs)
    names, _number = some_jobs(jobs)
    leaving = {
        *(job.job_id for job in claims.snapshot.running if job.is_leaving or job.recalled),
        *(d.job_id for d in claims.decisions if isinstance(d, Preempt | Shrink)),
    }
    assert set(names) <= leaving
    assert isinstance(decision, Wait)
    kept = {part.node_id for part in decision.slices}
    for name in names:
        assert any(node in kept for node, _, _ in claims.holding[name])


@says(r"trains on (\d+) workers?; other jobs come first or gain more from the available slots")
def others_grow(claims: Claims, decision: Decision, number: str) -> None:
    group = claims.groups[decision.job_id]
    assert int(number) == sum(part.num_workers for part in group.slices)
    assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(r"([^;]+); other jobs come first or gain more from the available slots")
def others_gain(claims: Claims, decision: Decision, needs: str) -> None:
    claims.check_opening(decision, needs)
    others = {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}
    assert others, "there is another one"
    assert decision.job_id in claims.snapshot.elastic


@says(
    r"trains on (\d+) workers?; this is currently the job's best size, according to its known step "
    r"times"
)
def gains_nothing(claims: Claims, decision: Decision, number: str) -> None:
    group = claims.groups[decision.job_id]
    assert int(number) == sum(part.num_workers for part in group.slices)
    choice = claims.snapshot.elastic[decision.job_id]
    assert int(number) < choice.most
    if choice.in_place:  # then it uses all free slots
        raise AssertionError("a group that grows in place gains by more")


@says(r"([^;]+); none of the accepted nodes could run a worker")
def no_place(claims: Claims, decision: Decision, needs: str) -> None:
    claims.check_opening(decision, needs)
    assert not claims.suitable(claims.request(decision))
