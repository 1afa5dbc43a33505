"""The traits of groups that result from job documents."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from service.domain.attempts import group_traits
from tests.wire import traits

RECIPE = {"recipe": "image_classification"}
SCRIPT = {"script": {"entrypoint": "train.py"}}


def why_never(changes: dict[str, Any], *, workers: int = 2, gpus: bool = False) -> str | None:
    document = JobSpec.model_validate({"resources": {"num_workers": 2}} | changes)
    return group_traits.why_never(document, num_workers=workers, has_gpus=gpus)


@pytest.mark.parametrize(
    ("changes", "kind", "may"),
    [
        (RECIPE, {}, True),
        (RECIPE, {"has_gpus": True}, True),
        (SCRIPT, {}, True),
        (SCRIPT, {"num_workers": 1}, False),
        (SCRIPT, {"has_gpus": True}, True),
        ({"script": {"entrypoint": "train.py", "framework": "jax"}}, {}, False),
    ],
)
def test_recipes_and_scripts_of_one_program_may_recover(
    changes: dict[str, Any], kind: dict[str, Any], may: bool
) -> None:
    document = JobSpec.model_validate({"resources": {"num_workers": 2}} | changes)
    asked = {"num_workers": 2, "has_gpus": False} | kind
    assert group_traits.may_recover(document, **asked) is may


def test_a_group_that_holds_one_state_together_recovers() -> None:
    assert why_never(RECIPE) is None


def test_a_group_whose_ranks_keep_copies_of_their_own_recovers() -> None:
    assert why_never(RECIPE | {"sync": {"kind": "gossip"}}) is None


def test_a_group_that_keeps_its_state_in_memory_recovers_and_goes_back() -> None:
    divided = RECIPE | {"parallel": {"shard": 2}}
    assert why_never(divided) is None
    assert traits(divided | {"resources": {"num_workers": 2}}).goes_back
    assert not traits(divided | {"resources": {"num_workers": 4}}).goes_back
    assert not traits(RECIPE | {"resources": {"num_workers": 2}}).goes_back


@pytest.mark.parametrize("axis", ["shard", "tensor", "context", "pipeline"])
def test_a_divided_model_on_gpus_recovers_from_replicas_or_explicit_copies(axis: str) -> None:
    document = {"recipe": "language_model", "data": {"source": "file:///a.txt"}}
    document |= {"parallel": {axis: 2}, "resources": {"num_workers": 2, "gpus_per_worker": 1}}
    copied = document | {"checkpoint": {"in_memory": {"every_steps": 5}}}
    said = why_never(document, gpus=True)
    assert said is not None
    assert "checkpoint.in_memory to {every_steps: 50}" in said
    assert why_never(copied, gpus=True) is None
    resources = {"num_workers": 4, "gpus_per_worker": 1}
    assert why_never(document | {"resources": resources}, gpus=True, workers=4) is None


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        (SCRIPT, {}, "only if it calls dray.train.prepare"),
        (SCRIPT, {"workers": 1}, "only if it calls dray.train.prepare"),
        (RECIPE, {"workers": 1}, "no other rank holds its state"),
        (RECIPE | {"parallel": {"balance": "auto"}}, {"gpus": True}, "with parallel.balance"),
        (RECIPE | {"train": {"measure_noise": True}}, {"gpus": True}, "with train.measure_noise"),
        (
            RECIPE | {"sync": {"compression": {"name": "fp16"}}},
            {"gpus": True},
            "with sync.compression",
        ),
        (RECIPE | {"sync": {"kind": "gossip"}}, {"gpus": True}, "with this kind of sync"),
        (
            RECIPE | {"parallel": {"shard": 2}, "checkpoint": {"in_memory": "off"}},
            {},
            "only if other ranks keep copies of their parts",
        ),
        (RECIPE | {"sync": {"every": 4}}, {}, "each rank has its own state"),
    ],
)
def test_each_kind_that_never_recovers_has_its_reason(
    changes: dict[str, Any], kind: dict[str, Any], said: str
) -> None:
    why = why_never(changes, **kind)
    assert why is not None
    assert said in why


def test_the_last_ranks_are_parameter_servers() -> None:
    sync = {"kind": "parameter_server", "servers": 2}
    found = traits({**RECIPE, "resources": {"num_workers": 5}, "sync": sync})
    assert found.unawaited == found.state_holders == {3, 4}
    assert found.recovers_in_place
