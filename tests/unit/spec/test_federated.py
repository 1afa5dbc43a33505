"""Valid federated jobs, and refusals that name the fix."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from tests.unit.spec.job_documents import recipe, refusal

PRIVACY = {"noise_multiplier": 1.0, "epsilon": 8.0, "delta": 1e-3}
SGD = {"name": "sgd", "lr": 0.1}


def job(
    federated: dict[str, Any], kind: str = "image_classification", **fields: Any
) -> dict[str, Any]:
    sizes = {"clients": 100, "clients_per_round": 10, "rounds": 20}
    return recipe(kind, federated={**sizes, **federated}, **fields)


@pytest.mark.parametrize(
    "document",
    [
        job({}),
        job({"partition": {"by": "dirichlet", "alpha": 0.1}}, "tabular_classification"),
        job({}, "tabular_regression"),
        job({}, "language_model"),
        job({"algorithm": "scaffold"}, train={"optimizer": SGD}),
        job({"algorithm": "fedprox", "proximal_mu": 0.1, "stragglers": {"rate": 0.5}}),
        job({"algorithm": "fedyogi", "server": {"lr": 0.01, "tau": 0.01}}),
        job({"aggregator": {"name": "krum", "malicious": 3, "keep": 7}}),
        job({"privacy": PRIVACY}),
        job({"privacy": {**PRIVACY, "noise_multiplier": 0.9, "adaptive": {}}}),
        job({"secure_aggregation": {}, "dropout_rate": 0.3, "quorum": 8}),
        job({"secure_aggregation": {"threshold": 1}, "clients_per_round": 3}),
        job({"secure_aggregation": {"bits": 32}, "max_update_norm": 5}),
        job({"secure_aggregation": {}, "privacy": PRIVACY, "clients": 900}),
        job({}, resources={"num_workers": 10}, elastic={"min_workers": 1}),
        job({}, train={"early_stopping": {}, "ema": {}, "precision": "bf16"}),
    ],
)
def test_these_are_jobs(document: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(document)
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def outside(federated: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return job({"http": {}, "quorum": 5, **(federated or {})}, **fields)


def test_a_round_over_http_has_a_deadline_also_where_the_document_gives_none() -> None:
    for given, deadline_s in ({}, 600.0), ({"deadline_s": 60}, 60.0):
        federated = JobSpec.model_validate(outside(given)).federated
        assert federated is not None
        assert federated.deadline_s == deadline_s


NAMES = ("north", "south")
SILOS = [
    {"name": name, "node_labels": {"silo": name}, "source": f"s3://{name}/data.npz"}
    for name in NAMES
]


def silos(fields: dict[str, Any] | None = None, **federated: Any) -> dict[str, Any]:
    options = {"silos": SILOS, "rounds": 3, **federated}
    return recipe("image_classification", federated=options, **(fields or {}))


OF_ROUNDS = [
    (
        job({"clients_per_round": 101}),
        "/clients_per_round",
        "is 101, but must be at most federated.clients, which is 100",
    ),
    (job({"partition": {"by": "dirichlet", "alpha": 0}}), "/partition/alpha", "greater than 0"),
    (job({"partition": {"by": "classes", "alpha": 1.0}}), "/partition", "alpha is an option"),
    (job({"privacy": {**PRIVACY, "epsilon": 0}}), "/privacy/epsilon", "greater than 0"),
    (job({"privacy": {**PRIVACY, "delta": 0.01}}), "/privacy/delta", "must be below 0.01"),
    (
        job({"privacy": {**PRIVACY, "adaptive": {}}}),
        "/privacy/noise_multiplier",
        "must be below 1 with adaptive",
    ),
    (
        job({"privacy": PRIVACY, "algorithm": "scaffold"}),
        "/privacy",
        "can't be combined with scaffold",
    ),
    (job({"privacy": PRIVACY, "quorum": 2}), "/quorum", "must be unset with privacy"),
    (
        job({"privacy": PRIVACY, "aggregator": {"name": "median"}}),
        "/aggregator/name",
        "must be mean with privacy",
    ),
    (job({"quorum": 11}), "/quorum", "is 11, but must be at most federated.clients_per_round"),
    (
        job({"aggregator": {"name": "krum", "malicious": 4}}),
        "/aggregator/malicious",
        "krum needs at least 11 clients in each round",
    ),
    (
        job({"aggregator": {"name": "trimmed_mean", "trim": 0.05}}),
        "/aggregator/trim",
        "is 0.05, so trimmed_mean needs at least 20 clients in each round",
    ),
    (
        job({"aggregator": {"name": "krum", "malicious": 3, "keep": 8}}),
        "/aggregator/keep",
        "must be at most 7",
    ),
    (
        job({"aggregator": {"name": "median"}, "algorithm": "scaffold"}),
        "/aggregator/name",
        "must be mean with scaffold",
    ),
    (
        job({"secure_aggregation": {}, "clients_per_round": 2}),
        "/clients_per_round",
        "must be from 3 to 500 with secure_aggregation: fewer clients can't hide an update",
    ),
    (
        job({"secure_aggregation": {}, "clients": 501, "clients_per_round": 501}),
        "/clients_per_round",
        "must be from 3 to 500",
    ),
    (
        job({"secure_aggregation": {"bits": 32}}),
        "/max_update_norm",
        "must be 100 or less if secure_aggregation.bits is 32",
    ),
    (
        job({"secure_aggregation": {"threshold": 0.5}}),
        "/secure_aggregation/threshold",
        "greater than 0.5",
    ),
    (
        job({"secure_aggregation": {"threshold": 0.9}, "dropout_rate": 0.3}),
        "/secure_aggregation/threshold",
        "is 0.9, so 9 of 10 clients must remain until a round ends, but with dropout_rate and "
        "stragglers, only 7 remain on average",
    ),
    (
        job({"secure_aggregation": {}, "aggregator": {"name": "krum"}}),
        "/aggregator/name",
        "must be mean with secure_aggregation: krum needs each client's update",
    ),
    (
        job({"secure_aggregation": {}, "aggregator": {"name": "median"}}),
        "/aggregator/name",
        "median needs each client's update, but the server receives only",
    ),
    (
        job({"secure_aggregation": {}, "algorithm": "scaffold"}),
        "/algorithm",
        "control variates of each client, which reveal its updates",
    ),
    (
        job({"secure_aggregation": {}, "attack": {"rate": 0.1}}),
        "/attack",
        "must be unset with secure_aggregation",
    ),
    (job({"proximal_mu": 0.1}), "/proximal_mu", "is an option of fedprox, not of fedavg"),
    (job({"server": {"tau": 0.1}}), "/server/tau", "is an option of fedadam and fedyogi"),
    (
        job({"algorithm": "fedadam", "server": {"momentum": 0.9}}),
        "/server/momentum",
        "is an option of fedavg and fedprox",
    ),
]
"""Pointers below /federated."""
BESIDE_IT = [
    (
        job({}, resources={"num_workers": 11}),
        "/resources/num_workers",
        "additional workers would be idle",
    ),
    (job({}, sync={"every": 2}), "/sync", "clients send updates, not gradients"),
    (
        job({}, parallel={"shard": 2}, resources={"num_workers": 2}),
        "/parallel",
        "each rank has the complete model",
    ),
    (job({}, parallel="auto"), "/parallel", "each rank has the complete model"),
    (job({}, profile={}), "/profile", "must be unset with federated"),
    (job({}, data={"loader_workers": 1}), "/data/loader_workers", "must be 0"),
    (job({}, train={"epochs": 3}), "/train/epochs", "use federated.rounds"),
    (
        job({}, train={"global_batch_size": 64}),
        "/train/global_batch_size",
        "use federated.batch_size",
    ),
    (job({}, train={"precision": "fp16"}), "/train/precision", "must be fp32 or bf16"),
    (job({}, train={"recompute": "full"}), "/train/recompute", "be combined with federated"),
    (
        job({}, train={"optimizer": {"state_dtype": "bf16"}}),
        "/train/optimizer/state_dtype",
        "clients keep no optimizer state",
    ),
    (job({"algorithm": "scaffold"}), "/train/optimizer/name", "must be sgd with a momentum of 0"),
    (
        job({"partition": {"by": "dirichlet"}}, "language_model"),
        "/federated/partition/by",
        "must be iid for language_model",
    ),
]
OF_CLIENTS_OUTSIDE = [
    (
        outside({"quorum": 11}),
        "/federated/quorum",
        "must be at most federated.clients_per_round, which is 10",
    ),
    (
        outside({"clients": 5}),
        "/federated/clients_per_round",
        "must be at most federated.clients, which is 5",
    ),
    (outside({"deadline_s": 0}), "/federated/deadline_s", "1"),
    (outside({"dropout_rate": 0.1}), "/federated/dropout_rate", "clients are real"),
    (outside({"privacy": PRIVACY, "quorum": None}), "/federated/privacy", "unset with http"),
    (
        outside(checkpoint={"best": "val/worst_tenth_accuracy"}),
        "/checkpoint/best",
        "val/accuracy",
    ),
    (outside(resources={"num_workers": 2}), "/resources/num_workers", "must be 1"),
    (
        outside(model={"import": "net:Net"}),
        "/model/name",
        "clients don't run a job's code",
    ),
]
OF_SILOS = [
    (silos(silos=SILOS[:1]), "/federated/silos", "at least 2"),
    (
        silos(silos=[SILOS[0], SILOS[0]]),
        "/federated/silos/1/name",
        "is 'north', the name of another silo",
    ),
    (silos(clients=3), "/federated/clients", "must be 2, the number of silos"),
    (
        silos(quorum=3),
        "/federated/quorum",
        "must be at most federated.clients_per_round, which is 2",
    ),
    (silos(dropout_rate=0.1), "/federated/dropout_rate", "only applies to simulations"),
    (silos(partition={"by": "classes"}), "/federated/partition", "only applies to simulations"),
    (silos(privacy=PRIVACY), "/federated/privacy", "only applies to simulations"),
    (silos(metrics=["val/Age"]), "/federated/metrics/0", "match pattern"),
    (silos({"resources": {"num_workers": 2}}), "/resources/num_workers", "must be 3"),
    (silos({"elastic": {"min_workers": 1}}), "/elastic", "Set a quorum"),
    (silos({"environment": {"env": {"A": "b"}}}), "/environment", "must be unset"),
    (silos({"model": {"import": "net:Net"}}), "/model", "silos don't run users' code"),
    (silos({"array": {"size": 2}}), "/array", "must be unset"),
    (job({"metrics": ["val/loss"]}), "/federated/metrics", "only applies to silos"),
    (job({"deadline_s": 5}), "/federated/deadline_s", "only applies to silos and http"),
]


@pytest.mark.parametrize(
    ("document", "pointer", "message"),
    [
        *((document, f"/federated{pointer}", said) for document, pointer, said in OF_ROUNDS),
        *(*BESIDE_IT, *OF_CLIENTS_OUTSIDE, *OF_SILOS),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_fix(
    document: dict[str, Any], pointer: str, message: str
) -> None:
    found, said = refusal(document)
    assert found == pointer
    assert message in said


def test_a_script_trains_its_clients_itself() -> None:
    document = {**job({}), "script": {"entrypoint": "train.py"}}
    del document["recipe"]
    assert refusal(document) == (
        "/federated",
        "is only for recipes: a script must train its clients itself",
    )


def test_silos_say_how_many_clients_and_workers_there_are() -> None:
    spec = JobSpec.model_validate(silos(quorum=2, deadline_s=60))
    assert spec.federated is not None
    assert (spec.federated.clients, spec.federated.clients_per_round) == (2, 2)
    assert spec.resources.num_workers == 3
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
