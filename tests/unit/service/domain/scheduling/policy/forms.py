"""The forms of the sentences of a plan, and what each must hold (`claims`)."""

from __future__ import annotations

import re

from service.domain.scheduling.policy import (
    Decision,
    Growing,
    Impossible,
    Preempt,
    Request,
    RunningJob,
    Shrink,
    Start,
    Stay,
    Wait,
    WaitingJob,
)
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.policy.claims import (
    Claims,
    is_about,
    quantity,
    says,
    some_jobs,
)

DAY_S = 24 * 3600.0
ALL_CLOSED = "every node of the cluster has a silo's data, and takes ranks of silos alone"


@says(r"is held by (\S+); `dray release (\S+)` lets it go on")
def held(claims: Claims, decision: Decision, who: str, name: str) -> None:
    assert claims.waiting[decision.job_id].held == who
    assert name == decision.job_id


@says(r"waits for (the (?:end|success) of .*)")
def after_others(claims: Claims, decision: Decision, words: str) -> None:
    after = claims.waiting[decision.job_id].after
    words, _, more = words.partition(" and of ")
    named = re.findall(r"the (end|success) of (\S+) \((\S+)\)", words)
    assert len(named) + int(more.removesuffix(" more") or 0) == len(after)
    for one, (what, name, state) in zip(after, named, strict=False):
        assert (what == "success", name, state) == (one.on_success, one.id, one.is_now)


@says(r"waits until (\d\d:\d\d:\d\d) UTC before it is tried again")
def backs_off(claims: Claims, decision: Decision, at: str) -> None:
    until = claims.waiting[decision.job_id].not_before
    assert until is not None and until > claims.now
    assert f"{until:%H:%M:%S}" == at


@says(r"(\d+) jobs? of (\S+) runs?(?:, and (\d+) starts? next)?, of at most (\d+) at once")
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


@says("waits for the Ray cluster, which does not answer")
def no_cluster(claims: Claims, decision: Decision) -> None:
    assert not claims.snapshot.connected


@says("waits for room: the storage holds 2 GB of 2 GB")
def no_storage(claims: Claims, decision: Decision) -> None:
    assert claims.snapshot.storage_problem is not None


@says(r"waits for a node: (the cluster has none|every node of the cluster is refused)")
def no_node(claims: Claims, decision: Decision, which: str) -> None:
    assert not claims.all_nodes
    assert (which == "the cluster has none") == (not claims.snapshot.nodes)
    assert not any(node.is_starting for node in claims.snapshot.nodes)


@says(r"waits for a node: dray's agent starts on (\d+) nodes?")
def agents_start(claims: Claims, decision: Decision, number: str) -> None:
    assert not claims.all_nodes
    assert sum(node.is_starting for node in claims.snapshot.nodes) == int(number) > 0


# Jobs that wait for slots.


@says(r"([^;]+); (\d+) (?:is|are) free( \(\d+ more .*\))?, (jobs? .*) holds? (\d+) slots? on suitable nodes")
def others_hold(
    claims: Claims, decision: Decision, needs: str, free: str, closed: str | None, jobs: str, n: str
) -> None:
    claims.check_opening(decision, needs)
    claims.check_free(decision, int(free))
    assert int(free) < claims.least(decision)
    claims.check_holders(decision, jobs, int(n))
    check_closed(claims, decision, closed)


@says(r"([^;]+); they do not all fit into what is free, (jobs? .*) holds? (\d+) slots? on suitable nodes")
def not_together(claims: Claims, decision: Decision, needs: str, jobs: str, number: str) -> None:
    claims.check_opening(decision, needs)
    assert not claims.all_fit(claims.request(decision), claims.whole_free())
    claims.check_holders(decision, jobs, int(number))


@says(r"([^;]+); (?:(\d+) (?:is|are) free|they do not all fit into what is free)( \(\d+ more .*\))?, (?:and it holds all that the cluster has|(others use the rest of the cluster)|(processes that did not end use some of the rest))")
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
        rooms = claims.rooms(request, claims.empty_sizes(request, claims.nodes), claims.nodes)
        assert own >= max(rooms.values())


def check_closed(claims: Claims, decision: Decision, words: str | None) -> None:
    request = claims.request(decision)
    is_whole = bool(request.homes or request.roles)
    number = 0 if is_whole else sum(claims.free_sizes(request, opened=True).values())
    told = int(re.findall(r"\d+", words)[0]) if words else 0
    assert told == number, (told, number)


