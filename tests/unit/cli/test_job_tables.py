"""Sorted tables of jobs, groups, exports and saved views on the command line and in the SDK."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import dray
from dray import Client, errors
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import metrics

ACCURACIES = {"low": 0.5, "high": 0.9, "nan": float("nan"), "none": None}
COLUMNS = "name,lr,best:val/accuracy,duration"
OF_TEST = ("--label", "test=tables")


@pytest.fixture(scope="module")
def jobs(server: LiveServer) -> dict[str, str]:
    """Jobs that end with these accuracies, except for one without; ids by name."""
    ids = {}
    for number, (name, accuracy) in enumerate(ACCURACIES.items()):
        labels = {"test": "tables", "experiment": "odd" if number % 2 else "even"}
        lr = 0.1 * (number + 1)
        ids[name] = server.submit(name=name, labels=labels, train={"optimizer": {"lr": lr}})
        if accuracy is not None:
            server.train(ids[name], metrics(1, {"val/accuracy": accuracy}))
            server.succeed(ids[name])
    return ids


def names(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines()[1:]]


def test_jobs_are_sorted_by_a_metric_with_missing_values_last(
    cli: Cli, jobs: dict[str, str]
) -> None:
    assert names(cli("ls", *OF_TEST, "--sort", "val/accuracy")) == ["low", "high", "nan", "none"]
    shown = cli("ls", *OF_TEST, "--sort", "-val/accuracy", "--columns", COLUMNS)
    head = shown.splitlines()[0].split()
    assert head == ["ID", "NAME", "lr", "best:val/accuracy", "DURATION"]
    rows = [line.split() for line in shown.splitlines()[1:]]
    assert [row[1:4] for row in rows] == [
        *(["high", "0.2", "0.9"], ["low", "0.1", "0.5"]),
        *(["nan", "0.3", "NaN"], ["none", "0.4", "-"]),
    ]
    assert [row[0] for row in rows] == [jobs[row[1]] for row in rows]
    one = cli("ls", *OF_TEST, "--sort", "lr", "-n", "1")
    assert names(one) == ["low"]
    assert cli.err == "only 1 jobs are listed; use --all to list all jobs\n"
    (first, *_) = cli.json("ls", *OF_TEST, "--sort", "-lr", "--columns", "lr")
    assert (first["name"], first["values"]) == ("none", {"lr": 0.4})
    assert cli("ls", "--label", "test=nothing", "--sort", "lr").splitlines()[1:] == []


def test_groups_have_their_best_job(cli: Cli, jobs: dict[str, str]) -> None:
    found = cli.json("ls", *OF_TEST, "--group", "experiment", "--sort", "-lr")
    assert [(one["key"], one["num_jobs"], one["best_job"]) for one in found] == [
        ("odd", 2, jobs["none"]),
        ("even", 2, jobs["nan"]),
    ]
    shown = cli("ls", *OF_TEST, "--group", "label:test")
    assert shown.splitlines()[1].split()[:3] == ["tables", "-", "4"]
    assert len(cli("ls", *OF_TEST, "--group", "experiment", "-n", "1").splitlines()) == 2
    assert "only 1 groups are listed" in cli.err
    assert "is not a number" in _refused(cli, "--group", "user", "--sort", "name")
    assert "pattern" in _refused(cli, "--group", "nothing")


def _refused(cli: Cli, *options: str, exits: int = 2) -> str:
    cli("ls", *options, exits=exits)
    return cli.err


def test_a_table_is_exported(cli: Cli, jobs: dict[str, str], tmp_path: Path) -> None:
    text = cli("ls", *OF_TEST, "--sort", "lr", "--columns", f"{COLUMNS},tags", "--csv", "-n", "1")
    head, *rows = csv.reader(io.StringIO(text))
    assert head == ["job", "name", "lr", "best:val/accuracy", "duration", "tags", "values_as_of"]
    assert [row[:4] for row in rows] == [
        [jobs["low"], "low", "0.1", "0.5"],
        [jobs["high"], "high", "0.2", "0.9"],
        [jobs["nan"], "nan", "0.30000000000000004", "NaN"],
        [jobs["none"], "none", "0.4", ""],
    ]
    quoted = 'name, metrics["a,b"]'
    empty = cli("ls", "--label", "test=nothing", "--columns", quoted, "--csv")
    assert list(csv.reader(io.StringIO(empty))) == [
        ["job", "name", 'metrics["a,b"]', "values_as_of"]
    ]
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "jobs.parquet"
    columns = f"{COLUMNS},created_at,train,labels.team"
    cli("ls", *OF_TEST, "--sort", "lr", "--columns", columns, "--parquet", str(path))
    table = parquet.read_table(path)
    assert table.column_names == ["job", *columns.split(","), "values_as_of"]
    assert table["name"].to_pylist() == list(ACCURACIES)
    assert table["best:val/accuracy"].to_pylist()[:2] == [0.5, 0.9]
    assert table["best:val/accuracy"].null_count == 1
    assert str(table.schema.field("created_at").type).startswith("timestamp")


def test_integers_of_more_than_64_bits_are_exported(
    cli: Cli, server: LiveServer, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    seeds = ["99999999999999999999", "7"]
    for seed in seeds:
        script = {"entrypoint": "train.py", "args": [], "parameters": {"seed": int(seed)}}
        server.submit(name="large", recipe=None, script=script)
    path = tmp_path / "jobs.parquet"
    cli("ls", "--name", "large", "--sort", "-seed", "--columns", "seed", "--parquet", str(path))
    assert parquet.read_table(path)["seed"].to_pylist() == seeds


def test_a_parameter_named_like_the_column_of_ids_loses_nothing(
    cli: Cli, server: LiveServer, tmp_path: Path
) -> None:
    parameters = {"job": 3, "job_id": "b", "name": 5, "id": 7}
    script = {"entrypoint": "train.py", "args": [], "parameters": parameters}
    job_id = server.submit(name="same-names", recipe=None, script=script)
    columns = "job,name,job_id,parameters.name,parameters.id"
    options = ("ls", "--name", "same-names", "--columns", columns)
    values: list[object] = [job_id, 3, "same-names", "b", 5, 7]
    expected = ["job_id_id", *columns.split(","), "values_as_of"]
    head, row = csv.reader(io.StringIO(cli(*options, "--csv")))
    assert (head, row) == (expected, [*map(str, values), ""])
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "jobs.parquet"
    cli(*options, "--parquet", str(path))
    table = parquet.read_table(path)
    assert table.column_names == expected
    assert list(table.to_pylist()[0].values()) == [*values, None]


def test_an_export_that_is_refused_writes_no_file(
    cli: Cli, jobs: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "jobs.parquet"
    path.write_text("kept")
    cli("ls", *OF_TEST, "--columns", "best:", "--parquet", str(path), exits=2)
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]
    missing = str(tmp_path / "none" / "jobs.parquet")
    cli("ls", *OF_TEST, "--columns", "lr", "--parquet", missing, exits=2)
    assert "can't write" in cli.err
    cli("ls", "--csv", exits=2)
    assert "requires --columns" in cli.err
    cli("ls", "--columns", "lr", "--csv", "--json", exits=2)
    assert "can't be combined" in cli.err


def test_values_that_lag_are_marked(cli: Cli, server: LiveServer, tmp_path: Path) -> None:
    job_id = server.submit(name="live", labels={"test": "lag"})
    server.train(job_id, metrics(1, {"val/accuracy": 0.5}))
    of_test = ("--label", "test=lag", "--columns", "name,best:val/accuracy")
    (job,) = cli.json("ls", *of_test)
    assert job["values_as_of"] is not None
    head, row = cli("ls", *of_test).splitlines()
    assert head.split()[-2:] == ["AS", "OF"]
    assert row.split()[2] == "0.5"
    _, line = csv.reader(io.StringIO(cli("ls", *of_test, "--csv")))
    assert line == [job_id, "live", "0.5", job["values_as_of"]]
    (group,) = cli.json("ls", "--group", "label:test", "--sort", "-val/accuracy", *of_test[:2])
    assert group["as_of"] == job["values_as_of"]
    path = tmp_path / "jobs.parquet"
    cli("ls", *of_test, "--parquet", str(path))
    parquet = pytest.importorskip("pyarrow.parquet")
    (time,) = parquet.read_table(path)["values_as_of"].to_pylist()
    assert time == datetime.fromisoformat(job["values_as_of"])
    server.succeed(job_id)
    assert cli("ls", *of_test).splitlines()[0].split() == ["ID", "NAME", "best:val/accuracy"]
    _, line = csv.reader(io.StringIO(cli("ls", *of_test, "--csv")))
    assert line[-1] == ""
    (group,) = cli.json("ls", "--group", "label:test", "--sort", "-val/accuracy", *of_test[:2])
    assert group["as_of"] is None


def test_frames_have_the_requested_columns(server: LiveServer, jobs: dict[str, str]) -> None:
    pandas = pytest.importorskip("pandas", reason="the extra 'dev' is not installed: pandas")
    with Client(server.url) as client:
        found = client.jobs(
            label={"test": "tables"},
            sort="-lr",
            columns=["name", "best:val/accuracy", "started_at"],
        )
        frame = client.frame(found)
        assert client.frame(client.jobs(label={"no": "job"}, columns=["lr"])).empty
    assert list(frame.columns) == ["name", "best:val/accuracy", "started_at"]
    assert list(frame.index) == [jobs[name] for name in ("none", "nan", "high", "low")]
    assert frame["best:val/accuracy"].dtype == float
    assert frame["best:val/accuracy"].isna().tolist() == [True, True, False, False]
    assert isinstance(frame["started_at"].iloc[3], pandas.Timestamp)


def test_a_job_that_moves_while_pages_are_read_is_yielded_once(server: LiveServer) -> None:
    labels = {"test": "moving"}
    ids = [server.submit(labels=labels) for _ in range(3)]
    for number, job_id in enumerate(ids):
        server.train(job_id, metrics(1, {"x/y": float(number)}))
    with Client(server.url) as client:
        found = client.jobs(label=labels, sort="x/y", page_size=1)
        first = next(found)
        server.succeed(first.id, metrics(2, {"x/y": 9.0}))
        assert [first.id, *(job.id for job in found)] == ids


def test_lists_are_saved_as_views(cli: Cli, jobs: dict[str, str]) -> None:
    cli("ls", *OF_TEST, "--sort", "-lr", "--columns", "name,lr", "--save", "mine")
    assert cli.err.endswith("/mine\n")
    assert names(cli("ls", "--view", "mine")) == ["none", "nan", "high", "low"]
    assert names(cli("ls", "--view", "mine", "--sort", "lr"))[0] == "low"
    cli("ls", "--view", "mine", "--label", "experiment=odd", "--save", "mine")
    (view,) = [one for one in cli.json("views", "ls", "--owner", "@me") if one["name"] == "mine"]
    assert view["query"] == {"label": ["experiment=odd"], "sort": "-lr", "columns": "name,lr"}
    assert "sort           -lr" in cli("views", "show", "mine").splitlines()
    cli("ls", "--owner", "someone", "--name", "job", "--save", "of-someone")
    owner = cli.json("views", "show", "of-someone")["owner"]
    shown = cli("views", "show", "of-someone").splitlines()
    assert shown[0].split() == ["view", f"{owner}/of-someone"]
    assert "owner          someone" in shown
    cli("views", "rm", "of-someone")
    assert "columns=name,lr" in cli("views", "ls")
    assert "no view none" in _refused(cli, "--view", "none", exits=3)
    assert "no field" in _refused(cli, "--columns", "a.b", "--save", "bad")
    cli("views", "show", "bad", exits=3)
    assert "must consist of" in _refused(cli, "--save", "team/best")
    cli("views", "rm", "mine")
    cli("views", "rm", "mine", exits=3)


@pytest.fixture
def with_tokens(tmp_path: Path) -> Iterator[LiveServer]:
    lines = [
        f"{name}:{hashlib.sha256(name.encode()).hexdigest()}{role}"
        for name, role in (("ann", ""), ("bob", ""), ("eve", ":admin"))
    ]
    (tmp_path / "tokens").write_text("\n".join(lines))
    with serving(tmp_path / "home", tokens_file=tmp_path / "tokens") as server:
        yield server


def test_other_users_read_a_view_but_only_its_owner_and_admins_change_it(
    with_tokens: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.tracking.saved_views.MOST", 2)
    url = with_tokens.url
    with (
        dray.Client(url, "ann") as ann,
        dray.Client(url, "bob") as bob,
        dray.Client(url, "eve") as eve,
    ):
        ann.save_view("best", view_project="vision", sort="-lr", label={"a": "b"}, state="FAILED")
        with pytest.raises(errors.ViewNotFound):
            bob.saved_view("best")
        seen = bob.saved_view("best", owner="ann")
        assert seen.query == {"state": ["FAILED"], "label": ["a=b"], "sort": "-lr"}
        with pytest.raises(errors.Forbidden):
            bob.delete_view("best", owner="ann")
        bob.save_view("best", sort="lr")
        assert ann.saved_view("best").query["sort"] == "-lr"
        ann.save_view("other", group="sweep", sort="-cost")
        with pytest.raises(errors.TooManyViews):
            ann.save_view("third")
        ann.save_view("best", view_project="vision", columns=["name", "lr"])
        listed = [(one.name, one.owner) for one in eve.saved_views(page_size=1)]
        assert listed == [("best", "ann"), ("best", "bob"), ("other", "ann")]
        assert [one.query for one in bob.saved_views(project="vision")] == [{"columns": "name,lr"}]
        eve.delete_view("best", owner="bob")
        with pytest.raises(errors.InvalidSearch, match="can't be collapsed"):
            ann.save_view("best", collapse_arrays=True, sort="lr")
        assert [one.owner for one in eve.saved_views()] == ["ann", "ann"]
        for name, wrong in (("a/b", {}), ("ä", {}), ("x", {"group": "none"}), ("x", {"no": 1})):
            with pytest.raises(errors.ApiError) as caught:
                ann.save_view(name, **wrong)
            assert 400 <= caught.value.status < 500
        for wrong in ({"group": "user", "sort": "name"}, {"where": "lr <"}, {"sort": "tags"}):
            with pytest.raises(errors.InvalidSearch, match="/query/"):
                ann.save_view("best", **wrong)
