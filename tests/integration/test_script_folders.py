"""A script that saves by path, fails and hangs: its files are kept, with the first reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray import Client
from tests.integration.harness import eventually

pytestmark = pytest.mark.ray

SCRIPT = """
import os, signal, time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
output, kept = (Path(os.environ[n]) for n in ("DRAY_OUTPUT_DIR", "DRAY_CHECKPOINT_DIR"))
(output / f"rank{rank}").mkdir()
(output / f"rank{rank}" / "attempt.txt").write_text(os.environ["DRAY_ATTEMPT"])
dist.barrier()
if not (kept / "state").exists():
    if rank == 1:
        (kept / "state").write_text("saved")
        os.kill(os.getpid(), signal.SIGKILL)
elif rank == 0:
    time.sleep(600)
dist.all_reduce(torch.ones(1))
"""


def test_files_are_kept_and_the_ranks_to_blame_are_named(client: Client, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = client.submit(
        {
            "script": {
                "entrypoint": "train.py",
                "code": client.upload_code(tmp_path).id,
                "hang_limit_s": 10,
            },
            "resources": {"num_workers": 2},
            "max_runtime_s": 120,
        }
    )
    [hang] = eventually(lambda: client.hangs(job.id), within_s=90)
    assert hang.culprits == [0]
    assert hang.ranks[0].stack is not None
    assert (
        hang.ranks[0]
        .stack.rstrip()
        .endswith(
            "This rank has not joined collective 2 (gloo:all_reduce) of group 0, in which "
            "rank 1 is waiting."
        )
    )
    client.cancel(job.id)
    client.wait(job.id, timeout_s=60)
    first, *_ = client.attempts(job.id)
    assert first.reason is not None
    assert first.reason.message.startswith("the process of rank 1 was killed by signal 9")
    found = {one.path for one in client.artifacts(job.id)}
    assert found == {"rank0/attempt.txt", "rank1/attempt.txt"}


LEAVES_A_RESULT = """
import os, sys
from pathlib import Path

child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
Path("model.pt").write_bytes(bytes(1500))
"""


def test_a_success_names_the_result_that_was_left_in_the_working_directory(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LEAVES_A_RESULT)
    (tmp_path / "words.txt").write_text("a part of the code")
    script = {"entrypoint": "train.py", "code": client.upload_code(tmp_path).id}
    job = client.submit({"script": script})
    ended = client.wait(job.id, timeout_s=120)
    assert ended.reason is not None
    assert ended.reason.message.endswith(
        ". 1 file was left in the working directory and not kept as artifacts: 'model.pt' "
        "(1.5 KB); to keep results, write them to DRAY_OUTPUT_DIR or call train.save_artifact"
    )
