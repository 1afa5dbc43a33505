"""Federated silos at the submit: what the stored document lacks, and where their workers go."""

from __future__ import annotations

from dataclasses import replace

from dray.spec import JobSpec
from service.config.node_types import label_resources
from service.domain.scheduling import policy


def without_sources(spec: JobSpec) -> tuple[JobSpec, list[str | None] | None]:
    """The document without the URLs of its silos' data, which only their own ranks are told, and
    these; None of a job without silos."""
    federated = spec.federated
    if federated is None or federated.silos is None:
        return spec, None
    silos = [silo.model_copy(update={"source": None}) for silo in federated.silos]
    bare = federated.model_copy(update={"silos": silos})
    return spec.model_copy(update={"federated": bare}), [one.source for one in federated.silos]


def at_home(request: policy.Request, spec: JobSpec) -> policy.Request:
    """The request, with the worker of each silo on a node that has its labels."""
    silos = None if spec.federated is None else spec.federated.silos
    homes = tuple(tuple(sorted(label_resources(silo.node_labels))) for silo in silos or ())
    return replace(request, homes=homes)
