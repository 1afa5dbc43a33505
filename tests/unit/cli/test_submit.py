"""Submitting a training program and its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dray.views import JobState
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which contains a program."""
    root = tmp_path / "my job"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text(f"# of {tmp_path}\nprint('hello')\n")
    (root / "pkg" / "main.py").write_text("print('hello')\n")
    (root / ".env").write_text("TOKEN=1")
    monkeypatch.chdir(root)
    return root


def spec_of(server: LiveServer, job_id: str) -> dict[str, object]:
    spec: dict[str, object] = server.ask("GET", f"/v1/jobs/{job_id}").json()["spec"]
    return spec


@pytest.mark.usefixtures("folder")
def test_a_program_is_submitted_with_its_folder_and_its_arguments(
    cli: Cli, server: LiveServer, tmp_path: Path
) -> None:
    job = json.loads(
        cli("submit", "--json", "--workers", "2", "--", "train.py", "--lr", "0.1", "-v")
    )
    assert (job["name"], job["state"]) == ("train", JobState.QUEUED)
    assert cli.err == "not uploaded: .env might contain secrets\n"
    script = job["spec"]["script"]
    assert (script["entrypoint"], script["args"]) == ("train.py", ["--lr", "0.1", "-v"])
    assert job["spec"]["resources"]["num_workers"] == 2
    assert [file["path"] for file in cli.json("code", job["id"])] == ["pkg/main.py", "train.py"]
    cli("code", job["id"], str(tmp_path / "back"))
    assert (tmp_path / "back" / "train.py").read_text().endswith("print('hello')\n")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["no", "1e3", "null", "a: b", "%\\", "2026-01-01", "# one", "[a"])
def test_a_name_is_taken_as_it_is_written(cli: Cli, name: str) -> None:
    job = json.loads(cli("submit", "--json", "--name", name, "--", "train.py"))
    assert job["name"] == name


@pytest.mark.usefixtures("folder")
def test_a_module_is_submitted_as_python_would_run_it(cli: Cli) -> None:
    job = json.loads(
        cli("submit", "--json", "--name", "other", "--", "-m", "pkg.main", "--steps", "5")
    )
    script = job["spec"]["script"]
    assert (job["name"], script["module"], script["args"]) == (
        "other",
        "pkg.main",
        ["--steps", "5"],
    )
    assert script["code"].startswith("code-")


@pytest.mark.usefixtures("folder")
def test_a_document_takes_a_folder_along_if_one_is_named(cli: Cli, folder: Path) -> None:
    (folder / "job.yaml").write_text("script: {entrypoint: train.py}\n")
    assert cli.json("submit", "job.yaml")["spec"]["script"]["code"] is None
    job = cli.json("submit", "--code", ".", "--include", ".env", "job.yaml")
    paths = {file["path"] for file in cli.json("code", job["id"])}
    assert paths == {".env", "job.yaml", "pkg/main.py", "train.py"}


def test_a_dry_run_shows_what_would_be_packed_and_sends_nothing(
    cli: Cli, server: LiveServer, folder: Path
) -> None:
    (folder / "once.txt").write_text(str(folder))
    shown = cli("submit", "--dry-run", "--", "train.py")
    assert "Nothing was submitted" in shown
    assert "once.txt" in shown
    assert "excluded: .env might contain secrets" in shown
    files = [{"path": "a", "size_bytes": 1, "parts": []}]
    assert server.ask("POST", "/v1/code", json={"files": files}).status_code == 422


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.py"], "there is no file none.py in"),
        (["--code", "pkg", "train.py"], "is not in"),
        (["--code", "nothing", "train.py"], "is not a folder"),
        (["--include", "no.txt", "train.py"], "no such file in"),
        (["job.yaml", "extra"], "unexpected argument"),
        (["--", "torchrun", "--nproc-per-node", "2", "train.py"], "remove torchrun"),
        (["--include", ".env", "job.yaml"], "--include requires --code"),
        (["ignored.py"], "ignored.py is excluded from the upload"),
        (["--", "-m"], "requires the name of a module"),
    ],
)
def test_a_mistake_is_said_before_anything_is_sent(
    cli: Cli, folder: Path, arguments: list[str], words: str
) -> None:
    (folder / "job.yaml").write_text("script: {entrypoint: train.py}\n")
    (folder / "ignored.py").write_text("x = 1\n")
    (folder / ".drayignore").write_text("ignored.py\n")
    cli("submit", *arguments, exits=2)
    assert words in cli.err


def test_a_program_that_is_a_link_is_run_by_the_name_that_is_uploaded(
    cli: Cli, folder: Path
) -> None:
    (folder / "versions").mkdir()
    (folder / "versions" / "v1.py").write_text("print(1)\n")
    (folder / "current.py").symlink_to("versions/v1.py")
    (folder / "src").symlink_to("pkg")
    (folder / ".gitignore").write_text("versions/\n")
    job = json.loads(cli("submit", "--json", "--", "current.py"))
    assert job["spec"]["script"]["entrypoint"] == "current.py"
    # A link to a folder is left out, because its files are uploaded from where they are.
    job = json.loads(cli("submit", "--json", "--", "src/main.py"))
    assert job["spec"]["script"]["entrypoint"] == "pkg/main.py"


def test_a_syntax_error_is_found_at_submit(cli: Cli, folder: Path) -> None:
    (folder / "train.py").write_text("x = 1\nif x\n")
    cli("submit", "train.py", exits=2)
    assert "train.py is not Python: line 2" in cli.err


