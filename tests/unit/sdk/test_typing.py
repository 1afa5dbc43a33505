"""Type-check the package as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api as mypy

from tests.integration.harness import ROOT
from tests.marks import SOAK

PROGRAM = """
import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import dray
from dray import errors


def train(client: dray.Client) -> list[Path]:
    spec: dray.JobSpec = dray.validate({"recipe": "image_classification"})
    job = client.submit(spec, idempotency_key="mine")
    found: Iterator[str] = (
        one.id
        for one in client.jobs(
            state=["RUNNING", dray.JobState.QUEUED],
            label={"team": "vision"},
            created_after=datetime(2026, 1, 1, tzinfo=UTC),
        )
    )
    print(list(found), job.created_at.year)
    for event in client.follow(job.id):
        print(event.to_state, event.message)
    try:
        done = client.wait(job.id, timeout_s=60)
    except errors.WaitTimeout as timeout:
        done = timeout.job
    except errors.ApiError as error:
        print(error.code, error.pointer, error.hint)
        raise
    losses: list[float | str] = [
        point.value for point in client.follow_metrics(done.id, ["train/loss"])
    ]
    print(losses)
    return client.download(done.id, "out", on_progress=lambda path, here, total: None)


async def look() -> str:
    async with dray.AsyncClient(retry=dray.Retry(patience_s=1.0)) as client:
        async with aclosing(client.follow("job-a")) as following:
            async for event in following:
                print(event.seq)
                break
        async for job in client.jobs(state="FAILED"):
            async for line in client.logs(job.id, rank=0):
                return line.text
        return (await client.cluster()).reason or ""


asyncio.run(look())
"""


def check(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    path = tmp_path / "program.py"
    path.write_text(program)
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    # The project's own type check covers whatever this follows into `dray`.
    out, err, code = mypy.run(
        [
            *("--strict", "--config-file=", "--follow-imports=silent"),
            *("--cache-dir", str(tmp_path / "cache"), str(path)),
        ]
    )
    assert not err
    return out, code


@SOAK
def test_a_strict_program_passes_and_a_wrong_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, code = check(tmp_path, PROGRAM, monkeypatch)
    assert code == 0, out
    wrong = 'import dray\nwith dray.Client() as c:\n    x: int = c.get("j").id\n    c.wait(3)\n'
    out, code = check(tmp_path, wrong, monkeypatch)
    assert code == 1
    assert "program.py:3" in out
    assert "program.py:4" in out
