"""Experiments on the command line."""

from __future__ import annotations

import io

import pytest

from dray import Client, errors, views
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


@pytest.fixture(scope="module")
def jobs(server: LiveServer) -> list[str]:
    labels = {"experiment": "cli-kept"}
    return [server.submit(name=f"kept-{number}", labels=labels) for number in range(3)]


def test_notes_are_edited(cli: Cli, jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = cli("experiment", "edit", "cli-kept", "--notes", "# First\n**bold**")
    assert "# First\n**bold**\n" in shown
    assert "changed by anonymous at " in shown
    revision = cli.json("experiment", "show", "cli-kept")["revision"]
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    arguments = ("experiment", "edit", "cli-kept", "--notes", "-", "--revision")
    assert "from stdin" in cli(*arguments, str(revision))
    cli(*arguments, str(revision), exits=3)
    assert f"is now at revision {revision + 1}" in cli.err
    assert jobs


def test_jobs_are_pinned_and_unpinned(cli: Cli, jobs: list[str]) -> None:
    assert cli.json("experiment", "pin", "cli-kept", "kept-1", "kept-0")["pinned"] == jobs[1::-1]
    again = cli.json("experiment", "pin", "cli-kept", "kept-2", "kept-1")["pinned"]
    assert again == [jobs[1], jobs[0], jobs[2]]
    assert f"pinned: {jobs[1]}, {jobs[2]}\n" in cli("experiment", "unpin", "cli-kept", "kept-0")


def test_a_pin_is_tried_again_after_another_change(
    cli: Cli, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = Client.change_experiment
    others = iter(["other"])

    def late(self: Client, name: str, **fields: object) -> views.ExperimentSummary:
        for notes in others:
            changed(self, name, notes=notes)
        return changed(self, name, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "change_experiment", late)
    found = cli.json("experiment", "pin", "cli-kept", "kept-0")
    assert found["notes"] == "other"
    assert jobs[0] in found["pinned"]


def test_the_sdk_raises_for_an_outdated_revision(server: LiveServer, jobs: list[str]) -> None:
    with Client(server.url) as client:
        found = client.change_experiment("cli-kept", layout={"charts": ["a"]}, pinned=[])
        assert (found.layout, found.pinned) == ({"charts": ["a"]}, [])
        with pytest.raises(errors.ExperimentChanged):
            client.change_experiment("cli-kept", notes="x", revision=found.revision - 1)
    assert jobs
