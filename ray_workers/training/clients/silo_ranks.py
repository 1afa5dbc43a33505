"""The training loop of a silo, which runs rounds on the silo's own samples until the aggregator
exits."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import urlsplit

from dray.spec import JobSpec
from dray.train.kv.connection import ConnectionLost
from ray_workers.recipes import RECIPES
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training.clients.silo_client import SiloClient
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.progress import finish_if_marked
from ray_workers.training.core.workload import Workload
from ray_workers.training.elastic.rendezvous import MEETING_LIMIT_S, RendezvousHandler

AGGREGATOR = 0
"""The rank without silo data; silo n of the document is rank n + 1."""


def is_silo(task: RankTask, spec: JobSpec) -> bool:
    federated = spec.federated
    return federated is not None and federated.silos is not None and task.rank != AGGREGATOR


def run_silo(task: RankTask, spec: JobSpec, page: HeartbeatPage) -> None:
    """Run rounds until the end of the job. Raises ConnectionLost if the connection to the
    aggregator is lost before the job ends."""
    workload = _workload_of(task, spec)
    rendezvous = RendezvousHandler(task, page)
    store = rendezvous.meet_without_group()
    page.enter(RankPhase.JOINING, TimeCategory.STARTING)
    page.begin(rendezvous.assignment.generation, 0)
    try:
        limit = timedelta(seconds=MEETING_LIMIT_S)
        client = SiloClient.of(spec, task.rank - 1, workload, page, store, limit)
        try:
            given = client.next_round()
            # A silo's replacement starts with the current round.
            page.begin(rendezvous.assignment.generation, given.number - 1)
            while True:
                client.play(given)
                given = client.next_round()
        finally:
            client.close()
    except ConnectionLost:
        if not finish_if_marked(store, page, rendezvous.assignment.generation):
            raise


def _workload_of(task: RankTask, spec: JobSpec) -> Workload:
    """Build the model as `data` specifies it, with the silo's own samples."""
    assert spec.recipe is not None
    assert spec.federated is not None
    if task.silo_source is None:
        name = (spec.federated.silos or [])[task.rank - 1].name
        raise DataError(
            f"the silo {name} has no data: set its source in the job document, or set "
            "DRAY_SILO_SOURCE in the environment of Ray on the silo's node"
        )
    alone = {"source": task.silo_source, "sha256": None, "size_bytes": None}
    if urlsplit(task.silo_source).scheme == "sklearn":
        alone |= {"format": None}
    own = spec.data.model_copy(update=alone)
    return RECIPES[spec.recipe].build(spec, task.data_policy, own)
