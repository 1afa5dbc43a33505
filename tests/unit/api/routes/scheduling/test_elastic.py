"""Elastic jobs and whether the cluster is large enough for them."""

from __future__ import annotations

import httpx
import pytest

from tests.unit.api.matrix import GOOD, check, post
from tests.unit.api.serving import LiveServer


@pytest.mark.usefixtures("unchanged")
def test_of_an_elastic_job_the_least_number_must_fit_the_cluster(
    site: LiveServer, ann: httpx.Client
) -> None:
    document = {**GOOD, "resources": {"num_workers": 9}, "elastic": {"min_workers": 5}}
    problem = check(site, post(ann, document), 422, "unsatisfiable")
    assert problem["pointer"] == "/elastic/min_workers"
    assert "needs at least 5 workers" in problem["detail"]


def test_an_elastic_job_may_want_more_than_the_cluster_has(ann: httpx.Client) -> None:
    document = {**GOOD, "resources": {"num_workers": 9}, "elastic": {"min_workers": 4}}
    assert post(ann, document).status_code == 201
