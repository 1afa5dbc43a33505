"""A training process from its first line to its exit code."""

from __future__ import annotations

import functools
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.contracts import RankTask
from ray_workers.training.entry import environment
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
    assert run_ranks(tmp_path, spec, world_size=2, before=go_home) == [0, 0]
    for rank in (0, 1):
        assert frames(tmp_path, rank=rank, kind="metrics") == [
            {"step": 1, "values": {"total": 30.0, "local": float(rank)}}
        ]
    assert (tmp_path / "attempt-1" / "artifacts" / "args.txt").read_text() == "--lr|a b"
    assert [a["path"] for a in frames(tmp_path, kind="artifact")] == ["args.txt"]


def go_home(task: RankTask) -> None:
    folder = Path(task.spool_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def test_what_a_script_raises_is_told_and_ends_it_with_1(tmp_path: Path) -> None:
    spec = script(tmp_path, "def fail():\n    raise ValueError('loss is NaN')\n\nfail()\n")
    assert run_ranks(tmp_path, spec, world_size=1) == [1]
    (error,) = frames(tmp_path, kind="error")
    assert error["cause"] == "user_error"
    assert error["type"] == "ValueError"
    assert error["message"] == "loss is NaN"
    assert "in fail" in error["traceback"]


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
        assert told[0]["message"] == "no data"


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = {"script": {"entrypoint": str(tmp_path / "absent.py")}}
    assert run_ranks(tmp_path, spec, world_size=1) == [1]
    (error,) = frames(tmp_path, kind="error")
    assert "absent.py" in error["message"]
    assert error["cause"] == "user_error"


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
    own = RankTask(**{**task.__dict__, "env": {"OMP_NUM_THREADS": "6", "MORE": "1"}})
    assert variables(own) == env | {"OMP_NUM_THREADS": "6", "MORE": "1"}


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
