"""Names of the ways in which ranks keep their copies of the model in step."""

from __future__ import annotations

from typing import assert_never

from dray.spec import AllReduce, AutoSync, Gossip, JobSpec, ParameterServer, Sync


def topology_of(spec: JobSpec) -> str | None:
    """Such as `gossip, ad_psgd, ring`. None for a script, a job of one rank and one whose ranks
    share a model or are clients: there the document's `sync` does not say it."""
    alone = spec.resources.num_workers == 1
    if alone or spec.recipe is None or spec.is_divided or spec.federated is not None:
        return None
    return name_of_sync(spec.sync)


def name_of_sync(sync: Sync | None) -> str:
    match sync:
        case Gossip():
            return f"gossip, {sync.mode}, {sync.graph}"
        case ParameterServer():
            return f"parameter servers, {sync.mode}"
        case AllReduce() if sync.every > 1:
            return f"local steps, every {sync.every}"
        case None | AllReduce() | AutoSync():
            return "all-reduce"
        case unknown:
            assert_never(unknown)
