"""Jobs that continue from another job's complete checkpoint."""

from __future__ import annotations

import re
from typing import Any

import pytest

from service.domain.init_from.continuing import difference
from tests.unit.service.helpers import spec

SOURCE: dict[str, Any] = {
    "model": {"name": "mlp", "width": 24},
    "train": {"global_batch_size": 200, "optimizer": {"name": "sgd", "momentum": 0.9}},
    "resources": {"num_workers": 2},
}


def after(**changes: Any) -> dict[str, Any]:
    """Return the source's document with these changes to `train` and to other fields."""
    train = {**SOURCE["train"], **changes.pop("train", {})}
    return {**SOURCE, **changes, "train": train}


@pytest.mark.parametrize(
    "document",
    [
        after(),
        after(name="another", resources={"num_workers": 4}, parallel={"shard": 2}),
        after(train={"epochs": 9, "schedule": {"name": "cosine"}, "precision": "bf16"}),
        after(train={"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.5}}),
        after(train={"optimizer": {"name": "sgd", "momentum": 0.9, "state_dtype": "bf16"}}),
        after(train={"micro_batch_size": 10, "max_grad_norm": 1.0, "max_steps": 21}),
        after(sync={"compression": {"name": "powersgd"}}),
        after(elastic={"min_workers": 1}),
    ],
    ids=["same", "mesh", "length", "rate", "state", "pieces", "powersgd", "elastic"],
)
def test_how_it_is_divided_and_how_long_it_trains_may_differ(document: dict[str, Any]) -> None:
    assert difference(spec(**SOURCE), 20, spec(**document)) is None


def test_topk_may_come_and_go_where_there_is_no_momentum() -> None:
    plain = after(train={"optimizer": {"name": "adamw"}})
    compressed = {**plain, "sync": {"compression": {"name": "topk"}}}
    assert difference(spec(**plain), 20, spec(**compressed)) is None


def test_local_steps_go_on_with_the_same_outer_optimizer_alone() -> None:
    outer, other = (after(sync={"every": 4, "outer": {"lr": lr}}) for lr in (0.7, 0.3))
    assert difference(spec(**outer), 20, spec(**outer)) is None
    for changed in (other, after(sync={"every": 4})):
        found = difference(spec(**outer), 20, spec(**changed))
        assert found is not None
        assert found.pointer == "/sync/outer"


PRIVACY = {"noise_multiplier": 1.0, "epsilon": 8.0, "delta": 1e-3}


def test_a_federated_job_that_has_spent_its_epsilon_goes_on_with_more() -> None:
    def job(**privacy: Any) -> dict[str, Any]:
        options = {"clients": 20, "clients_per_round": 5, "rounds": 30}
        return {"federated": {**options, "privacy": {**PRIVACY, **privacy}}}

    assert difference(spec(**job()), 20, spec(**job(epsilon=16.0))) is None
    found = difference(spec(**job()), 20, spec(**job(delta=1e-4)))
    assert found is not None
    assert found.pointer == "/federated/privacy/delta"


def test_a_federated_job_goes_on_with_the_same_clients_alone() -> None:
    def job(**federated: Any) -> dict[str, Any]:
        options = {"clients": 20, "clients_per_round": 5, "rounds": 30, **federated}
        return {"train": {"optimizer": {"name": "sgd"}}, "federated": options}

    source = spec(**job())
    longer = spec(**job(rounds=50, evaluate_every=5))
    assert difference(source, 20, longer) is None
    for document, pointer in (
        (job(clients=21), "/federated/clients"),
        (job(algorithm="scaffold"), "/federated/algorithm"),
        (job(partition={"by": "dirichlet"}), "/federated/partition"),
        (job(rounds=20), "/federated/rounds"),
        ({**job(), "federated": None}, "/federated/algorithm"),
        (job(privacy=PRIVACY), "/federated/privacy/noise_multiplier"),
    ):
        found = difference(source, 20, spec(**document))
        assert found is not None
        assert found.pointer == pointer


def test_copies_with_push_weights_are_for_sgp_alone() -> None:
    sgp, pairs, asynchronous = (
        after(sync={"kind": "gossip", "mode": mode}, resources={"num_workers": 2})
        for mode in ("sgp", "d_psgd", "ad_psgd")
    )
    found = difference(spec(**sgp), 20, spec(**pairs))
    assert found is not None
    assert found.pointer == "/sync/mode"
    assert difference(spec(**pairs), 20, spec(**asynchronous)) is None


@pytest.mark.parametrize(
    ("document", "pointer", "says"),
    [
        (
            after(recipe="tabular_classification", data={"source": "sklearn://iris"}),
            "/recipe",
            "is tabular_classification, but was image_classification",
        ),
        (
            after(model={"name": "mlp", "width": 25}),
            "/model",
            "is {name: mlp, width: 25, .*}, but was {name: mlp, width: 24",
        ),
        (after(data={"source": "file:///x"}), "/data/source", "is of files, but was sklearn://d"),
        (after(data={"validation_fraction": 0.5}), "/data/validation_fraction", "different order"),
        (after(train={"global_batch_size": 100}), "/train/global_batch_size", "is 100, but was 2"),
        (after(train={"seed": 1}), "/train/seed", "is 1, but was 0: .* different order"),
        (after(train={"optimizer": {"name": "adamw"}}), "/train/optimizer/name", "is adamw, but w"),
        (
            after(train={"optimizer": {"name": "sgd", "momentum": 0.5}}),
            "/train/optimizer/momentum",
            "is 0.5, but was 0.9",
        ),
        (after(train={"precision": "fp16"}), "/train/precision", "a loss scale"),
        (after(train={"ema": {"decay": 0.9}}), "/train/ema/decay", "is 0.9, but was unset"),
        (after(sync={"compression": {"name": "topk"}}), "/sync/compression/name", "is topk, but"),
        (after(sync={"every": 4}), "/sync/every", "is above 1, but was 1"),
        (
            after(sync={"kind": "gossip"}, resources={"num_workers": 2}),
            "/sync/kind",
            "is gossip, but was all_reduce",
        ),
        (after(train={"max_steps": 20}), "/train/max_steps", "is 20, but 20 steps have already"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("/") else None,
)
def test_what_training_stands_on_must_be_the_same(
    document: dict[str, Any], pointer: str, says: str
) -> None:
    found = difference(spec(**SOURCE), 20, spec(**document))
    assert found is not None
    assert found.pointer == pointer
    assert re.search(says, found.why), found.why
