"""Functions as jobs, and jobs that a program follows."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dray import AsyncClient, Client, errors, functions
from tests.unit.api.serving import LiveServer, serving
from tests.unit.service.helpers import log

FACTOR = 3
LOCK = threading.Lock()


def tripled(numbers: list[int], plus: int = 0) -> list[int]:
    return [helped(number) + plus for number in numbers]


def helped(number: int) -> int:
    return FACTOR * number


def locks() -> object:
    return LOCK


def call(folder: Path, rank: int = 0) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the code as a rank, in a process that can't import the tests' modules. Returns the
    process and the file with its result."""
    kept = folder / f"kept-{rank}"
    env = {
        "DRAY_SPOOL_DIR": str(folder / f"spool-{rank}"),
        "DRAY_ARTIFACT_URL": kept.as_uri(),
        "RANK": str(rank),
    }
    command = [sys.executable, functions.ENTRYPOINT]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done, kept / functions.RESULT


def test_a_function_travels_with_what_it_refers_to_and_rank_0_keeps_its_result(
    client: Client, server: LiveServer, tmp_path: Path
) -> None:
    job = client.submit_function(
        tripled, [[1, 2]], {"plus": 1}, num_workers=2, spec={"labels": {"a": "b"}}
    )
    assert (job.name, job.labels) == ("tripled", {"a": "b"})
    assert job.spec["resources"]["num_workers"] == 2
    client.download_code(job.id, tmp_path)
    done, result = call(tmp_path)
    assert done.returncode == 0, done.stderr
    assert functions.load_result(result) == [4, 7]
    done, result = call(tmp_path, rank=1)
    assert (done.returncode, result.exists()) == (0, False)
    content = (tmp_path / "kept-0" / functions.RESULT).read_bytes()
    server.train(job.id, server.artifact(job.id, functions.RESULT, content))
    server.succeed(job.id)
    assert client.attach(job.id).result() == [4, 7]
    assert asyncio.run(_result(server.url, job.id)) == [4, 7]


async def _result(url: str, job_id: str) -> Any:
    async with AsyncClient(url) as client:
        run = await client.attach(job_id)
        assert [event.to_state async for event in run][-1] == "SUCCEEDED"
        async with run:
            return await run.result()


@pytest.mark.parametrize(
    ("function", "said"),
    [(lambda: LOCK, "can't be pickled: .*lock"), (locks, "can't be pickled: .*lock")],
)
def test_a_function_that_can_not_be_pickled_is_refused_here(
    client: Client, function: Callable[..., Any], said: str
) -> None:
    with pytest.raises(errors.SpecError, match=said):
        client.submit_function(function)


def test_a_function_of_another_python_or_with_a_result_that_can_not_be_kept_says_so(
    tmp_path: Path,
) -> None:
    functions.write(tmp_path, _makes_a_lock, (), {})
    done, _ = call(tmp_path)
    assert "returned a lock that can't be pickled" in done.stderr
    program = tmp_path / functions.ENTRYPOINT
    here = json.dumps(list(sys.version_info[:2]))
    program.write_text(program.read_text().replace(here, "[3, 8]"))
    done, _ = call(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("the function was pickled by Python 3.8, but this node has")


def _makes_a_lock() -> object:
    return threading.Lock()


def test_another_program_in_the_document_is_refused(client: Client) -> None:
    with pytest.raises(errors.SpecError, match="the job runs the submitted function"):
        client.submit_function(helped, [1], spec={"recipe": "image_classification"})


def test_a_server_may_take_no_functions(tmp_path: Path) -> None:
    with serving(tmp_path, takes_functions=False) as server, Client(server.url) as client:
        with pytest.raises(errors.Forbidden, match="does not accept pickled functions"):
            client.submit_function(helped, [1])
        assert list(client.jobs()) == []


def test_a_job_is_followed_to_its_end_and_its_failure_raised(
    client: Client, server: LiveServer
) -> None:
    job_id = server.submit()
    with client.attach(job_id) as run:
        server.train(job_id, log(0, "hello"))
        server.succeed(job_id)
        assert [line.text for line in run.logs()] == ["hello"]
        assert [event.to_state for event in run][-1] == "SUCCEEDED"
        assert run.job().state == "SUCCEEDED"
    other = client.get(server.submit())
    with (
        pytest.raises(errors.JobFailed, match=f"job {other.id} is CANCELLED") as caught,
        client.attach(other) as run,
    ):
        run.cancel()
    assert caught.value.job.id == other.id


def test_a_block_that_raises_does_not_wait_for_the_job(client: Client, server: LiveServer) -> None:
    job_id = server.submit()
    with pytest.raises(ZeroDivisionError), client.attach(job_id):
        1 / 0  # noqa: B018
    assert client.get(job_id).state == "QUEUED"


def test_the_arguments_of_a_function_are_parameters(server: LiveServer) -> None:
    class Unusual:
        pass

    def trained(lr: float, sizes: list[int], *, options: dict[str, Any], seed: int = 7) -> None:
        pass

    options: dict[str, Any] = {
        "name": "a",
        "api_key": "s",
        "deep": {"on": True},
        "nan": float("nan"),
        "own": Unusual(),
        "batch": np.int64(64),
        "momentum": np.float32(0.5),
    }
    expected = {"lr": 0.1, "options.name": "a", "options.deep.on": True, "seed": 7}
    expected |= {"options.batch": 64, "options.momentum": 0.5}
    assert functions.parameters(trained, [0.1, [1]], {"options": options}) == expected
    assert functions.parameters(trained, [], {}) == {}  # the call itself will fail
    options["own"] = options  # a dictionary that contains itself
    assert functions.parameters(trained, [0.1, [1]], {"options": options})["lr"] == 0.1
    with Client(server.url) as client:
        jobs = [client.submit_function(tripled, ([1],), {"plus": plus}) for plus in (1, 2)]
        pointers = {each.pointer: each.values for each in client.compare(jobs).differences}
        assert pointers["/parameters/plus"] == [1, 2]
        assert client.frame(jobs)["parameters.plus"].tolist() == [1, 2]
        with pytest.raises(errors.Unprocessable) as refused:
            client.submit({"script": {"entrypoint": "/a.py", "parameters": {"a": [1]}}})
        assert refused.value.pointer is not None
        assert refused.value.pointer.startswith("/script/parameters/a")
