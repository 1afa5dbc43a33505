"""Withheld nodes over HTTP: who may release them, and odd names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import pytest

from service.db.session import utc_now
from service.lifecycle.withholding import withhold
from tests.unit.api.matrix import check, held
from tests.unit.api.serving import LiveServer

ODD_NAMES = ["knöten-ä", "a b", "%", "..", "\u202e", "x" * 255, "gpu-7.lan ", "GPU-7.LAN"]


def withhold_node(site: LiveServer, name: str = "gpu-7.lan") -> None:
    site.hands.database.write_sync(
        lambda s: withhold(s, name, "a fault", code="xid_79", now=utc_now(), mark=str(utc_now()))
    )


def test_only_an_admin_releases_a_node(
    guarded: LiveServer, root: httpx.Client, user: httpx.Client
) -> None:
    withhold_node(guarded)
    before = held(guarded)
    for name in ("gpu-7.lan", "other", *ODD_NAMES):
        path = f"/v1/cluster/{quote(name, safe='')}/release"
        if name != "..":
            check(guarded, user.post(path), 403, "forbidden")
    assert held(guarded) == before
    assert root.post("/v1/cluster/gpu-7.lan/release").json()["hostname"] == "gpu-7.lan"
    problem = check(guarded, root.post("/v1/cluster/gpu-7.lan/release"), 404, "nothing_withheld")
    assert "dray cluster" in problem["hint"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_without_a_fault_is_not_found(
    guarded: LiveServer, root: httpx.Client, name: str
) -> None:
    withhold_node(guarded)
    before = held(guarded)
    response = root.post(f"/v1/cluster/{quote(name, safe='')}/release")
    code = "not_found" if name == ".." else "nothing_withheld"
    check(guarded, response, 404, code)
    assert held(guarded) == before


def test_a_name_that_is_too_long_is_refused(guarded: LiveServer, root: httpx.Client) -> None:
    check(guarded, root.post(f"/v1/cluster/{'x' * 256}/release"), 422, "invalid_parameter")


def test_of_two_releases_at_once_only_one_succeeds(guarded: LiveServer, root: httpx.Client) -> None:
    for _ in range(5):
        withhold_node(guarded)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: root.post("/v1/cluster/gpu-7.lan/release"), range(4)))
        assert sorted(one.status_code for one in answers) == [200, 404, 404, 404]
