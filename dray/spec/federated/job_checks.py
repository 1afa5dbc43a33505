"""Validation across parts: the options that can be combined with `federated`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dray.spec.federated.document import Federated
from dray.spec.fields import refuse_set, wrong
from dray.spec.program.model import Imported
from dray.spec.program.recipes import RECIPES
from dray.spec.training.train import Train

if TYPE_CHECKING:
    from dray.spec import JobSpec

HTTP_RECIPES = ("image_classification", "tabular_classification", "tabular_regression")
"""Recipes that support clients outside the cluster."""
INSTEAD: dict[str, str] = {
    "epochs": "federated.rounds and local_epochs",
    "max_steps": "federated.rounds",
    "global_batch_size": "federated.batch_size",
    "batch_range": "federated.batch_size",
    "micro_batch_size": "federated.batch_size",
    "eval_every_epochs": "federated.evaluate_every",
}
"""For each option of `train` that federated jobs don't use, the option to use instead."""


def with_num_workers(document: Any) -> Any:
    """Return the job document. If `resources.num_workers` is unset, set it to the number of silos
    plus one."""
    if not isinstance(document, Mapping):
        return document
    federated, resources = document.get("federated"), document.get("resources", {})
    silos = federated.get("silos") if isinstance(federated, Mapping) else None
    if not isinstance(silos, list | tuple) or not isinstance(resources, Mapping):
        return document
    return {**document, "resources": {"num_workers": len(silos) + 1, **resources}}


def check(document: JobSpec) -> None:
    """Raise a validation error for the first option that conflicts with `federated`, or has no
    effect with it."""
    federated = document.federated
    if federated is None:
        return
    if document.script is not None:
        raise wrong("/federated", "is only for recipes: a script must train its clients itself")
    _check_group(document)
    if federated.silos is not None:
        _check_silos(document, len(federated.silos))
    elif federated.http is not None:
        _check_outside(document)
    elif (num_workers := document.resources.num_workers) > federated.clients_per_round:
        raise wrong(
            "/resources/num_workers",
            f"is {num_workers}, but must be at most federated.clients_per_round, which is "
            f"{federated.clients_per_round}: additional workers would be idle",
        )
    _check_train(document.train, federated)
    assert document.recipe is not None
    if federated.partition.by != "iid" and not RECIPES[document.recipe].classifies:
        raise wrong(
            "/federated/partition/by",
            f"must be iid for {document.recipe}, whose samples have no classes",
        )


def _check_group(document: JobSpec) -> None:
    for name, reason in {
        "sync": "with federated: clients send updates, not gradients",
        "parallel": "with federated, where each rank has the complete model",
        "profile": "with federated in this version",
    }.items():
        refuse_set(document, "", (name,), f"must be unset {reason}")
    if document.data.loader_workers:
        raise wrong("/data/loader_workers", "must be 0 with federated in this version")


def _check_silos(document: JobSpec, num_silos: int) -> None:
    """Reject options that silos don't support, and options that would run a user's code in a
    silo."""
    resources, chosen = document.resources, "with federated.silos"
    if resources.num_workers != num_silos + 1:
        raise wrong(
            "/resources/num_workers",
            f"must be {num_silos + 1} or unset: one worker for each silo, and one that aggregates "
            "the updates",
        )
    if resources.gpus_per_worker:
        raise wrong(
            "/resources/gpus_per_worker",
            f"must be 0 {chosen} in this version: a group on GPUs can't recover in place",
        )
    message = f"must be unset {chosen}, because the silos determine the nodes"
    refuse_set(resources, "/resources", ("required_topology",), message)
    if isinstance(document.model, Imported):
        raise wrong(
            "/model", f"must be one of dray's own models {chosen}: silos don't run users' code"
        )
    for names, reason in {
        ("elastic",): ": each silo has its own node. Set a quorum instead",
        ("environment",): ": silos don't accept users' code or variables",
        ("array", "sweep"): ", in this version",
    }.items():
        refuse_set(document, "", names, f"must be unset {chosen}{reason}")


def _check_outside(document: JobSpec) -> None:
    """Reject options that clients outside the cluster don't support, or that would run a user's
    code on a client."""
    if (num_workers := document.resources.num_workers) != 1:
        raise wrong(
            "/resources/num_workers",
            f"is {num_workers}, but must be 1 with federated.http: only one rank is needed to "
            "aggregate the updates",
        )
    message = "must be unset with federated.http: only one rank is needed to aggregate the updates"
    refuse_set(document, "", ("elastic",), message)
    if document.recipe not in HTTP_RECIPES:
        known = " and ".join(HTTP_RECIPES)
        message = f"is {document.recipe}, but federated.http supports only {known} in this version"
        raise wrong("/recipe", message)
    if isinstance(document.model, Imported):
        raise wrong(
            "/model/name",
            "must be one of dray's own models with federated.http: clients don't run a job's code",
        )


def _check_train(train: Train, federated: Federated) -> None:
    for name in INSTEAD:
        message = f"must be unset with federated: use {INSTEAD[name]} instead"
        refuse_set(train, "/train", (name,), message)
    unsupported = ("lr_scaling", "recompute", "compile", "measure_noise")
    refuse_set(train, "/train", unsupported, "can't be combined with federated in this version")
    if train.precision == "fp16":
        raise wrong("/train/precision", "must be fp32 or bf16 with federated")
    message = "must be unset with federated: clients keep no optimizer state between rounds"
    refuse_set(train.optimizer, "/train/optimizer", ("state_dtype", "offload"), message)
    plain = train.optimizer.name == "sgd" and not train.optimizer.momentum
    if federated.algorithm == "scaffold" and not plain:
        raise wrong(
            "/train/optimizer/name",
            "must be sgd with a momentum of 0, because the corrections of scaffold assume "
            "plain sgd",
        )
