"""A script that saves by path, fails and hangs: its files are kept, and its reason is the first."""

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
            "Has not joined collective 2 (gloo:all_reduce) of group 0, in which rank 1 waits."
        )
    )
    client.cancel(job.id)
    client.wait(job.id, timeout_s=60)
    first, *_ = client.attempts(job.id)
    assert first.reason is not None
    assert first.reason.message.startswith("the process of rank 1 was killed by signal 9")
    found = {one.path for one in client.artifacts(job.id)}
    assert found == {"rank0/attempt.txt", "rank1/attempt.txt"}
