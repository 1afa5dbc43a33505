"""The rank of a script has the same environment as with torchrun, and reports failures in the same
way."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.launcher import api as launcher

from dray.spec import JobSpec
from ray_workers.training.core import elastic_error
from ray_workers.training.process.rank_main import environment
from tests.unit.training.ranks import frames, make_task, run_ranks

OF_THE_AGENT = {"TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE", "HEALTH_CHECK_PORT"}
"""Variables for torchrun's own timers, which it sets only on request."""


def names_set_in(module: ModuleType) -> set[str]:
    """Return the names of variables that the source code sets in a dictionary or in the
    environment."""
    found = set[object]()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Dict):
            keys = node.keys
        elif isinstance(node, ast.Assign):
            keys = [t.slice for t in node.targets if isinstance(t, ast.Subscript)]
        else:
            continue
        found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return {name for name in found if isinstance(name, str) and name.isupper() and len(name) > 3}


def script(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "it.py"
    path.write_text(text)
    return {"script": {"entrypoint": str(path)}}


def test_a_rank_has_every_variable_that_this_torch_sets_for_a_worker(tmp_path: Path) -> None:
    asked = set().union(*map(names_set_in, (local_elastic_agent, api, launcher)))
    assert {"RANK", "MASTER_ADDR", "GROUP_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"} <= asked
    task = make_task(tmp_path, script(tmp_path, ""))
    has = environment(task, JobSpec.model_validate(task.spec))
    assert asked - OF_THE_AGENT - {"CUDA_VISIBLE_DEVICES"} <= has.keys()


SAVES = """
import os
from pathlib import Path

output, kept = (Path(os.environ[n]) for n in ("DRAY_OUTPUT_DIR", "DRAY_CHECKPOINT_DIR"))
assert not any(output.iterdir())
(kept / "state").write_text("2" if (kept / "state").exists() else "1")
(output / "result").write_text((kept / "state").read_text())
"""


def test_what_is_in_the_checkpoint_folder_is_there_for_the_next_attempt(tmp_path: Path) -> None:
    for attempt in (1, 2):
        assert run_ranks(tmp_path, script(tmp_path, SAVES), world_size=1, attempt=attempt) == [0]
        result = tmp_path / f"attempt-{attempt}" / "folders" / "output" / "result"
        assert result.read_text() == str(attempt)


CATCHES = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("the sky is red")

try:
    main()
except ValueError:
    sys.exit(3)
"""


def test_the_error_that_record_wrote_is_the_reason_of_a_script_that_exits_for_it(
    tmp_path: Path,
) -> None:
    assert run_ranks(tmp_path, script(tmp_path, CATCHES), world_size=1) == [3]
    [error] = frames(tmp_path, kind="error")
    assert error["message"].startswith("ValueError: the sky is red (then SystemExit: ")
    assert 'raise ValueError("the sky is red")' in error["traceback"]
    assert error["cause"] == "user_error"


HIDES_THE_LOSS = """
import os, sys, time
import torch, torch.distributed as dist

class Slow(Exception):
    def __str__(self):
        time.sleep(0.5)
        return "the sky is red"

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    try:
        raise Slow
    finally:
        dist.destroy_process_group()
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    sys.exit(4)
"""


def test_an_exit_for_a_lost_peer_is_a_secondary_failure_and_an_error_has_its_time(
    tmp_path: Path,
) -> None:
    assert run_ranks(tmp_path, script(tmp_path, HIDES_THE_LOSS), world_size=2) == [4, 1]
    [echo], [own] = (frames(tmp_path, rank=rank, kind="error") for rank in (0, 1))
    assert (echo["cause"], own["cause"]) == ("worker_lost", "user_error")
    assert "the sky is red" in own["message"]
    assert own["raised_at"] < echo["raised_at"] + 0.25
    assert [(one["seat"], one["incarnation"]) for one in (echo, own)] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"message": "words"}', ("words", "")),
        ('{"message": {"message": "W", "extraInfo": {"py_callstack": "at 1"}}}', ("W", "at 1")),
        ('{"message": {"message": ""}}', None),
        ('{"message": {"message": "W", "extraInfo": 3}}', None),
        ("[1]", None),
        ("[" * 5000, None),
        ("\xff", None),
    ],
)
def test_anything_may_be_in_the_file(
    tmp_path: Path, text: str, said: tuple[str, str] | None
) -> None:
    path = tmp_path / "error.json"
    path.write_text(text, encoding="latin-1")
    assert elastic_error.recorded(path) == said
    assert elastic_error.recorded(tmp_path) is None
