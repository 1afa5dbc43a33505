"""Comparisons, experiments and notes on the command line, in addition to the examples on their
page."""

from __future__ import annotations

import pytest

from dray.cli.commands.tracking import as_path
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli, OnTerminal
from tests.unit.service.helpers import metrics


def trained(server: LiveServer, loss: float, **fields: object) -> str:
    job_id = server.submit(**fields)
    server.train(job_id, metrics(1, {"val/loss": 2.0}))
    server.succeed(job_id, metrics(2, {"val/loss": loss}))
    return job_id


@pytest.fixture(scope="module")
def jobs(server: LiveServer) -> list[str]:
    return [
        trained(server, 1.0 / n, name=f"side-{n}", train={"epochs": n}, labels={"experiment": "s"})
        for n in (1, 2, 4)
    ]


def test_jobs_that_do_not_fit_beside_each_other_follow_below(
    server: LiveServer, jobs: list[str]
) -> None:
    wide = OnTerminal("--url", server.url, "compare", *jobs, columns=100)
    narrow = OnTerminal("--url", server.url, "compare", *jobs, columns=60)
    assert (wide.end(), narrow.end()) == (0, 0)
    rows = [[line.split() for line in one.shown.splitlines()] for one in (wide, narrow)]
    assert ["train.epochs", "1", "2", "4"] in rows[0]
    assert ["train.epochs", "1", "2"] in rows[1]
    assert ["train.epochs", "4"] in rows[1]
    assert max(map(len, narrow.shown.splitlines())) <= 60 + len("\x1b[1m\x1b[0m")


def test_one_metric_is_compared_with_its_extremes(cli: Cli, jobs: list[str]) -> None:
    lines = [
        line.split()
        for line in cli("compare", *jobs, "--metric", "val/loss", "--extremes").splitlines()
    ]
    assert lines[-3:] == [
        ["val/loss", "1", "0.5", "0.25"],
        ["minimum", *["1", "at", "2", "0.5", "at", "2", "0.25", "at", "2"]],
        ["maximum", *["2", "at", "1", "2", "at", "1", "2", "at", "1"]],
    ]
    assert cli.json("compare", *jobs)["differences"] == [
        {"pointer": "/train/epochs", "values": [1, 2, 4]}
    ]


def test_what_keeping_in_step_cost_is_a_section(cli: Cli, server: LiveServer) -> None:
    jobs = []
    for sync in ({"kind": "all_reduce"}, {"kind": "gossip"}):
        jobs.append(server.submit(resources={"num_workers": 2}, sync=sync))
        server.train(jobs[-1], metrics(1, {"sync/sent_bytes": 2048.0}))
        server.succeed(jobs[-1])
    lines = [line.split("  ") for line in cli("compare", *jobs).splitlines()]
    rows = {line[1] or line[0]: [cell.strip() for cell in line if cell.strip()] for line in lines}
    sent = next(row for row in rows.values() if row[0] == "sent per step")
    assert sent[1:] == ["2.0 KiB", "2.0 KiB"]
    title = next(row for row in rows.values() if row[0] == "cost of sync")
    assert title[1:] == ["all-reduce", "gossip, d_psgd, ring"]


def test_what_can_not_be_done_is_said(cli: Cli, jobs: list[str]) -> None:
    cli("compare", jobs[0], exits=2)
    assert "is a single job" in cli.err
    cli("experiment", "show", "none", exits=3)
    assert "no job belongs to the experiment 'none'" in cli.err
    cli("experiment", "baseline", "s", exits=2)
    assert "specify a job, or use --none" in cli.err
    cli("ls", "--where", "val/loss <", exits=2)
    assert "column 11: expected a number" in cli.err
    cli("annotate", jobs[0], "--tag", "a b", exits=2)
    assert "add_tags" in cli.err
    for colour in ("red", "-1", "1.5"):
        cli("annotate", jobs[0], f"--colour={colour}", exits=2)
        assert "must be a number from 0 to 19, or auto" in cli.err
    cli("annotate", jobs[0], "--colour", "20", exits=2)
    assert "/colour" in cli.err


def test_tags_are_listed_and_notes_read(
    cli: Cli, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("annotate", jobs[1], "--tag", "good", "--tag", "old")
    assert "tags: good\n" in cli("annotate", jobs[1], "--untag", "old")
    assert "tags       good\n" in cli("get", jobs[1])
    assert "colour: 7\n" in cli("annotate", jobs[1], "--colour", "7")
    assert cli.json("get", jobs[1])["colour"] == 7
    assert "colour" not in cli("annotate", jobs[1], "--colour", "auto")
    assert [job["id"] for job in cli.json("ls", "--where", "'good' in tags")] == [jobs[1]]
    assert cli.json("experiment", "baseline", "s", "side-4")["baseline"] == jobs[2]
    assert "side-4" in cli("compare", "side-1")
    assert "baseline: none" in cli("experiment", "baseline", "s", "--none")


def test_a_field_is_named_as_a_search_names_it() -> None:
    assert as_path("/train/optimizer/betas/1") == "train.optimizer.betas[1]"
    assert as_path("/environment/variables/A~1B c~0") == 'environment.variables["A/B c~"]'
