"""Derives the traits of worker groups from job documents, for every strategy. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.ranks import role_names
from dray.spec import JobSpec
from dray.spec.checks.recovery import why_not_on_gpus
from dray.spec.training.sync import Gossip, ParameterServer
from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.mesh_shape import MeshShape
from ray_workers.shared.peers.peer_ports import HAVE_PEERS
from service.domain.documents import CheckedDocument

AGGREGATOR = 0
"""The rank that aggregates the updates of silos."""


def traits_of(job: CheckedDocument, *, has_gpus: bool) -> GroupTraits:
    """Return the traits of the groups that train this job."""
    document, script, sync = job.spec, job.spec.script, job.spec.sync
    num_ranks = document.resources.num_workers
    # Use the maximum number of ranks, because an elastic group that begins with one rank can grow
    # later.
    recovers_in_place = may_recover(document, num_workers=num_ranks, has_gpus=has_gpus)
    servers = frozenset(range(document.num_ranks_that_train, num_ranks))
    has_replicas = isinstance(sync, ParameterServer) and sync.shards_kept_by == "replica"
    federated = document.federated
    has_silos = federated is not None and federated.silos is not None
    holders = frozenset({AGGREGATOR}) if has_silos else servers
    return GroupTraits(
        is_script=script is not None,
        recovers_in_place=recovers_in_place,
        goes_on_without_lost=goes_on_without_lost(job.document),
        goes_back=recovers_in_place and document.keeps_state_in_memory,
        at_own_pace=isinstance(sync, Gossip) and sync.mode == "ad_psgd",
        keeps_numbers=bool(servers),
        is_tied_to_nodes=has_silos,
        quorum=1 + (federated.quorum or 1) if federated and has_silos else None,
        state_holders=holders,
        replicas=_next_of_each(sorted(servers)) if has_replicas else {},
        unawaited=servers if script is None else script.serving_ranks,
        restarted_alone=frozenset() if script is None else script.standalone_ranks,
        role_names=tuple(role_names(job.document)),
        has_peer_ports=script is not None and script.framework in HAVE_PEERS,
        most_ranks=num_ranks if document.num_spares else None,
        hang_limit_s=None if script is None else script.hang_limit_s,
        mesh=MeshShape.of(document.parallel),
    )


def _next_of_each(ranks: list[int]) -> Mapping[int, int]:
    return dict(zip(ranks, [*ranks[1:], *ranks[:1]], strict=True))


def goes_on_without_lost(document: Mapping[str, Any]) -> bool:
    """Return `GroupTraits.goes_on_without_lost` for a document stored by any release."""
    return (document.get("sync") or {}).get("kind") == "gossip"


def why_never(document: JobSpec, *, num_workers: int, has_gpus: bool) -> str | None:
    """Return the reason why such a job never recovers in place; None if it can recover in place.

    num_workers: the number of workers that the job has, or may have later.

    Jobs with parameter servers recover on any device, because their workers don't perform optimizer
    steps.
    """
    if document.script is not None and document.is_divided:
        return "scripts whose ranks divide a model among themselves do not recover in place"
    if document.script is not None:
        return "a script recovers in place only if it calls dray.train.prepare()"
    if num_workers == 1:
        return "a single rank does not recover in place, because no other rank holds its state"
    has_servers = document.num_ranks_that_train < document.resources.num_workers
    if document.num_replicas == 1 and not document.keeps_state_in_memory:
        rule = "{every_steps: 50}" if has_gpus else "auto"
        return (
            "ranks that divide a single model among themselves recover in place only if other "
            f"ranks keep copies of their parts: set checkpoint.in_memory to {rule}, or "
            "parallel.data to more than 1"
        )
    if document.takes_local_steps:
        return (
            "ranks that take local steps do not recover in place, because each rank has its own "
            "state"
        )
    return why_not_on_gpus(document) if has_gpus and not has_servers else None


def why_no_spares(document: JobSpec, *, has_gpus: bool) -> str | None:
    """Return the reason why the job can't use spares; None if it can."""
    num_workers, script = document.resources.num_workers, document.script
    if script is None:
        if goes_on_without_lost(document.model_dump(mode="json", include={"sync"})):
            return (
                "the other ranks continue at once without a lost rank, and add its replacement "
                "when the replacement is ready"
            )
        return why_never(document, num_workers=num_workers, has_gpus=has_gpus)
    if may_recover(document, num_workers=num_workers, has_gpus=has_gpus):
        return None
    if document.is_divided:
        return why_never(document, num_workers=num_workers, has_gpus=has_gpus)
    if num_workers == 1:
        return "a single rank does not recover in place, because no other rank holds its state"
    return "only scripts with torch that call dray.train.prepare() recover in place"


def may_recover(document: JobSpec, *, num_workers: int, has_gpus: bool) -> bool:
    """Whether such a job might recover in place. A script recovers in place only if its processes
    call `train.prepare`, which is not known before they run (see `are_prepared`)."""
    script = document.script
    if script is None:
        return why_never(document, num_workers=num_workers, has_gpus=has_gpus) is None
    is_one_program = script.framework == "torch" and not script.roles
    # If the model is divided, no rank has the complete state.
    return is_one_program and not document.is_divided and num_workers > 1
