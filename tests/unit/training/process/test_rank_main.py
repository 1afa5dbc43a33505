"""A training process from start to exit code."""

from __future__ import annotations

import functools
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dray.spec import JobSpec
from dray.train import storage_faults
from dray.train.spool import SpoolWriter
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import STORAGE_EXIT_CODE, RankTask
from ray_workers.shared.heartbeat import TimeCategory
from ray_workers.training.process.ending import CONSEQUENCE
from ray_workers.training.process.rank_main import environment
from tests.marks import soak
from tests.unit.training.ranks import frames, make_task, run_ranks

RECIPE = {"recipe": "image_classification", "model": {"name": "mlp"}}


def script(folder: Path, text: str, *args: str) -> dict[str, Any]:
    path = folder / "train_it.py"
    path.write_text(textwrap.dedent(text))
    return {"script": {"entrypoint": str(path), "args": list(args)}}


def variables(task: RankTask) -> dict[str, str]:
    return environment(task, JobSpec.model_validate(task.spec))


def test_a_script_written_for_torchrun_just_works(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FACTOR = 10\n")
    spec = script(
        tmp_path,
        """
        import os, sys
        import torch, torch.distributed as dist
        from beside import FACTOR
        from dray import train

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total)
            train.report(1, {"total": total * FACTOR, "local": int(os.environ["LOCAL_RANK"])})
            if rank == 0:
                with open(os.environ["DRAY_JOB_ID"] + ".txt", "w") as file:
                    file.write("|".join(sys.argv[1:]))
                train.save_artifact(os.environ["DRAY_JOB_ID"] + ".txt", "args.txt")
            dist.destroy_process_group()
        """,
        "--lr",
        "a b",
    )
    assert run_ranks(tmp_path, spec, world_size=2) == [0, 0]
    for rank in (0, 1):
        assert frames(tmp_path, rank=rank, kind="metrics") == [
            {"step": 1, "values": {"total": 30.0, "local": float(rank)}}
        ]
    assert (tmp_path / "attempt-1" / "artifacts" / "args.txt").read_text() == "--lr|a b"
    assert [a["path"] for a in frames(tmp_path, kind="artifact")] == ["args.txt"]


KEEPS_A_SNAPSHOT = """
import json, os
print(json.load(open("config.json"))["lr"], open("data/words.txt").read())
had = os.path.exists("out/snapshot.pt")
with open("out/snapshot.pt", "a") as file:
    file.write("x")
from dray import train
train.report(1, {"had": had})
"""


def test_a_scripts_files_are_its_jobs_own_on_the_node_and_stay_between_attempts(
    tmp_path: Path,
) -> None:
    project = tmp_path / "project"
    for folder in ("data", "out"):
        (project / folder).mkdir(parents=True)
    (project / "config.json").write_text('{"lr": 0.1}')
    (project / "data" / "words.txt").write_text("a b")
    spec = script(project, KEEPS_A_SNAPSHOT)
    found = []
    for home, attempt in ((tmp_path / "one", 1), (tmp_path / "one", 2), (tmp_path / "two", 1)):
        assert run_ranks(home, spec, world_size=1, attempt=attempt) == [0]
        (metrics,) = frames(home, attempt=attempt, kind="metrics")
        found.append(metrics["values"]["had"])
    assert found == [0.0, 1.0, 0.0]
    assert list((project / "out").iterdir()) == []


def test_what_a_script_raises_is_told_and_ends_it_with_1(tmp_path: Path) -> None:
    spec = script(tmp_path, "def fail():\n    raise ValueError('loss is NaN')\n\nfail()\n")
    assert run_ranks(tmp_path, spec, world_size=1) == [1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == "user_error"
    assert error["type"] == "ValueError"
    assert error["message"] == "ValueError: loss is NaN (train_it.py, line 2)"
    begin, first, *_, last = error["traceback"].splitlines()
    assert begin == "Traceback (most recent call last):"
    assert first.endswith('train_it.py", line 4, in <module>')
    assert "in fail" in error["traceback"]
    assert last == "ValueError: loss is NaN"


def test_a_segfault_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    spec = script(tmp_path, "import ctypes\n\ndef look():\n    ctypes.string_at(0)\n\nlook()\n")
    log = functools.partial(write_errors_to, tmp_path / "log")
    assert run_ranks(tmp_path, spec, world_size=1, before=log) == [-signal.SIGSEGV]
    told = (tmp_path / "log").read_text()
    assert "Segmentation fault" in told
    assert f'"{tmp_path}/train_it.py", line 4 in look' in told


def write_errors_to(path: Path, task: RankTask) -> None:
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)


@pytest.mark.parametrize(
    ("leave", "code"),
    [("sys.exit(3)", 3), ("sys.exit('no data')", 1), ("sys.exit(0)", 0), ("sys.exit()", 0)],
)
def test_a_scripts_exit_code_is_honoured(tmp_path: Path, leave: str, code: int) -> None:
    spec = script(tmp_path, f"import sys\n{leave}\n")
    assert run_ranks(tmp_path, spec, world_size=1) == [code]
    told = frames(tmp_path, kind="error")
    assert len(told) == (1 if code else 0)
    if leave == "sys.exit('no data')":
        assert told[0]["message"] == "SystemExit: no data (train_it.py, line 2)"


def test_what_a_scripts_time_went_into_is_seen_on_its_page(tmp_path: Path) -> None:
    text = """
        import time
        from dray import train
        for step in (1, 2, 3):
            time.sleep(0.1)
            train.report(step, {"train/loss": 1.0})
        time.sleep(0.3)
    """
    assert run_ranks(tmp_path, script(tmp_path, text), world_size=1) == [0]
    (observation,) = heartbeat.observe_ranks(tmp_path / "attempt-1" / "pages")
    assert (observation.status.step, observation.status.phase) == (3, heartbeat.RankPhase.FINISH)
    assert observation.status.uses[TimeCategory.USEFUL] >= 0.5
    assert observation.status.uses[TimeCategory.UNREPORTED] >= 0.1


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = {"script": {"entrypoint": str(tmp_path / "absent.py")}}
    assert run_ranks(tmp_path, spec, world_size=1) == [1]
    (error,) = frames(tmp_path, kind="error")
    assert "absent.py" in error["message"]
    assert error["cause"] == "cannot_run"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            {"entrypoint": "absent.py"},
            "absent.py does not exist in the job's code",
        ),
        ({"module": "absent"}, "ImportError: No module named absent"),
    ],
)
def test_a_program_that_fetched_code_does_not_have_is_named_and_not_tried_again(
    tmp_path: Path, program: dict[str, str], message: str
) -> None:
    spec = {"script": {**program, "code": {"git": "https://example.org/net", "commit": "0" * 40}}}
    assert run_ranks(tmp_path, spec, world_size=1) == [1]
    (error,) = frames(tmp_path, kind="error")
    assert (error["cause"], error["message"]) == ("cannot_run", message)


