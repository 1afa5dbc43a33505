"""The sentences about gangs that the nodes could not run even if they were empty."""

from __future__ import annotations

from service.domain.scheduling.policy import (
    Decision,
    Impossible,
    Node,
    Request,
)
from tests.unit.service.domain.scheduling.policy.reasons.claims import Claims, says
from tests.unit.service.domain.scheduling.policy.reasons.words import is_about, quantity


@says(r"(.*), apart from (\d+) nodes? with a silo's data, which accepts? only ranks of silos")
def besides_silos(claims: Claims, decision: Decision, rest: str, number: str) -> None:
    closed = [
        n for n in nodes_for(claims, decision).values() if n.total.get("open to all jobs") == 0
    ]
    assert int(number) == len(closed)
    claims.check_sentence(decision, rest)


@says(r"([^;]+), and waits for nodes: (.*)")
def for_nodes(claims: Claims, decision: Decision, needs: str, why: str) -> None:
    assert claims.snapshot.to_come
    claims.check_opening(decision, needs)
    if why == "the cluster has no usable node":
        assert not claims.nodes
    else:
        claims.check_sentence(decision, why)


def nodes_for(claims: Claims, decision: Decision) -> dict[str, Node]:
    """Return the nodes to which the sentence refers, including nodes that can be added if the job
    can never start."""
    return dict(claims.all_nodes if isinstance(decision, Impossible) else claims.nodes)


@says(
    r"(needs .*), but the whole cluster has room for (\d+)(?: workers?)? at once(?:, each on "
    r"a different GPU)?"
)
def too_few(claims: Claims, decision: Decision, needs: str, number: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    sizes = claims.empty_sizes(request, nodes_for(claims, decision))
    assert int(number) == sum(sizes.values()) < of_kind(request)


def of_kind(request: Request) -> int:
    """Return the number of workers with the request's bundle that must run at the same time."""
    return request.num_workers - request.roles[0].number if request.roles else request.least


@says(r"(needs .*), but the whole cluster has room for (\d+) servers? at once")
def too_few_servers(claims: Claims, decision: Decision, needs: str, number: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    (role,) = request.roles
    alone = Request(role.number, role.bundle)
    sizes = claims.empty_sizes(alone, nodes_for(claims, decision))
    assert int(number) == sum(sizes.values()) < role.number


@says(r"(needs .*), but the whole cluster has room for each of these, but not for all at once")
def not_all(claims: Claims, decision: Decision, needs: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    nodes = nodes_for(claims, decision)
    assert not claims.all_fit(request, {name: node.total for name, node in nodes.items()})
    (role,) = request.roles
    for number, bundle in ((of_kind(request), request.bundle), (role.number, role.bundle)):
        assert sum(claims.empty_sizes(Request(number, bundle), nodes).values()) >= number


@says(r"(needs .*), but no single node of the cluster has all of these resources")
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
    capacities = claims.capacities(request, claims.empty_sizes(request, nodes), nodes)
    assert int(number) == max(capacities.values()) < request.least
    best = [where for where, n in capacities.items() if n == int(number)]
    assert place in [where[-1] if isinstance(where, tuple) else where for where in best]


@says(
    r"(needs .*), but '(\S+)' is not a level of the topology \(DRAY_TOPOLOGY\), whose levels are "
    r"(.*)"
)
def no_level(claims: Claims, decision: Decision, needs: str, level: str, known: str) -> None:
    request = claims.request(decision)
    claims.check_needs(request, needs)
    assert request.required_level == level
    assert known.split(", ") == [*claims.snapshot.topology, "node"]
    assert not claims.has_level(level)


@says(r"every node of the cluster has a silo's data, and accepts only ranks of silos")
def all_closed(claims: Claims, decision: Decision) -> None:
    waits = getattr(decision, "reason", None) and decision.reason.code == "no_nodes"
    nodes = claims.all_nodes if waits else nodes_for(claims, decision)
    assert nodes
    assert all(node.total.get("open to all jobs") == 0 for node in nodes.values())
    assert not claims.request(decision).homes


@says(
    r"no node of the cluster with the label (\S+) has room for the worker of "
    r"federated.silos\[(\d+)\](?: in addition to other silos)?: (.*)"
)
def no_home(claims: Claims, decision: Decision, label: str, at: str, _: str) -> None:
    homes = claims.request(decision).homes
    assert homes[int(at)] == (f"label:{label}",)
    nodes = {name: node.total for name, node in nodes_for(claims, decision).items()}
    bundle = claims.request(decision).bundle
    some = Request(int(at) + 2, bundle, homes=homes[: int(at) + 1])
    # The first worker needs no resources here.
    anywhere = {**nodes, "anywhere": dict(bundle)}
    claims.all_nodes["anywhere"] = type(next(iter(claims.snapshot.nodes)))(
        "anywhere", bundle, bundle
    )
    assert not claims.all_fit(some, anywhere)
    del claims.all_nodes["anywhere"]


@says(
    r"no node of the cluster has room for the aggregating worker in addition to the workers of "
    r"silos: it needs .* on a node without a silo's data"
)
def no_first(claims: Claims, decision: Decision) -> None:
    nodes = {name: node.total for name, node in nodes_for(claims, decision).items()}
    assert not claims.all_fit(claims.request(decision), nodes)