def test_a_recipes_own_model_travels_with_the_folder(cli: Cli, folder: Path) -> None:
    (folder / "net.py").write_text("import torch\n\nclass Net(torch.nn.Module):\n    pass\n")
    document = "recipe: image_classification\nmodel: {import: 'net:Net', args: {width: 3}}\n"
    (folder / "job.yaml").write_text(document)
    job = cli.json("submit", "--code", ".", "job.yaml")
    model = job["spec"]["model"]
    assert (model["import"], model["args"]) == ("net:Net", {"width": 3})
    assert model["code"].startswith("code-")
    paths = {file["path"] for file in cli.json("code", job["id"])}
    assert {"job.yaml", "net.py"} <= paths
    (folder / "plain.yaml").write_text("recipe: image_classification\n")
    cli("submit", "--code", ".", "plain.yaml", exits=2)
    assert "has neither a script nor model.import" in cli.err


def test_a_commit_of_a_repository_is_submitted_without_an_upload(
    cli: Cli, server: LiveServer
) -> None:
    place = {"git": "https://192.0.43.8/me/net.git", "commit": "a" * 40}
    words = ("--git", place["git"], "--commit", place["commit"])
    job = json.loads(cli("submit", "--json", *words, "--workers", "2", "--", "train.py", "--lr"))
    script = job["spec"]["script"]
    assert {name: script["code"][name] for name in place} == place
    assert (script["entrypoint"], script["args"]) == ("train.py", ["--lr"])
    problem = server.ask("GET", f"/v1/jobs/{job['id']}/code").json()
    assert f"{place['git']} at {place['commit']}" in problem["detail"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--git", "https://h.org/a", "--", "train.py"), "must be used together"),
        (("--commit", "a" * 40, "--", "train.py"), "must be used together"),
        (("--git", "https://h.org/a", "--commit", "a" * 40, "--code", ".", "--", "a.py"), "--code"),
        (("--git", "https://h.org/a", "--commit", "main", "--dry-run", "--", "a.py"), "rev-parse"),
    ],
)
def test_a_commit_that_is_half_named_is_refused(
    words: tuple[str, ...], said: str, cli: Cli
) -> None:
    cli("submit", *words, exits=2)
    assert said in cli.err


@pytest.mark.usefixtures("folder")
def test_a_job_is_submitted_again_with_other_arguments(cli: Cli, server: LiveServer) -> None:
    first = json.loads(
        cli(
            *("submit", "--json", "--name", "again", "--workers", "2"),
            *("--metric", "train/loss=loss ([0-9.]+)"),
            *("--", "train.py", "--epochs", "3", "--lr", "0.1"),
        )
    )
    (metric,) = first["spec"]["metrics"]
    assert (metric["name"], metric["pattern"]) == ("train/loss", "loss ([0-9.]+)")
    second = cli("submit", "--like", "again", "--", "--lr", "0.01").split()[0]
    assert f"like {first['id']}: train.py --epochs 3 --lr 0.01\n" in cli.err
    spec = spec_of(server, second)
    assert spec == {
        **first["spec"],
        "script": {**first["spec"]["script"], "args": ["--epochs", "3", "--lr", "0.01"]},
        "origin": {"git": None, "job": first["id"]},
    }
    third = cli("submit", "--like", first["id"], "--set", "priority=7").split()[0]
    copied = {**first["spec"], "priority": 7, "origin": {"git": None, "job": first["id"]}}
    assert spec_of(server, third) == copied
    found = cli.json("compare", first["id"], second)
    assert found["differences"] == [{"pointer": "/parameters/lr", "values": [0.1, 0.01]}]
    recipe = server.submit()
    cli("submit", "--like", recipe, "--", "--lr", "1", exits=2)
    assert "runs the recipe image_classification, which takes no arguments" in cli.err
    cli("submit", exits=2)
    assert "specify a job document, or a program after --" in cli.err
    cli("submit", "--metric", "loss", "--", "train.py", exits=2)
    assert "--metric must have the form NAME=PATTERN" in cli.err
    member = cli.json("get", cli("submit", "--like", first["id"], "--array", "2").split()[0] + "/1")
    assert cli("submit", "--like", member["id"]).startswith("job-")


@pytest.mark.usefixtures("folder")
def test_a_copy_of_a_trial_says_which_values_it_lacks(cli: Cli, server: LiveServer) -> None:
    """The program reads `depth` from the environment."""
    parameters = {"lr": {"choices": [0.1, 0.2]}, "depth": {"choices": [2, 3]}}
    document = {
        "script": {"entrypoint": "/train.py", "args": ["--lr", "${lr}"]},
        "sweep": {"metric": "loss", "mode": "min", "sampler": "grid", "parameters": parameters},
    }
    Path("sweep.json").write_text(json.dumps(document))
    array = cli("sweep", "submit", "sweep.json").split()[0]
    found = cli.json("compare", f"{array}/0", f"{array}/3")
    assert found["differences"] == [
        {"pointer": "/parameters/lr", "values": [0.1, 0.2]},
        {"pointer": "/parameters/depth", "values": [2, 3]},
    ]
    copy = cli("submit", "--like", f"{array}/3").split()[0]
    assert "set DRAY_PARAM_DEPTH=3; the copy runs without this variable" in cli.err
    assert spec_of(server, copy)["script"]["args"] == ["--lr", "0.2"]
    assert not spec_of(server, copy)["script"]["parameters"]
