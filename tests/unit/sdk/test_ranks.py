"""The names of ranks with roles."""

from __future__ import annotations

from typing import Any

import pytest

from dray.ranks import kind_of, ranks_by_role, role_names, with_role

SCRIPT = {"script": {"roles": {"chief": {}, "worker": {"num_workers": 2}, "ps": {}}}}
SERVERS = {"sync": {"kind": "parameter_server", "servers": 1}, "resources": {"num_workers": 3}}
SILOS = {"federated": {"silos": [{"name": "a"}, {"name": "b"}]}, "resources": {"num_workers": 3}}


@pytest.mark.parametrize(
    ("document", "names", "summary"),
    [
        (SCRIPT, ["chief 0", "worker 0", "worker 1", "ps 0"], "0 chief, 1-2 worker, 3 ps"),
        (SERVERS, ["", "", "server 0"], "0-1 worker, 2 server"),
        (SILOS, ["aggregator", "silo a", "silo b"], "0 aggregator, 1-2 silo"),
        ({"script": {"roles": {}}}, [], ""),
        ({"recipe": "tabular", "script": None, "sync": None, "federated": None}, [], ""),
    ],
)
def test_ranks_are_named_by_their_roles(
    document: dict[str, Any], names: list[str], summary: str
) -> None:
    assert role_names(document) == names
    assert ranks_by_role(names) == summary


def test_a_rank_without_a_role_is_its_number_and_a_worker() -> None:
    names = role_names(SCRIPT)
    assert [with_role(rank, names) for rank in (3, 4)] == ["3 (ps 0)", "4"]
    assert [kind_of(rank, names) for rank in (3, 4)] == ["ps", "worker"]
    assert kind_of(0, role_names(SERVERS)) == "worker"
