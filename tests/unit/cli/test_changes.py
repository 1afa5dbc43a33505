"""`dray change`: its output, its JSON, and its errors."""

from __future__ import annotations

import json

import pytest

from dray.client import Client
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


def test_jobs_are_changed_in_place(cli: Cli, server: LiveServer) -> None:
    one, two = server.submit(name="change-one"), server.submit(name="change-two")
    lines = cli(
        *("change", "change-one", two, "--set", "resources.num_workers=2"),
        *("--set", "max_runtime_s=2h"),
    ).splitlines()
    assert [line.split()[:4] for line in lines] == [
        [job, "QUEUED", "in", "default,"] for job in (one, two)
    ]
    changed = json.loads(cli("change", one, "--set", "max_runtime_s=null", "--json"))
    assert (changed["spec"]["resources"]["num_workers"], changed["spec"]["max_runtime_s"]) == (
        2,
        None,
    )
    assert (
        "changed: changed resources.num_workers from 1 to 2; max_runtime_s from unset to 7200, "
        "by anonymous (document_changed)"
    ) in cli("events", one)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("train.epochs=2",), "can't be changed after the submission; only name, labels"),
        (("resources.num_workers=0",), "(at /document/resources/num_workers)"),
        (("resources",), "write it as field=value"),
        (("names=x",), "(at /document/names)"),
    ],
)
def test_a_mistake_changes_nothing(
    cli: Cli, server: LiveServer, settings: tuple[str, ...], said: str
) -> None:
    job_id = server.submit()
    cli("change", job_id, *(word for each in settings for word in ("--set", each)), exits=2)
    assert said in cli.err
    assert len(cli("events", job_id).splitlines()) == 1


def test_a_running_job_is_not_changed(cli: Cli, server: LiveServer) -> None:
    job_id = server.trains()
    cli("change", job_id, "--set", "resources.num_workers=2", exits=3)
    assert "only a waiting job can be changed" in cli.err


def test_the_sdk_changes_a_job(server: LiveServer) -> None:
    job_id = server.submit()
    with Client(server.url) as client:
        job = client.change(job_id, {"labels": {"team": "vision"}, "after": None})
    assert (job.labels, job.spec["after"]) == ({"team": "vision"}, [])