@pytest.mark.parametrize(
    ("text", "cause", "message"),
    [
        ("row = {}\nrow['income']\n", "user_error", "KeyError: 'income' (train_it.py, line 2)"),
        (
            "x = 0\nassert x > 1\n",
            "user_error",
            "AssertionError: assert x > 1 (train_it.py, line 2)",
        ),
        (
            "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('no a') from e\n",
            "user_error",
            "ValueError: no a (train_it.py, line 4); caused by KeyError: 'a' (train_it.py, line 2)",
        ),
        (
            "import sys\nsys.exit(3)\n",
            "user_error",
            "SystemExit: the training code exited with code 3 (train_it.py, line 2)",
        ),
        ("x = 1\nif x\n", "cannot_run", "SyntaxError: expected ':' (train_it.py, line 2)"),
        (
            "import no_such_module\n",
            "cannot_run",
            "ModuleNotFoundError: No module named 'no_such_module' (train_it.py, line 1). If "
            "no_such_module is a package, add it to environment.python_packages or to the file "
            "passed to --requirements; if the module is in one of your files, upload its folder: "
            "`dray submit --code FOLDER`",
        ),
    ],
    ids=["key", "assert", "chained", "exit", "syntax", "module"],
)
def test_a_reason_has_the_type_the_words_and_the_users_line(
    tmp_path: Path, text: str, cause: str, message: str
) -> None:
    assert run_ranks(tmp_path, script(tmp_path, text), world_size=1) != [0]
    (error,) = frames(tmp_path, kind="error")
    assert (error["cause"], error["message"]) == (cause, message)


def test_the_survivor_of_a_dead_peer_blames_the_peer(tmp_path: Path) -> None:
    spec = script(
        tmp_path,
        """
        import os, torch, torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(1))
        """,
    )
    assert run_ranks(tmp_path, spec, world_size=2) == [1, 7]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == "worker_lost"
    assert error["message"].endswith(f"; {CONSEQUENCE}")


def refuse_reports(number: int, task: RankTask) -> None:
    """Make the disk reject some of the rank's reports before it accepts them again."""
    storage_faults.PAUSE_S, storage_faults.WAIT_S = 0.01, 1.0
    write, refusals = SpoolWriter._write, iter(range(number))

    def refuse(writer: SpoolWriter, line: bytes) -> bool:
        return next(refusals, None) is None and write(writer, line)

    SpoolWriter._write = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize("end", [soak(""), "import sys; sys.exit()"])
def test_a_rank_does_not_end_well_before_its_last_report_is_written(
    tmp_path: Path, end: str
) -> None:
    spec = script(tmp_path, f"from dray import train\ntrain.report(1, {{'loss': 2.0}})\n{end}\n")
    before = functools.partial(refuse_reports, 5)
    assert run_ranks(tmp_path, spec, world_size=1, before=before) == [0]
    assert frames(tmp_path, kind="metrics") == [{"step": 1, "values": {"loss": 2.0}}]
    before = functools.partial(refuse_reports, 10**6)
    codes = run_ranks(tmp_path, spec, world_size=1, attempt=2, before=before)
    assert codes == [STORAGE_EXIT_CODE]


