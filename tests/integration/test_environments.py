"""Jobs with their own packages, variables and secrets, on a real Ray. No network is needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray import Client
from dray.views import JobState
from ray_workers.shared import paths
from ray_workers.shared.processes.procfs import started_ticks
from tests.integration.harness import Service, assert_promises, eventually
from tests.marks import SOAK
from tests.wheels import from_wheels, make_wheel, served

pytestmark = pytest.mark.ray
CANARY = "canary-8d2e77"

PROGRAM = """
import os, sys, time
import torch.distributed as dist
import hello_pkg
dist.init_process_group("gloo")
print("has", hello_pkg.VERSION, os.environ["MY_FLAG"], os.environ["HUSH"], flush=True)
dist.barrier()
if len(sys.argv) > 1:
    raise RuntimeError("refused " + os.environ["HUSH"])
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "w").mkdir()
    with served(tmp_path / "w") as url:
        yield url


def canary_in(folder: Path) -> list[str]:
    """Return files in a folder that contain the canary, except for installed or computed files."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if n not in ("environments", "compiled", "data", "code")]
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and CANARY.encode() in path.read_bytes():
                    found.append(str(path))
    return found


def test_packages_variables_and_secrets_reach_ranks_and_secrets_nothing_else(
    embedded: Service, client: Client, wheels: str, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "w", "hello_pkg", "4.2")
    secrets = Path(embedded.environment["DRAY_SECRETS_DIR"])
    secrets.mkdir(exist_ok=True, mode=0o700)
    (secrets / "HUSH").write_text(f"{CANARY}\n")
    (secrets / "HUSH").chmod(0o600)
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environment = {
        **from_wheels(wheels, "hello-pkg"),
        "env": {"MY_FLAG": "on"},
        "secrets": ["HUSH"],
    }
    document = {
        "script": {"entrypoint": str(program)},
        "environment": environment,
        "resources": {"num_workers": 2},
    }
    job = client.wait(client.submit(document).id, timeout_s=120)
    log = [line.text for line in client.logs(job.id)]
    assert job.state is JobState.SUCCEEDED, (job.reason, log)
    assert log.count("has 4.2 on ***") == 2
    ready = [e for e in client.events(job.id) if e.code == "environment_ready"]
    assert [e.data["packages"] for e in ready] == [["hello-pkg==4.2"]]
    assert ready[0].data["replaced"] == []
    failing = {**document, "max_retries": 0}
    failing["script"] = {"entrypoint": str(program), "args": ["fail"]}
    failed = client.wait(client.submit(failing).id, timeout_s=120)
    assert "refused ***" in failed.reason.message
    assert "preparing_environment" not in [e.code for e in client.events(failed.id)]
    (secrets / "HUSH").unlink()
    assert canary_in(embedded.home) == []
    assert canary_in(paths.machine_root()) == []
    assert_promises(embedded, client, job.id)


@SOAK
def test_another_numpy_than_the_nodes_gives_each_rank_a_fresh_interpreter(
    embedded: Service, client: Client, wheels: str, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "w", "numpy", "0.0.1")
    program = tmp_path / "train.py"
    program.write_text(
        "import numpy, os\nfrom dray import train\n"
        "train.report(1, {'train/loss': 0.5})\nprint(numpy.VERSION, os.environ['RANK'])\n"
    )
    document = {
        "script": {"entrypoint": str(program)},
        "environment": from_wheels(wheels, "numpy==0.0.1"),
        "resources": {"num_workers": 2},
    }
    job = client.wait(client.submit(document).id, timeout_s=120)
    log = sorted(line.text for line in client.logs(job.id))
    assert job.state is JobState.SUCCEEDED, (job.reason, log)
    assert log == ["0.0.1 0", "0.0.1 1"]
    ready = next(e for e in client.events(job.id) if e.code == "environment_ready")
    assert ready.data["replaced"] == ["numpy"]
    assert client.metrics(job.id).series["train/loss"].values == [0.5]
    assert_promises(embedded, client, job.id)


def test_a_setup_command_ends_with_the_last_job_that_needs_it(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    """All processes that the build started end too, and a restarted service continues with it."""
    runs, pid = tmp_path / "runs", tmp_path / "pid"
    child = f"sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000'"
    setup = f"echo run >> {runs}; (setsid env -i PATH=$PATH {child} &); sleep 1000"
    document = {"script": {"module": "this"}, "environment": {"setup": [setup]}}
    first, second = (client.submit(document).id for _ in range(2))
    eventually(pid.exists, within_s=60)
    number = int(pid.read_text())
    client.cancel(first)
    embedded.kill()
    embedded.start()
    words = "builds the environment"
    eventually(lambda: words in client.explain(second).reason.message, within_s=120)
    assert runs.read_text() == "run\n"
    assert started_ticks(number) is not None
    client.cancel(second)
    eventually(lambda: started_ticks(number) is None, within_s=30)


def test_a_package_that_does_not_exist_ends_the_job_before_it_has_a_slot(
    embedded: Service, client: Client, wheels: str, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "w", "hello_pkg")
    document = {
        "script": {"entrypoint": "train.py"},
        "environment": from_wheels(wheels, "no-such-package-here"),
        "max_retries": 3,
    }
    job = client.wait(client.submit(document).id, timeout_s=60)
    assert (job.state, job.attempt) == (JobState.FAILED, 0)
    assert job.reason.code == "cannot_run"
    assert "no-such-package-here was not found" in job.reason.message