@says(r"([^;]+); (\d+) (?:is|are) free, but (?:only (\d+)|none) within (one|its) (\S+?)(?: \((\S+)\))?( \(\d+ more .*\))?(?:, (jobs? .*) holds? (\d+) slots? on suitable nodes)?(?:, others use the rest of the cluster|, and it holds all that the cluster has|, processes that did not end use some of the rest)?")
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
        rooms = claims.rooms(request, sizes, claims.nodes)
        best = [where for where, n in rooms.items() if n == int(there or 0)]
        assert place in [where[-1] if isinstance(where, tuple) else where for where in best]
    if jobs:
        claims.check_holders(decision, jobs, int(number or 0))


@says(r"([^;]+); (\d+) (?:is|are) free, but (jobs? .*) (?:comes|come) first and could use the same slots")
def behind(claims: Claims, decision: Decision, needs: str, free: str, jobs: str) -> None:
    claims.check_opening(decision, needs)
    claims.check_free(decision, int(free))
    assert int(free) >= claims.least(decision)
    names, number = some_jobs(jobs)
    ahead, back_off = claims.blocked_ahead(decision)
    assert set(names) <= ahead | back_off, (names, ahead)
    assert len(ahead) <= number <= len(ahead | back_off), (number, ahead)


@says(r"([^;]+); (jobs? .*) makes? room for it")
def room_is_made(claims: Claims, decision: Decision, needs: str, jobs: str) -> None:
    claims.check_opening(decision, needs)
    names, number = some_jobs(jobs)
    leaving = {
        *(job.job_id for job in claims.snapshot.running if job.is_leaving or job.recalled),
        *(d.job_id for d in claims.decisions if isinstance(d, Preempt | Shrink)),
    }
    assert set(names) <= leaving
    assert isinstance(decision, Wait)
    kept = {part.node_id for part in decision.slices}
    for name in names:
        assert any(node in kept for node, _, _ in claims.holding[name])


@says(r"trains on (\d+) workers?; other jobs come first or gain more by the slots that there are")
def others_grow(claims: Claims, decision: Decision, number: str) -> None:
    group = claims.groups[decision.job_id]
    assert int(number) == sum(part.num_workers for part in group.slices)
    assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(r"([^;]+); other jobs come first or gain more by the slots that there are")
def others_gain(claims: Claims, decision: Decision, needs: str) -> None:
    claims.check_opening(decision, needs)
    others = {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}
    assert others, "there is another one"
    assert decision.job_id in claims.snapshot.elastic


@says(r"trains on (\d+) workers?; that is its size for now, by the step times that are known of it")
def gains_nothing(claims: Claims, decision: Decision, number: str) -> None:
    group = claims.groups[decision.job_id]
    assert int(number) == sum(part.num_workers for part in group.slices)
    choice = claims.snapshot.elastic[decision.job_id]
    assert int(number) < choice.most
    if choice.in_place:  # then it takes whatever is free
        raise AssertionError("a group that grows in place gains by more")


@says(r"([^;]+); no node that is accepted could run one")
def no_place(claims: Claims, decision: Decision, needs: str) -> None:
    claims.check_opening(decision, needs)
    assert not claims.suitable(claims.request(decision))


# Limits.


@says(r"([^;]+); (?:the queue '(\w+)'|(\w+)) (?:holds ([^,;]+?)|runs (\d+) jobs?)(?: in the queue '(\w+)')?, its limit(?: for a user)? is ([^,]+)(, and jobs ahead wait, too)?")
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
        bundle.get(key, 0.0) / unit * n
        for name in counted
        for _, bundle, n in claims.holding[name]
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


# Jobs that the nodes could not run.


@says(r"besides (\d+) nodes? with a silo's data, which takes? ranks of silos alone, (.*)")
def besides_silos(claims: Claims, decision: Decision, number: str, rest: str) -> None:
    closed = [n for n in nodes_for(claims, decision).values() if n.total.get("open to all jobs") == 0]
    assert int(number) == len(closed)
    claims.check_sentence(decision, rest)


@says(r"([^;]+), and waits for nodes: (.*)")
def for_nodes(claims: Claims, decision: Decision, needs: str, why: str) -> None:
    assert claims.snapshot.to_come
    claims.check_opening(decision, needs)
    if why == "there is none that it could use":
        assert not claims.nodes
    else:
        claims.check_sentence(decision, why)


