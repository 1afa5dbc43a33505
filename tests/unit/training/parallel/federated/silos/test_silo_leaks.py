"""Searches everything that leaves a silo's node for data that must not leave it.

Canaries are placed in names and values of the data, in lines printed by the rank, in metrics that
it reports, in files that it saves, and in the message of an exception. The test collects all
outgoing data: the bytes sent over its connections, all responses of the node's agent, the files in
the job's storage, and the tasks, environment, and arguments of the other ranks.
(`tests/unit/service/jobs/test_silos.py` searches everything that the service stores, launches, and
shows.)
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

from dray import train
from ray_workers.node import agent, silo_gate
from ray_workers.shared import paths
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.spool_reader import spool_key
from ray_workers.training.clients import silo_client
from ray_workers.training.elastic.store_server import loopback_store
from tests.marks import SOAK
from tests.unit.training.ranks import DEADLINE_S, Gang, make_task
from tests.unit.workers.node.test_agent import node_agent

CANARY = "Kanarie"
NUMBER = 7.125e-3
"""A value in the data that is exact in fp32 and fp64."""
NODE = "0" * 56


def canaries() -> Iterator[tuple[str, bytes]]:
    """Yield the texts to search for, as plain text and encoded."""
    for text in (CANARY, repr(NUMBER), f"{NUMBER:.4f}"):
        raw = text.encode()
        yield text, raw
        yield f"{text} in hex", raw.hex().encode()
        yield f"{text} backwards", raw[::-1]
        yield f"{text} in UTF-16", text.encode("utf-16-le")
        yield f"{text} in a URL", quote("".join(f"%{byte:02X}" for byte in raw)).encode()
        for shift in range(3):  # of its position among other bytes
            code = base64.b64encode(bytes(shift) + raw)
            yield f"{text} in base64", code[4 if shift else 0 : len(code) // 4 * 4 - 4]
    for kind in (torch.float32, torch.float64):
        value = torch.tensor([NUMBER], dtype=kind)
        yield f"a value in {kind}", value.numpy().tobytes()


def found_in(what: bytes) -> list[str]:
    lowered = what.lower()
    return [name for name, code in canaries() if code in what or code.lower() in lowered]


def test_the_search_finds_what_it_is_to_find() -> None:
    for data in (
        b"x" + CANARY.encode() + b"y",
        base64.b64encode(b"ab" + CANARY.encode() + b"cd"),
        CANARY.encode().hex().encode(),
        torch.tensor([1.0, NUMBER]).numpy().tobytes(),
        json.dumps({"value": NUMBER}).encode(),
    ):
        assert found_in(data), data
    assert not found_in(b"nothing of it")


def write_data(folder: Path, name: str, *, is_broken: bool) -> str:
    """Write a table with canaries in its name and its cells, and return its path."""
    path = folder / f"{CANARY}-{name}.csv"
    rows = [f"{number % 7}.5,{number % 5},{number % 2}" for number in range(60)]
    rows += [f"{NUMBER!r},1,1"] * 3
    if is_broken:
        rows.append(f"1.5,1,{CANARY} {NUMBER!r}")
    path.write_text("\n".join(["age,rooms,sick", *rows]) + "\n")
    return path.as_uri()


def careless(task: RankTask) -> None:
    """The code of a silo that leaks as much as possible in all ways that dray provides."""
    folder = Path(task.temp_dir)
    output = os.open(folder / f"output-{task.rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sent = (folder / f"sent-{task.rank}").open("ab", buffering=0)
    sendall = socket.socket.sendall

    class Recorded(socket.socket):
        def sendall(self, data: Any, flags: int = 0) -> None:
            sent.write(bytes(data))
            sendall(self, data, flags)

    socket.socket = Recorded  # type: ignore[misc]
    if task.rank == 0:
        (folder / "begun").write_bytes(
            Path("/proc/self/environ").read_bytes() + repr(dict(os.environ)).encode()
        )
        (folder / "begun").rename(folder / "others")
        return
    play = silo_client.SiloClient.play

    def tell_and_play(self: Any, given: Any) -> None:
        inputs, _ = self._samples.take(torch.arange(len(self._samples)))
        print(f"{CANARY}: {inputs.tolist()}, of {task.silo_source}")
        print(CANARY, file=sys.stderr)
        train.report(1, {f"train/{CANARY.lower()}": NUMBER, "val/loss": NUMBER})
        picture = folder / f"{CANARY}.png"
        picture.write_bytes(inputs.numpy().tobytes() + CANARY.encode())
        train.save_artifact(picture)
        play(self, given)

    silo_client.SiloClient.play = tell_and_play  # type: ignore[method-assign]


def job(folder: Path, rounds: int) -> dict[str, Any]:
    public = folder / "public.csv"
    rows = [f"{number % 9}.25,{number % 4},{number % 2}" for number in range(40)]
    public.write_text("\n".join(["age,rooms,sick", *rows]) + "\n")
    silos = [{"name": name, "node_labels": {"silo": name}} for name in ("north", "south")]
    return {
        "recipe": "tabular_classification",
        "data": {"source": public.as_uri(), "target": "sick"},
        "federated": {"silos": silos, "rounds": rounds, "metrics": ["train/loss"]},
    }


@dataclasses.dataclass
class Home:
    """A machine with one node on which all ranks run."""

    path: Path
    node: Any

    def run(self, spec: dict[str, Any], *, is_broken: bool) -> tuple[list[int | None], list[bytes]]:
        """Return (exit codes, everything that has left the silos' part of the node other than
        through the agent)."""
        store = loopback_store()
        told: list[bytes] = []
        sources = [write_data(self.path, n, is_broken=is_broken) for n in ("north", "south")]

        def make(*, rank: int, **options: Any) -> RankTask:
            task = make_task(self.path, spec, rank=rank, world_size=3, port=store.port, **options)
            spools = paths.spool_dir("deployment", NODE, "job", 1)
            temporary = self.path / "tmp"
            temporary.mkdir(exist_ok=True)
            task = dataclasses.replace(
                task,
                spool_dir=str(spools / spool_key(rank, 0, "metrics")),
                temp_dir=str(temporary),
            )
            if rank == 0:
                told.append(task.to_json().encode())
                return task
            task = dataclasses.replace(task, silo_source=sources[rank - 1])
            task = silo_gate.restricted(task, os.environ)
            silo_gate.note_silo(task)
            return task

        gang = Gang(make, 3, careless)
        try:
            gang.start()
            for process in gang.processes[1:]:
                process.join(DEADLINE_S)
            if not is_broken:
                gang.processes[0].join(DEADLINE_S)
            deadline = time.monotonic() + DEADLINE_S
            while not (self.path / "tmp" / "others").exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # the aggregator can start after the silos have ended
        finally:
            gang.kill()
        told += [path.read_bytes() for path in (self.path / "tmp").glob("sent-*")]
        told.append((self.path / "tmp" / "others").read_bytes())
        storage = self.path / "attempt-1"
        for path in [p for p in storage.rglob("*") if "pages" not in p.parts]:
            told.append(str(path.relative_to(storage)).encode())
            told.append(path.read_bytes() if path.is_file() else b"")
        return [process.exitcode for process in gang.processes], told

    async def agent_tells(self) -> bytes:
        read = await self.node.read("job", 1, {}, 1 << 24, 0.0)
        errors = await self.node.errors("job", 1)
        stacks = await self.node.stacks("job", 1, [0, 1, 2], 1.0)
        observed = await self.node.observe("job", 1, True, True)
        return repr((dict(read.data), errors, stacks, observed)).encode()

    def output(self, rank: int) -> bytes:
        return (self.path / "tmp" / f"output-{rank}").read_bytes()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    async def collect(*_: object) -> dict[int, str]:
        return {0: "aggregator", 1: f"in {CANARY}", 2: f"in {CANARY}"}

    monkeypatch.delenv(silo_gate.OPENS, raising=False)
    node = node_agent(tmp_path / "node", monkeypatch)
    monkeypatch.setattr(agent.stack_collector, "collect", collect)
    return Home(tmp_path, node)


async def test_nothing_but_updates_leaves_a_silo(home: Home) -> None:
    codes, left = home.run(job(home.path, rounds=2), is_broken=False)
    assert codes == [0, 0, 0], home.output(1).decode()
    left.append(await home.agent_tells())
    assert [found_in(each) for each in left if found_in(each)] == []
    assert CANARY.encode() in home.output(1), "the silo did leak what it could"
    spooled = b"".join(path.read_bytes() for path in (home.path / "node").rglob("*.seg"))
    assert found_in(spooled), "they are in what the agent reads, and does not let out"
    kept = list((home.path / "work").rglob(f"{CANARY}.png"))
    assert len(kept) == 2, "the pictures are on the silos' own node"
    assert max(len(each) for each in left) > 1000, "updates were sent"


@SOAK
async def test_the_reason_of_a_silos_error_stays_with_it(home: Home) -> None:
    codes, left = home.run(job(home.path, rounds=2), is_broken=True)
    assert codes == [-signal.SIGKILL, 1, 1], "the aggregator is ended from outside"
    told = await home.agent_tells()
    left.append(told)
    assert [found_in(each) for each in left if found_in(each)] == []
    assert b"bad_data" in told
    assert b"error in silo north" in told
    assert CANARY.encode() in home.output(1)
