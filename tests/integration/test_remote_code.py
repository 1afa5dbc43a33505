"""Programs of a git repository, which the nodes fetch, on a real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.errors import CodeNotFound
from dray.views import JobState
from tests.integration.harness import Service, assert_promises
from tests.unit.workers.node.folders.git_server import GitServer, git, repository, serving

pytestmark = pytest.mark.ray

PROGRAM = """
from pathlib import Path
import torch, torch.distributed as dist
from pkg import words
from dray import train

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(words.HELLO, int(total), flush=True)
dist.barrier()
if dist.get_rank() == 0:
    Path("pkg/words.py").write_text("spoiled")
dist.barrier()
if train.context().attempt == 1:
    raise RuntimeError("fails once")
"""


@pytest.fixture
def repositories(tmp_path: Path) -> Iterator[GitServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Service]:
    """A service whose nodes may read from this machine."""
    settings = {"DRAY_LOCAL_SLOTS": "2", "DRAY_DATA_PRIVATE_HOSTS": "127.0.0.1"}
    service = Service(tmp_path / "home", settings)
    service.start()
    yield service
    assert service.stop() == 0


def test_each_attempt_runs_the_commit_that_the_job_names(
    reading: Service, repositories: GitServer
) -> None:
    root = repositories.folder / "repo"
    files = {"train.py": PROGRAM, "pkg/__init__.py": "", "pkg/words.py": "HELLO = 'hello'\n"}
    commit = repository(root, files)
    (root / "pkg" / "words.py").write_text("HELLO = 'later'\n")
    git(root, "commit", "--quiet", "--all", "--message=later")
    code = {"git": f"{repositories.url}/repo", "commit": commit}
    script = {"code": code, "entrypoint": "train.py"}
    with reading.client as client:
        document = {"script": script, "resources": {"num_workers": 2}, "max_retries": 1}
        job = client.wait(client.submit(document).id, timeout_s=120)
        log = [line.text for line in client.logs(job.id)]
        assert job.state is JobState.SUCCEEDED, (job.reason, log)
        assert job.attempt == 2
        assert log.count("hello 2") == 4
        assert_promises(reading, client, job.id)
        with pytest.raises(CodeNotFound, match=commit):
            client.job_code(job.id)
        unknown = {**script, "code": {**code, "commit": "a" * 40}}
        failed = client.wait(client.submit({"script": unknown}).id, timeout_s=60)
        assert (failed.state, failed.attempt) == (JobState.FAILED, 0)
        assert "not our ref" in failed.reason.message
