"""Spares in the job document."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import MAX_WORKERS, JobSpec
from tests.unit.spec.job_documents import images, refusal


def test_a_job_with_spares_has_a_fixed_number_of_ranks_unless_it_has_min_workers() -> None:
    spec = JobSpec.model_validate(images(resources={"num_workers": 3}, elastic={"spares": 2}))
    assert (spec.num_slots, spec.num_spares, spec.changes_size) == (5, 2, False)
    elastic = {"spares": 1, "min_workers": 2}
    spec = JobSpec.model_validate(images(resources={"num_workers": 3}, elastic=elastic))
    assert (spec.num_slots, spec.changes_size) == (4, True)
    spec = JobSpec.model_validate(images(resources={"num_workers": 3}))
    assert (spec.num_slots, spec.num_spares, spec.changes_size) == (3, 0, False)


GPUS = {"num_workers": 2, "gpus_per_worker": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"resources": GPUS},
        {"parallel": {"data": 2}},
        {"parallel": {"shard": 2}},
        {"parallel": "auto"},
    ],
    ids=["GPUs", "replicas", "a divided model", "a planned division"],
)
def test_groups_of_a_fixed_size_can_have_spares(fields: dict[str, Any]) -> None:
    usual = {"resources": {"num_workers": 2}, "elastic": {"spares": 1}}
    assert JobSpec.model_validate(images(**{**usual, **fields})).num_spares == 1


@pytest.mark.parametrize(
    ("fields", "pointer", "message"),
    [
        ({"elastic": {}}, "/elastic", "must set min_workers, spares or both"),
        ({"elastic": {"spares": 0}}, "/elastic", "must set min_workers, spares or both"),
        ({"elastic": {"spares": -1}}, "/elastic/spares", ""),
        ({"elastic": {"spares": 1.5}}, "/elastic/spares", ""),
        ({"elastic": {"spares": True}}, "/elastic/spares", ""),
        ({"elastic": {"spares": float("nan")}}, "/elastic/spares", ""),
        ({"elastic": {"spares": MAX_WORKERS + 1}}, "/elastic/spares", ""),
        (
            {"elastic": {"spares": MAX_WORKERS}},
            "/elastic/spares",
            f"must be at most {MAX_WORKERS - 2}",
        ),
        (
            {
                "elastic": {"spares": 1, "min_workers": 3},
                "parallel": {"shard": 2},
                "resources": {"num_workers": 4},
            },
            "/elastic/min_workers",
            "is 3, but must be a multiple of 2, the number of workers that hold one replica of the "
            "model: set it to 2 or 4",
        ),
        (
            {
                "elastic": {"spares": 1, "exact": True},
                "parallel": {"shard": 2},
                "resources": {"num_workers": 4},
            },
            "/elastic/exact",
            "requires parallel.shard to be 1",
        ),
        (
            {
                "elastic": {"spares": 1, "min_workers": 1},
                "sync": {"compression": {"name": "powersgd"}},
                "resources": GPUS,
            },
            "/elastic",
            "requires gpus_per_worker 0: a group on GPUs with sync.compression does not recover",
        ),
        (
            {
                "elastic": {"spares": 1},
                "sync": {"kind": "parameter_server"},
                "resources": {"num_workers": 3},
            },
            "/elastic",
            "must be unset",
        ),
    ],
    ids=str,
)
def test_spares_that_can_not_be_are_refused(
    fields: dict[str, Any], pointer: str, message: str
) -> None:
    at, said = refusal(images(**{"resources": {"num_workers": 2}, **fields}))
    assert (at, message in said) == (pointer, True), said