def test_a_recipe_does_not_end_well_before_its_last_report_is_written(tmp_path: Path) -> None:
    spec = RECIPE | {"train": {"max_steps": 1}, "resources": {"num_workers": 2}}
    before = functools.partial(refuse_last_report, 10**6)
    assert run_ranks(tmp_path, spec, world_size=2, before=before) == [0, STORAGE_EXIT_CODE]


def refuse_last_report(number: int, task: RankTask) -> None:
    if task.rank == 1:
        refuse_reports(number, task)


def test_a_data_error_is_not_worth_another_attempt(tmp_path: Path) -> None:
    spec = RECIPE | {"data": {"validation_fraction": 1e-6}}
    assert run_ranks(tmp_path, spec, world_size=1) == [1]
    assert frames(tmp_path, kind="error")[0]["cause"] == "bad_data"


def test_the_environment_is_torchruns_and_the_task_has_the_last_word(tmp_path: Path) -> None:
    task = make_task(tmp_path, RECIPE, rank=1, world_size=2, attempt=3, port=4321)
    env = variables(task)
    assert env["RANK"] == env["LOCAL_RANK"] == "1"
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4321")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert env["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert env["DRAY_ATTEMPT"] == "3"
    assert env["TMPDIR"] == task.temp_dir
    own = RankTask(**{**task.__dict__, "env": {"OMP_NUM_THREADS": "6", "MORE": "1"}})
    assert variables(own) == env | {"OMP_NUM_THREADS": "6", "MORE": "1"}


def test_a_job_of_an_array_finds_its_index_and_the_size(tmp_path: Path) -> None:
    alone = make_task(tmp_path, RECIPE)
    assert not [name for name in variables(alone) if name.startswith("DRAY_ARRAY")]
    spec = RECIPE | {"array": {"size": 5}}
    env = variables(RankTask(**{**alone.__dict__, "spec": spec, "array_index": 3}))
    assert (env["DRAY_ARRAY_INDEX"], env["DRAY_ARRAY_SIZE"]) == ("3", "5")


def test_a_run_of_a_schedule_finds_its_time(tmp_path: Path) -> None:
    alone = make_task(tmp_path, RECIPE)
    assert "DRAY_SCHEDULED_AT" not in variables(alone)
    at = "2026-12-01T02:30:00+01:00"
    assert variables(RankTask(**{**vars(alone), "scheduled_at": at}))["DRAY_SCHEDULED_AT"] == at


def test_a_trial_finds_its_index_and_its_values(tmp_path: Path) -> None:
    alone = make_task(tmp_path, RECIPE)
    parameters = {"train.optimizer.lr": 1e-05, "name": "a b", "layers": [64, 32]}
    env = variables(RankTask(**{**vars(alone), "parameters": parameters, "array_index": 3}))
    assert env["DRAY_PARAM_TRAIN_OPTIMIZER_LR"] == "1e-05"
    assert env["DRAY_PARAM_NAME"] == "a b"
    assert env["DRAY_PARAM_LAYERS"] == "[64, 32]"
    assert env["DRAY_ARRAY_INDEX"] == "3"


def test_a_rank_with_a_gpu_of_its_own_finds_it_at_index_0(tmp_path: Path) -> None:
    task = make_task(tmp_path, RECIPE, rank=1, world_size=2)
    env = variables(RankTask(**{**task.__dict__, "device": "cuda"}))
    assert env["LOCAL_RANK"] == "0"
    assert env["DRAY_LOCAL_RANK"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in env


def test_other_nodes_are_not_reached_through_the_loopback(tmp_path: Path) -> None:
    task = make_task(tmp_path, RECIPE)
    env = variables(RankTask(**{**task.__dict__, "master_addr": "10.0.0.5"}))
    assert "GLOO_SOCKET_IFNAME" not in env


def write_output_to(folder: Path, task: RankTask) -> None:
    os.dup2(os.open(folder / f"log-{task.rank}", os.O_CREAT | os.O_WRONLY), 1)


def test_rank_0_alone_says_how_the_table_was_taken(tmp_path: Path) -> None:
    rows = "".join(f"{'' if at % 3 else at},{'ab'[at % 2]}\n" for at in range(40))
    (tmp_path / "table.csv").write_text(f"x,y\n{rows}")
    data = {"source": (tmp_path / "table.csv").as_uri(), "target": "y", "missing": "median"}
    spec = {
        "recipe": "tabular_classification",
        "data": data,
        "train": {"epochs": 1, "global_batch_size": 8},
        "resources": {"num_workers": 2},
    }
    before = functools.partial(write_output_to, tmp_path)
    assert run_ranks(tmp_path, spec, world_size=2, before=before) == [0, 0]
    said = (tmp_path / "log-0").read_text()
    assert "dray:   'x': number, missing in 26 rows, replaced by " in said
    assert "'x'" not in (tmp_path / "log-1").read_text()
