"""Each command with a real server: its output and its exit code."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from dray.cli import exits
from dray.cli.app import run
from dray.cli.exits import Exit
from dray.errors import CODES, DrayError, IntegrityError, ServerUnreachable, SpecError
from dray.spec import JobSpec
from dray.views import Problem
from ray_workers.recipes import RECIPES
from ray_workers.shared.contracts import Cause
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import SOAK
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.cli.running import Cli, as_process
from tests.unit.service.helpers import hang, log, metrics, used

DIABETES = {"data": {"source": "sklearn://diabetes"}}
COMMANDS = (
    *("submit", "watch", "wait", "ls", "get", "cancel", "delete", "logs", "events", "explain"),
    *("metrics", "attempts", "checkpoints", "artifacts", "download", "export"),
    *("cluster", "preempt", "drill", "hangs", "plan"),
)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: image_classification\nname: digits\ntrain: {epochs: 1}\n")
    return str(path)


def meanwhile(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_submitted_job_is_named_and_its_settings_changed(cli: Cli, document: str) -> None:
    assert cli("submit", document).split()[1] == "QUEUED:"
    job = cli.json("submit", document, "--set", "train.epochs=3", "--set", "priority=70")
    assert (job["spec"]["train"]["epochs"], job["priority"]) == (3, 70)


def test_submitting_twice_with_one_key_makes_one_job(cli: Cli, document: str) -> None:
    ids = {cli.json("submit", document, "--idempotency-key", "cli")["id"] for _ in range(2)}
    assert len(ids) == 1


def test_a_plan_shows_each_mesh_and_what_is_chosen(cli: Cli, document: str) -> None:
    workers = ("--set", "resources.num_workers=2")
    lines = cli("plan", document, *workers, "--memory", "1000000000").splitlines()
    assert lines[0].split()[:2] == ["MESH", "PARAMETERS"]
    assert {line[:7].rstrip() for line in lines[1:3]} == {"data 2", "shard 2"}
    for said in ("chosen: ", "sync: auto would choose "):
        assert any(line.startswith(said) for line in lines)
    assert "given in the request" in cli("plan", document, "--memory", "1000000000")
    assert cli.json("plan", document, *workers)["memory_bytes_per_rank"] is None
    assert "would make the job fit" in cli("plan", document, *workers, "--memory", "1000000")


def test_a_wrong_document_is_a_sentence_with_field_and_hint(cli: Cli, document: str) -> None:
    assert cli("submit", document, "--set", "train.epocs=3", exits=2) == ""
    assert "there is no field 'epocs' (at /train/epocs)" in cli.err
    assert "hint: did you mean 'epochs'?" in cli.err


def test_a_file_that_is_no_document_is_a_sentence(cli: Cli, tmp_path: Path) -> None:
    cli("submit", str(tmp_path / "none.yaml"), exits=2)
    assert "can't read" in cli.err
    (tmp_path / "bad.yaml").write_text("a: 1\na: 2\n")
    cli("submit", str(tmp_path / "bad.yaml"), exits=2)
    assert "line 2" in cli.err


def test_jobs_are_listed_newest_first_and_filtered(cli: Cli, server: LiveServer) -> None:
    server.queue("q")
    made = [server.submit(labels={"test": "ls"}, queue="q") for _ in range(3)]
    lines = cli("ls", "--label", "test=ls").splitlines()
    assert lines[0].split()[:3] == ["ID", "NAME", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == made[::-1]
    listed = cli.json(
        "ls", "--label", "test=ls", "--state", "queued", "--queue", "q", "--limit", "2"
    )
    assert [job["id"] for job in listed] == made[:0:-1]
    assert cli.json("ls", "--label", "test=ls", "--state", "FAILED") == []
    made.append(server.submit(name="Ls-of-Parts", labels={"test": "ls"}))
    (brief,) = cli.json("ls", "--label", "test=ls", "--text", "ls-of", "--brief")
    assert (brief["id"], brief["spec"]) == (made[-1], {})
    assert listed[0]["spec"]["recipe"] == "image_classification"


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "--state", "DONE"),
        ("ls", "--label", "x"),
        ("ls", "--limit", "0"),
        ("ls", "--brief"),
        ("metrics", "job", "--until-step", "5", "--follow"),
        ("get",),
        ("nothing",),
        ("submit", "x.yaml", "--set", "novalue"),
        ("logs", "job", "--rank", "-1"),
        ("drill", "job"),
        ("drill", "job", "--kill", "--stall"),
        ("drill", "job", "--kill", "--rank", "-1"),
        ("preempt", "job", "--grace", "-1"),
    ],
)
def test_wrong_usage_exits_with_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments, exits=2) == ""
    assert cli.err


def test_one_job_is_shown(cli: Cli, finished: str) -> None:
    shown = cli("get", finished)
    assert "SUCCEEDED" in shown
    assert "10/10" in shown
    assert "val/accuracy 0.9" in shown
    assert cli.json("get", finished, "--wait")["id"] == finished


@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c not in ("submit", "ls", "cluster", "drill", "plan")],
)
def test_a_job_that_is_not_there_exits_with_3(cli: Cli, command: str) -> None:
    assert cli(command, "job-none", exits=3) == ""
    assert "there is no job job-none" in cli.err


def test_a_cancelled_job_can_be_deleted_and_a_live_one_not(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit()
    cli("delete", job_id, "--yes", exits=3)
    assert "hint: cancel the job first" in cli.err
    assert "CANCELLED" in cli("cancel", job_id)
    assert cli.json("cancel", job_id)["state"] == "CANCELLED"
    cli("delete", job_id, exits=2)
    assert "Delete 1 job" in cli.err
    assert "confirm with --yes" in cli.err
    assert cli.json("delete", job_id, "--yes") == {"deleted": job_id}


def test_a_finished_job_can_not_be_cancelled(cli: Cli, finished: str) -> None:
    cli("cancel", finished, exits=3)
    assert "already succeeded" in cli.err


def test_logs_name_the_rank_unless_one_was_asked_for(cli: Cli, finished: str) -> None:
    assert set(cli("logs", finished).splitlines()) == {
        "[1:0] zero says [bold]this[/bold]",
        "[1:1] one says that",
    }
    assert cli("logs", finished, "--rank", "1").splitlines() == ["one says that"]
    assert (
        cli("logs", finished, "--contains", "SAYS THAT", "--rank", "1").strip() == "one says that"
    )
    assert cli("logs", finished, "--contains", "nowhere") == ""
    lines = [json.loads(line) for line in cli("logs", finished, "-f", "--json").splitlines()]
    assert {line["rank"] for line in lines} == {0, 1}


def test_events_read_as_what_happened(cli: Cli, finished: str) -> None:
    lines = cli("events", finished).splitlines()
    assert "- -> QUEUED" in lines[0]
    assert "-> SUCCEEDED" in lines[-1]
    followed = [json.loads(line) for line in cli("events", finished, "-f", "--json").splitlines()]
    assert [event["seq"] for event in followed] == list(range(1, len(lines) + 1))


def test_the_rest_of_a_job_is_shown(
    cli: Cli, server: LiveServer, finished: str, tmp_path: Path
) -> None:
    assert "train/loss" in cli("metrics", finished)
    assert set(cli.json("metrics", finished, "--key", "train/loss")["series"]) == {"train/loss"}
    assert cli("attempts", finished).splitlines()[1].split()[0] == "1"
    assert cli("checkpoints", finished).splitlines()[1].split()[0] == "10"
    assert cli("artifacts", finished).splitlines()[1].split()[-1] == "model.bin"
    for command in ("attempts", "checkpoints", "artifacts"):
        assert len(cli.json(command, finished)) == 1
    assert "SUCCEEDED" in cli("explain", finished)
    assert cli.json("explain", finished)["state"] == "SUCCEEDED"
    target = tmp_path / "out" / "model.bin"
    assert cli("download", finished, str(tmp_path / "out")).split() == [str(target)]
    assert target.read_bytes() == b"weights"
    assert cli.json("download", finished, str(tmp_path / "out"))["paths"] == [str(target)]
    cli("download", finished, str(tmp_path), "--artifact", "none", exits=3)
    without = server.submit()
    assert cli("download", without, str(tmp_path)) == ""
    assert f"{without} has no artifacts" in cli.err


@SOAK
def test_a_model_is_exported_from_a_folder_and_from_a_job(
    cli: Cli, server: LiveServer, finished: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    spec = JobSpec.model_validate({"recipe": "tabular_regression"} | DIABETES)
    work = RECIPES["tabular_regression"].build(spec, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), 0)
    work.write_results(work.model, {}, 1, folder)
    job_id = server.submit()
    server.train(
        job_id, *(server.artifact(job_id, f.name, f.read_bytes()) for f in folder.iterdir())
    )
    server.succeed(job_id)
    rows = torch.rand(3, 10)
    for model in (str(folder), job_id):
        path = tmp_path / f"{Path(model).name}.pt2"
        assert cli("export", model, str(path)).split() == [str(path)]
        outputs = torch.export.load(path).module()(rows)
        expected = work.model.eval()(rows)  # in float64; the file uses float32
        torch.testing.assert_close(outputs, expected.float())
    cli("export", str(folder), str(tmp_path / "model.pt"), exits=2)
    cli("export", finished, str(tmp_path / "model.pt2"), exits=2)


def test_the_cluster_is_shown(cli: Cli) -> None:
    assert "not connected" in cli("cluster")
    assert cli.json("cluster")["nodes"] == []


def test_watching_ends_well_with_the_job(cli: Cli, server: LiveServer, document: str) -> None:
    key = "test=watch-well"
    thread = meanwhile(lambda: finish(server, key, Cause.SUCCEEDED))
    shown = cli("submit", document, "--watch", "--set", "labels={test: watch-well}")
    thread.join()
    assert "val/accuracy 0.75" in shown
    assert "SUCCEEDED after" in shown
    assert "dray download" in shown


def test_watching_a_job_that_fails_exits_with_1(
    cli: Cli, server: LiveServer, document: str
) -> None:
    thread = meanwhile(lambda: finish(server, "test=watch-badly", Cause.BAD_DATA))
    shown = cli("submit", document, "-w", "--set", "labels={test: watch-badly}", exits=1)
    thread.join()
    assert "FAILED after" in shown
    assert "dray logs" in shown


def test_watching_as_json_prints_the_finished_job_alone(cli: Cli, finished: str) -> None:
    assert cli.json("watch", finished)["state"] == "SUCCEEDED"


def finish(server: LiveServer, label: str, cause: Cause) -> None:
    """Run the job with this label as the loops would, once a command is watching it."""
    from dray import Client

    key, _, value = label.partition("=")
    with Client(server.url) as client:
        wait_until(lambda: list(client.jobs(label={key: value})), "the job")
        job_id = next(client.jobs(label={key: value})).id
    wait_until(lambda: server.num_waiting(job_id), "the watcher")
    server.train(job_id, metrics(4, {"train/loss": 1.0, "val/accuracy": 0.75}, total_steps=4))
    server.hands.end(job_id, 1, cause, "the end")


def test_a_server_that_is_not_there_exits_with_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--url", "http://127.0.0.1:9", "cluster"]) == Exit.NO_SERVER
    err = capsys.readouterr().err
    assert "no dray server is reachable" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_does_and_takes_json(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert len(out.splitlines()) > 5


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for code in Exit:
        assert f"{code.value} " in out


def problem(status: int) -> Problem:
    return Problem(type="x", title="x", status=status, detail="x", code="x")


def test_every_error_has_an_exit_code_of_the_documented_ones() -> None:
    found = {code: exits.exit_code(kind(problem(400))) for code, kind in CODES.items()}
    assert found["invalid_document"] == found["unsatisfiable"] == Exit.USAGE
    assert found["job_not_found"] == found["job_live"] == found["unauthorized"] == Exit.REFUSED
    assert found["internal_error"] == found["unavailable"] == Exit.NO_SERVER
    others: list[tuple[DrayError, Exit]] = [
        (SpecError("x"), Exit.USAGE),
        (IntegrityError("x"), Exit.REFUSED),
        (ServerUnreachable("x"), Exit.NO_SERVER),
    ]
    for error, code in others:
        assert exits.exit_code(error) == code


def test_the_module_is_the_command() -> None:
    run = as_process("--version")
    assert (run.returncode, run.stdout.split()[0]) == (0, "dray")
    assert as_process("ls", "--limit", "0").returncode == Exit.USAGE


def test_the_cluster_says_how_full_the_storage_is() -> None:
    from dray.cli.commands.cluster import _storage
    from dray.views import StorageState

    assert _storage(StorageState()) is None
    quota = StorageState(used_bytes=1 << 30, quota_bytes=10 << 30)
    assert _storage(quota) == "1.0 GiB of 10.0 GiB used"
    floor = StorageState(free_bytes=5 << 30, min_free_bytes=1 << 30)
    assert _storage(floor) == "5.0 GiB free; 1.0 GiB must stay free"
    assert _storage(quota.model_copy(update={"problem": "it is full"})) == "it is full"


def test_the_cluster_says_since_when_nodes_are_asked_for() -> None:
    from dray.cli.commands.cluster import DOUBTFUL, _autoscaling
    from dray.views import AutoscalingState

    at = datetime(2026, 1, 1, 14, 3, 7, tzinfo=UTC)
    nothing = AutoscalingState(max_nodes=8)
    assert _autoscaling(nothing, at) == "no nodes requested; the maximum is 8"
    two = AutoscalingState(max_nodes=8, num_nodes=2, asked_at=at)
    told = "2 more nodes requested from Ray since 2026-01-01 14:03:07 UTC"
    assert _autoscaling(two, at) == told
    late = _autoscaling(two.model_copy(update={"num_nodes": 1}), at + DOUBTFUL)
    assert late.startswith("1 more node requested from Ray since ")
    assert late.endswith("; check whether an autoscaler is running (`ray status`)")


def test_a_fault_of_the_server_names_the_request_in_its_log() -> None:
    fault = problem(500).model_copy(update={"request_id": "r-17"})
    assert "request r-17" in exits.sentence(CODES["internal_error"](fault))
    assert "r-17" not in exits.sentence(CODES["job_not_found"](fault))


def test_the_list_has_what_one_asks_about_a_job(cli: Cli, server: LiveServer) -> None:
    best = {"checkpoint": {"best": "val/accuracy"}, "resources": {"num_workers": 2}}
    server.queue("night")
    job_id = server.submit(name="columns", queue="night", priority=70, **best)
    server.train(job_id, metrics(4, {"train/loss": 1.0, "val/accuracy": 0.75}, total_steps=9))
    head, line = cli("ls", "--name", "columns").splitlines()
    assert head.split() == [
        *("ID", "NAME", "STATE", "PLACE", "STEP", "METRIC", "WORKERS", "PRIORITY", "QUEUE"),
        *("ATTEMPT", "TAGS", "CREATED", "REASON"),
    ]
    assert line.startswith(f"{job_id}  columns  RUNNING  -      4/9   val/accuracy 0.75")
    assert "70        night" in line
    assert line.endswith(cli.json("get", job_id)["reason"]["message"])
    assert "train/loss 1  " in cli("ls", "--name", "columns", "--metric", "train/loss")


def test_a_series_that_is_not_there_is_an_error_that_lists_those_that_are(
    cli: Cli, finished: str, server: LiveServer
) -> None:
    for more in ((), ("--plot",), ("--csv",), ("--json",), ("-f",)):
        cli("metrics", finished, "-k", "train/los", *more, exits=2)
        assert "no series 'train/los' yet; existing series: train/loss, val/accuracy" in cli.err
    assert cli("metrics", server.submit(), "-k", "train/loss", "--plot")


def test_a_part_of_the_series_is_shown_by_its_steps(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, *(metrics(step, {"train/loss": 9.0 - step}) for step in range(1, 8)))
    part = cli("metrics", job_id, "--csv", "--after-step", "2", "--until-step", "4")
    assert part.split() == ["key,step,value", "train/loss,3,6.0", "train/loss,4,5.0"]


def test_system_metrics_are_shown_by_rank_and_node(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit(resources={"num_workers": 2})
    server.train(job_id)
    assert cli("metrics", job_id, "--system") == "no samples yet\n"
    of_rank = {"system/cpu": 1.5, "system/memory_rss": 3 * 2.0**30, "system/disk_read": 2048.0}
    of_gpus = {f"system/gpu/{n}/utilization": 0.25 * (n + 1) for n in (0, 1)}
    of_node = {"system/node/cpu": 7.25, "system/node/network_sent": 0.0}
    at = server.hands.now
    first, second = used(at, of_rank | of_node | of_gpus), used(at, of_rank, ranks=(1,))
    columns = [*first.body["columns"], *second.body["columns"]]
    server.hands.report(job_id, 1, [replace(first, body={**first.body, "columns": columns})])
    shown = cli("metrics", job_id, "--system").splitlines()
    assert shown[0].split()[:4] == ["RANK", "CPU", "MEMORY", "READ"]
    cells = [line.split() for line in shown]
    assert cells[1][:6] == ["0", "1.5", "3.0", "GiB", "2.0", "KiB/s"]
    assert "25%" in cells[1]
    assert "50%" in cells[2], "the second GPU, on a line of its own"
    assert cells[3][0] == "1"
    assert shown[5].startswith("NODE OF RANK  CPU")
    assert cells[6][:2] == ["0", "7.25"]
    assert len(shown) == 7
    assert len(cli("metrics", job_id, "--system", "--rank", "1").splitlines()) == 2
    ranks = cli.json("metrics", job_id, "--system")["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]


def test_system_metrics_are_drawn_and_printed_over_time(cli: Cli, server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id)
    server.hands.advance(30)
    for ago_s in (20, 10):
        values = {"system/cpu": ago_s / 10, "system/node/cpu": 3.0}
        server.hands.report(job_id, 1, [used(server.hands.now, values, clock_s=-ago_s)])
    only = ("-k", "system/cpu")
    drawn = cli("metrics", job_id, "--system", "--plot", *only)
    assert "system/cpu  last 1" in drawn
    assert "second 0" in drawn
    rows = cli("metrics", job_id, "--system", "--csv", *only).splitlines()
    assert rows[0] == "key,time,value"
    assert [row.rpartition(",")[2] for row in rows[1:]] == ["2.0", "1.0"]
    cli("metrics", job_id, "--system", "--csv", "-k", "system/gpu", exits=2)
    assert "existing series: system/cpu, system/node/cpu" in cli.err
    for wrong in (("-f",), (job_id, "other")):
        cli("metrics", job_id, "--system", *wrong, exits=2)


def test_series_of_several_jobs_are_beside_each_other(
    cli: Cli, finished: str, server: LiveServer
) -> None:
    other = server.submit(name="other")
    server.train(other, metrics(5, {"train/loss": 0.7}, total_steps=10))
    lines = cli("metrics", finished, "other", "-k", "train/loss").splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["train/loss", "job", "1", "10"],
        ["train/loss", "other", "1", "5"],
    ]
    shown = cli("metrics", finished, other, "--plot")
    assert "a train/loss  job  last 0.5\nb train/loss  other  last 0.7\n" in shown
    assert shown.count("step 5") == 1
    assert set(cli.json("metrics", finished, other)) == {finished, other}
    rows = cli("metrics", finished, other, "--csv").splitlines()
    assert rows[0] == "job,key,step,value"
    assert "other,train/loss,5,0.7" in rows
    cli("metrics", finished, other, "-f", exits=2)


def test_the_help_lists_first_what_is_needed_first(capsys: pytest.CaptureFixture[str]) -> None:
    from dray.cli.base import ORDER, app

    assert {command.name or command.callback.__name__ for command in app.registered_commands} <= {
        *ORDER
    }
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("  submit ") < out.index("  cancel ") < out.index("  drill ")


def test_ranks_of_a_script_with_roles_are_shown_with_them(cli: Cli, server: LiveServer) -> None:
    roles = {"worker": {}, "ps": {"entrypoint": "/serve.py"}}
    script = {"entrypoint": "/train.py", "roles": roles}
    job_id = server.submit(recipe=None, script=script)
    server.hands.claim(job_id, workers=2)
    at = server.hands.now
    samples = used(at, {"system/cpu": 1.5}, ranks=(1,))
    server.hands.report(job_id, 1, [log(0, "asks"), log(0, "serves", rank=1), hang(1), samples])
    assert "\nranks      0 worker, 1 ps\n" in cli("get", job_id)
    assert cli("metrics", job_id, "--system").splitlines()[1].startswith("1 (ps 0)  1.5")
    assert "\n  rank 1 (ps 0), the culprit; " in cli("hangs", job_id)
    server.succeed(job_id)
    assert set(cli("logs", job_id).splitlines()) == {
        "[1:0 (worker 0)] asks",
        "[1:1 (ps 0)] serves",
    }