def nodes_for(claims: Claims, decision: Decision) -> dict[str, object]:
    """Nodes that the sentence is about: those that may come as well, if it can never start."""
    return dict(claims.all_nodes if isinstance(decision, Impossible) else claims.nodes)


@says(r"(needs .*), but the whole cluster has room for (\d+)(?: workers?)? at once(?:, each on another GPU)?")
def too_few(claims: Claims, decision: Decision, needs: str, number: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    sizes = claims.empty_sizes(request, nodes_for(claims, decision))
    assert int(number) == sum(sizes.values()) < of_kind(request)


def of_kind(request: Request) -> int:
    """Workers with the bundle of the request that must run at once."""
    return request.num_workers - request.roles[0].number if request.roles else request.least


@says(r"(needs .*), but the whole cluster has room for (\d+) servers? at once")
def too_few_servers(claims: Claims, decision: Decision, needs: str, number: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    (role,) = request.roles
    alone = Request(role.number, role.bundle)
    sizes = claims.empty_sizes(alone, nodes_for(claims, decision))
    assert int(number) == sum(sizes.values()) < role.number


@says(r"(needs .*), but the whole cluster has room for each of these, and not for all at once")
def not_all(claims: Claims, decision: Decision, needs: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    nodes = nodes_for(claims, decision)
    assert not claims.all_fit(request, {name: node.total for name, node in nodes.items()})
    (role,) = request.roles
    for number, bundle in ((of_kind(request), request.bundle), (role.number, role.bundle)):
        assert sum(claims.empty_sizes(Request(number, bundle), nodes).values()) >= number


@says(r"(needs .*), and no single node of the cluster has all of it")
def no_single_node(claims: Claims, decision: Decision, needs: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    nodes = nodes_for(claims, decision)
    assert not any(claims.empty_sizes(request, nodes).values())


@says(r"no node of the cluster has the (label|accelerator) (\S+)")
def no_such_node(claims: Claims, decision: Decision, what: str, name: str) -> None:
    key = f"label:{name}" if what == "label" else f"accelerator_type:{name}"
    assert key in claims.request(decision).bundle
    usable = [n for n in nodes_for(claims, decision).values() if n.total.get("open to all jobs", 1)]
    assert not any(key in node.total for node in usable)


@says(r"each worker needs (.*), but the largest node has (.*)")
def too_small(claims: Claims, decision: Decision, needs: str, has: str) -> None:
    assert needs != has, "the words differ"
    name, _ = quantity(needs)
    assert is_about(needs, claims.request(decision).bundle[name])
    usable = [n for n in nodes_for(claims, decision).values() if n.total.get("open to all jobs", 1)]
    most = max(node.total.get(name, 0.0) for node in usable)
    assert most < claims.request(decision).bundle[name]
    assert has == f"no {name}" if not most else is_about(has, most)


@says(r"(needs .*), but the largest (\S+), (\S+), has room for (\d+) at once")
def domain_too_small(
    claims: Claims, decision: Decision, needs: str, level: str, place: str, number: str
) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    nodes = nodes_for(claims, decision)
    rooms = claims.rooms(request, claims.empty_sizes(request, nodes), nodes)
    assert int(number) == max(rooms.values()) < request.least
    best = [where for where, n in rooms.items() if n == int(number)]
    assert place in [where[-1] if isinstance(where, tuple) else where for where in best]


@says(r"(needs .*), but the topology \(DRAY_TOPOLOGY\) has no level '(\S+)', only: (.*)")
def no_level(claims: Claims, decision: Decision, needs: str, level: str, known: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    assert request.required_level == level
    assert known.split(", ") == [*claims.snapshot.topology, "node"]
    assert not claims.has_level(level)


@says(r"every node of the cluster has a silo's data, and takes ranks of silos alone")
def all_closed(claims: Claims, decision: Decision) -> None:
    waits = getattr(decision, "reason", None) and decision.reason.code == "no_nodes"
    nodes = claims.all_nodes if waits else nodes_for(claims, decision)
    assert nodes
    assert all(node.total.get("open to all jobs") == 0 for node in nodes.values())
    assert not claims.request(decision).homes


@says(r"no node of the cluster with the label (\S+) has room for the worker of federated.silos\[(\d+)\](?: besides those of other silos)?: (.*)")
def no_home(claims: Claims, decision: Decision, label: str, at: str, _: str) -> None:
    homes = claims.request(decision).homes
    assert homes[int(at)] == (f"label:{label}",)
    nodes = {name: node.total for name, node in nodes_for(claims, decision).items()}
    bundle = claims.request(decision).bundle
    some = Request(int(at) + 2, bundle, homes=homes[: int(at) + 1])
    # The first worker needs nothing here.
    anywhere = {**nodes, "anywhere": dict(bundle)}
    claims.all_nodes["anywhere"] = type(next(iter(claims.snapshot.nodes)))("anywhere", bundle, bundle)
    assert not claims.all_fit(some, anywhere)
    del claims.all_nodes["anywhere"]


@says(r"no node of the cluster has room for the worker that aggregates besides those of silos: it needs .*, on a node without a silo's data")
def no_first(claims: Claims, decision: Decision) -> None:
    nodes = {name: node.total for name, node in nodes_for(claims, decision).items()}
    assert not claims.all_fit(claims.request(decision), nodes)


# Jobs that leave slots.


@says(r"leaves its slots to job (\S+), (.*)")
def leaves(claims: Claims, decision: Decision, name: str, why: str) -> None:
    assert isinstance(decision, Preempt)
    assert decision.because_of == name
    coming, running = claims.waiting[name], claims.running[decision.job_id]
    assert claims.decided[name].reason.code == "room_is_made"  # type: ignore[union-attr]
    if why == "which has a higher priority":
        assert coming.priority > running.priority
    elif why == "which is within its queue's quota":
        assert claims.queues[coming.queue].quota
    elif why == "which has less work left":
        assert claims.work(coming) < claims.work(running)
    elif why == "which has waited for more than a day":
        assert coming.waited_s > DAY_S
    elif why == "which was moved to the front of its queue":
        assert coming.place < 0
    elif why == "which goes first until it is known how long it takes":
        assert coming.left_s is None
    elif why == "because its own queue has used more than its share":
        assert is_beyond_share(claims, running)
    else:
        assert why == "because its own user has used more than their share", why
        assert is_user_beyond_share(claims, running)


def is_beyond_share(claims: Claims, running: RunningJob) -> bool:
    used = claims.snapshot.used_s
    active = {job.queue for job in claims.running.values()}
    active |= {job.queue for job in claims.waiting.values() if not (job.held or job.after)}
    active -= set(claims.snapshot.used_up) - {job.queue for job in claims.running.values()}
    of = {q: sum(s for (queue, _), s in used.items() if queue == q) for q in active}
    weights = {q: claims.queues.get(q, Queue(q)).weight for q in active}
    return of[running.queue] > sum(of.values()) * weights[running.queue] / sum(weights.values())


def is_user_beyond_share(claims: Claims, running: RunningJob) -> bool:
    used = claims.snapshot.used_s
    users = {job.owner for job in claims.running.values() if job.queue == running.queue}
    users |= {
        job.owner
        for job in claims.waiting.values()
        if job.queue == running.queue and not (job.held or job.after)
    }
    of = {owner: used.get((running.queue, owner), 0.0) for owner in users}
    return of[running.owner] > sum(of.values()) / len(of)


@says(r"leaves its slots and resumes on (\d+) workers? instead of (\d+), (by its speed|because other jobs come first or gain more)")
def resumes(claims: Claims, decision: Decision, after: str, before: str, why: str) -> None:
    held = sum(n for _, _, n in claims.holding[decision.job_id])
    assert int(before) == held != int(after)
    if why != "by its speed":
        assert int(after) < held
        assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(r"leaves its slots for a while, because other jobs come first or gain more by them")
def leaves_for_a_while(claims: Claims, decision: Decision) -> None:
    assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(r"goes on with fewer workers, because other jobs come first or gain more by these")
def shrinks(claims: Claims, decision: Decision) -> None:
    assert isinstance(decision, Shrink)
    assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(r"goes on with fewer workers, so that job (\S+) can start")
def shrinks_for(claims: Claims, decision: Decision, name: str) -> None:
    assert isinstance(decision, Shrink)
    assert decision.because_of == name
    assert claims.decided[name].reason.code == "room_is_made"  # type: ignore[union-attr]
