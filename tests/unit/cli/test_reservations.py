"""Commands for reservations: their output, and their errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest

from dray import Client
from dray.errors import ReservationNotFound
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


@pytest.fixture(autouse=True)
def _none_is_left(server: LiveServer) -> Iterator[None]:
    yield
    with Client(server.url) as client:
        for one in client.reservations(ended=True):
            client.delete_reservation(one.name)


def test_a_reservation_is_created_listed_changed_shown_and_deleted(cli: Cli) -> None:
    shown = cli(
        *("reservation", "create", "class", "--begin", "2030-01-01T08:00:00Z"),
        *("--end", "2030-01-01T12:00:00Z", "--user", "ann", "--user", "bob", "--queue", "night"),
        *("--node", "node-x", "--flex", "--comment", "lesson [2]"),
    )
    assert shown.splitlines() == [
        "name       class",
        "state      planned",
        "begins     2030-01-01 08:00:00Z",
        "ends       2030-01-01 12:00:00Z",
        "for        ann, bob, queue night",
        "nodes      node-x",
        "includes   -",
        "at begin   other jobs: preempt",
        "at end     its jobs: continue",
        "flex       yes",
        "comment    lesson [2]",
        "waiting    0",
        "running    0",
        "warning    the cluster has no node node-x; the reservation includes this node if it joins "
        "the cluster",
    ]
    assert cli("reservation", "show", "class") == shown
    head, line = cli("reservation", "ls").splitlines()
    assert head.split() == ["NAME", "STATE", "BEGINS", "ENDS", "NODES", "FOR", "COMMENT"]
    assert line.split()[:2] == ["class", "planned"]
    changed = cli.json(
        "reservation", "change", "class", "--nodes", "2", "--no-flex", "--user", "ann"
    )
    assert (changed["num_nodes"], changed["nodes"], changed["flex"]) == (2, [], False)
    assert (changed["users"], changed["queues"]) == (["ann"], ["night"])
    longer = cli.json("reservation", "change", "class", "--duration", "6h")
    assert longer["ends_at"] == "2030-01-01T14:00:00Z"
    assert json.loads(cli("reservation", "rm", "class", "--json")) == {"deleted": "class"}
    cli("reservation", "show", "class", exits=3)
    assert "there is no reservation 'class'" in cli.err
    assert cli.json("reservation", "ls") == []


def test_a_maintenance_window_and_a_job_that_names_a_reservation(
    cli: Cli, server: LiveServer
) -> None:
    shown = cli(
        "reservation",
        "create",
        "disks",
        "--maintenance",
        "--all-nodes",
        *("--begin", "now+1hour", "--duration", "2h", "--at-begin", "wait"),
    )
    assert "for        maintenance\nnodes      all nodes\n" in shown
    assert "at end" not in shown
    cli(
        "reservation",
        "create",
        "own",
        "--user",
        "default",
        "--label",
        "rack=r1",
        *("--begin", "now+5hours", "--duration", "2h"),
    )
    job_id = cli.json("submit", "examples/digits.yaml", "--reservation", "own")["id"]
    assert "reservation own" in " ".join(cli("get", job_id).split())
    assert cli.json("reservation", "show", "own")["num_waiting"] == 1
    cli("cancel", job_id)
    cli("submit", "examples/digits.yaml", "--reservation", "nobodys", exits=2)
    assert "there is no reservation 'nobodys' for this job" in cli.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "1", "--duration", "1h"), "users, queues and projects"),
        (("--user", "ann", "--duration", "1h"), "specify exactly one of nodes, node_labels"),
        (("--user", "ann", "--nodes", "1"), "exactly one of end_at and duration_s"),
        (("--user", "ann", "--nodes", "1", "--end", "2020-01-01"), "not later than the begin"),
        (("--user", "ann", "--nodes", "1", "--end", "some day"), "write a time such as"),
        (("--user", "ann", "--label", "rack", "--duration", "1h"), "KEY=VALUE"),
        (("--user", "ann", "--nodes", "1", "--duration", "long"), "duration"),
        (("--user", "ann", "--nodes", "1", "--duration", "1h", "--at-end", "x"), "at_end"),
    ],
)
def test_wrong_options(cli: Cli, options: tuple[str, ...], message: str) -> None:
    cli("reservation", "create", "wrong", *options, exits=2)
    assert message in " ".join(cli.err.split())
    assert cli.json("reservation", "ls") == []


def test_overlaps_are_refused(cli: Cli) -> None:
    create = ("reservation", "create")
    when = ("--user", "ann", "--node", "n1", "--begin", "2030-01-01", "--duration", "1d")
    cli(*create, "one", *when)
    cli(*create, "two", *when, exits=3)
    assert "the reservation 'one' from" in cli.err
    cli(*create, "one", *when, exits=3)
    assert "there is already a reservation 'one'" in cli.err


def test_users_who_are_not_admins(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other users' reservations look like reservations that do not exist."""
    from tests.unit.api.serving import serving

    home = tmp_path_factory.mktemp("tokens")
    tokens = home / "tokens"
    lines = (
        f"{name}:{hashlib.sha256(f'{name}-token-0123456789'.encode()).hexdigest()}{more}\n"
        for name, more in (("root", ":admin"), ("ann", ""))
    )
    tokens.write_text("".join(lines))
    tokens.chmod(0o600)
    with serving(home, tokens_file=tokens) as server:
        root = Client(server.url, token="root-token-0123456789")
        ann = Client(server.url, token="ann-token-0123456789")
        when = {"begin_at": "2030-01-01T00:00:00Z", "duration_s": "1d"}
        root.create_reservation("bobs", users=["bob"], nodes=["n1"], **when)
        root.create_reservation("anns", users=["ann"], nodes=["n2"], **when)
        assert [one.name for one in ann.reservations()] == ["anns"]
        with pytest.raises(ReservationNotFound):
            ann.reservation("bobs")
        for refused in (
            lambda: ann.create_reservation("mine", users=["ann"], nodes=["n3"], **when),
            lambda: ann.change_reservation("anns", users=["bob"]),
            lambda: ann.delete_reservation("anns"),
        ):
            with pytest.raises(Exception, match="only an admin may"):
                refused()
        assert len(root.reservations()) == 2
