"""The process that calls MLflow's client: its replies, and terminating calls that get no reply.

A fake package replaces MLflow, so that the tests do not need it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.tracking.mlflow.process import MlflowAway, MlflowProcess, MlflowRefused

LIMIT_S = 60.0
STAND_IN = """
import os, signal, sys, time

class MlflowClient:
    def __init__(self, uri):
        print("a word that is no answer")
        self.uri = uri
    def update_run(self, run_id, status):
        if run_id == "dies":
            os._exit(1)
        if run_id == "hangs":
            time.sleep(3600)
        if run_id == "refused":
            raise MlflowException("no such run", 404)
        if run_id == "long":
            raise MlflowException("!" * (65 << 20), 500)
        if run_id == "busy":
            raise MlflowException("too many requests", 429)
        if run_id == "no mlflow":
            raise MlflowException("no such page", 404, "ENDPOINT_NOT_FOUND")
        if run_id == "broken":
            raise OSError("no route to host")
        if run_id == "modules":
            import code  # of Python, and not of the service
            assert hasattr(code, "InteractiveConsole")
        if run_id == "arguments":
            assert "host" not in open("/proc/self/cmdline").read()
        if run_id == "secrets":
            assert "DRAY_DATABASE_URL" not in os.environ
    def log_artifact(self, run_id, local_path, parent):
        name = os.path.basename(local_path)
        assert (open(local_path).read(), name, parent) == ("abc", "model.bin", "a/b"), local_path
        if run_id == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if run_id == "too large":
            raise HTTPError(413)
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name):
        return "1"
    def search_runs(self, *asked, max_results):
        return []
    def create_run(self, *what):
        return Run()

class Run:
    @property
    def info(self):
        return self
    run_id = ""

class HTTPError(OSError):
    def __init__(self, status):
        self.response, self.status_code = self, status

class MlflowException(Exception):
    def __init__(self, message, status, error_code="INTERNAL_ERROR"):
        super().__init__(message)
        self.status, self.error_code = status, error_code
    def get_http_status_code(self):
        return self.status

class Metric: ...
Param = RunTag = Metric
exceptions = entities = sys.modules["mlflow.exceptions"] = sys.modules["mlflow.entities"] = (
    sys.modules["mlflow"])
"""


@pytest.fixture
async def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MlflowProcess]:
    package = tmp_path / "packages" / "mlflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.chdir(tmp_path)  # the service can run anywhere
    monkeypatch.setenv("DRAY_DATABASE_URL", "postgresql://me:secret@host/db")
    found = MlflowProcess("http://host", (tmp_path / "storage").as_uri())
    yield found
    await found.stop()


async def status(process: MlflowProcess, run_id: str, limit_s: float = LIMIT_S) -> None:
    await process.call("set_status", run_id, "RUNNING", None, limit_s=limit_s)


async def test_calls_are_answered_by_kind(process: MlflowProcess, tmp_path: Path) -> None:
    await status(process, "fine")
    await status(process, "secrets")
    await status(process, "arguments")
    await status(process, "modules")
    with pytest.raises(MlflowRefused, match="no such run"):
        await status(process, "refused")
    for run_id, why in (
        *(("busy", "too many"), ("broken", "no route"), ("no mlflow", "no such page")),
        ("long", "^!{2000}$"),
    ):
        with pytest.raises(MlflowAway, match=why):
            await status(process, run_id)
    stored = tmp_path / "storage" / "jobs" / "other-name"
    stored.parent.mkdir()
    stored.write_text("abc")
    url = stored.as_uri()
    await process.call("upload", "run", "a/b/model.bin", url, 3, limit_s=LIMIT_S)
    with pytest.raises(MlflowRefused, match="HTTPError"):
        await process.call("upload", "too large", "a/b/model.bin", url, 3, limit_s=LIMIT_S)
    stored.unlink()
    with pytest.raises(MlflowRefused, match="other-name"):
        await process.call("upload", "run", "a/b/model.bin", url, 3, limit_s=LIMIT_S)


async def test_what_answers_everything_with_nothing_is_no_mlflow(process: MlflowProcess) -> None:
    with pytest.raises(MlflowAway, match="created no run"):
        await process.call("begin", "Default", "name", "job-1", 0, {}, limit_s=LIMIT_S)


async def test_an_upload_that_is_cut_off_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: MlflowProcess
) -> None:
    """The storage is not a folder, so uploads require a copy, which can be several gigabytes."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "packages" / "sitecustomize.py").write_text(
        "import fsspec; fsspec.filesystem('memory').pipe('/storage/key', b'abc')"
    )
    remote = MlflowProcess("http://host", "memory://storage")
    with pytest.raises(MlflowAway):
        await remote.call("upload", "dies", "a/b/model.bin", "memory://storage/key", 3, limit_s=60)
    await remote.stop()
    left = [path for path in (tmp_path / "scratch").rglob("*") if not path.is_dir()]
    assert [path.is_symlink() for path in left] == [True]


async def test_a_call_that_hangs_holds_up_no_other_and_ends_the_process_in_time(
    process: MlflowProcess,
) -> None:
    await status(process, "fine")
    first = process.pid
    hanging = asyncio.create_task(status(process, "hangs"))
    await status(process, "fine")
    with pytest.raises(MlflowAway, match="did not respond within 0 s"):
        await status(process, "hangs", limit_s=0.05)
    with pytest.raises(MlflowAway, match="exited"):
        await hanging
    await status(process, "fine")
    assert process.pid != first


async def test_a_process_that_dies_is_started_again(process: MlflowProcess) -> None:
    others = [asyncio.create_task(status(process, "hangs")) for _ in range(2)]
    with pytest.raises(MlflowAway, match="exited"):
        await status(process, "dies")
    assert all(
        isinstance(error, MlflowAway)
        for error in await asyncio.gather(*others, return_exceptions=True)
    )
    await status(process, "fine")


async def test_a_process_that_is_stopped_is_replaced(process: MlflowProcess) -> None:
    await status(process, "fine")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(MlflowAway):
        await status(process, "fine", limit_s=0.05)
    await status(process, "fine")


async def test_a_process_that_takes_long_to_die_holds_up_no_call_of_the_next(
    process: MlflowProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process could be waiting for a file server that is gone. Calls by the next process do not
    fail."""
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda *_: None)
    with pytest.raises(MlflowAway):
        await status(process, "hangs", limit_s=0.05)
    first = process._child
    await status(process, "fine")
    assert first is not None
    later = asyncio.create_task(status(process, "fine"))
    await asyncio.sleep(0)
    kill(first.process.pid, signal.SIGKILL)
    await first.reading
    await later
    monkeypatch.setattr(os, "kill", kill)


async def test_the_process_ends_with_its_parent(process: MlflowProcess) -> None:
    """The process ends when its parent closes the pipe."""
    await status(process, "fine")
    assert process._child is not None
    child = process._child.process
    assert child.stdin is not None
    hanging = asyncio.create_task(status(process, "hangs"))
    await asyncio.sleep(0)
    child.stdin.close()
    async with asyncio.timeout(LIMIT_S):
        await child.wait()
    assert child.returncode == 0
    with pytest.raises(MlflowAway):
        await hanging
