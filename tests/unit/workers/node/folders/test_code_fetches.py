"""Code that a node fetches before a job starts, and restores when it does."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ray_workers.node import shared_work
from ray_workers.node.folders import remote_code
from ray_workers.node.folders.code_cache import CodeCache
from ray_workers.node.folders.code_fetches import AT_A_TIME, CodeFetches
from ray_workers.node.folders.git_commit import CodeUnreachable
from ray_workers.shared.node_needs import BuildState, NodeEnvironment, RemoteCodeRef
from tests.unit.workers.node.folders.git_server import GitServer, repository, serving
from tests.unit.workers.node.folders.test_remote_code import FILES, below, of_git


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as found:
        yield found


async def settled(fetches: CodeFetches, code: RemoteCodeRef) -> NodeEnvironment:
    async with asyncio.timeout(60):
        while (answer := await fetches.prepare(code)).state is BuildState.BUILDING:
            pass
    return answer


async def test_what_was_fetched_before_is_put_back_without_the_server(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    fetches = CodeFetches(tmp_path / "copies")
    with serving(tmp_path / "served") as server:
        code = of_git(server, repository(server.folder / "repo", FILES))
        assert (await settled(fetches, code)).state is BuildState.READY
    await fetches.put_into(code, "", tmp_path / "work")
    assert below(tmp_path / "work") == FILES
    assert (await CodeFetches(tmp_path / "copies").prepare(code)).state is BuildState.READY


async def test_a_slow_server_is_reported_and_asked_once(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_work, "FIRST_ANSWER_S", 0.01)
    calls, goes_on = [], threading.Event()
    fetch = CodeCache.fetch_remote

    def slow(self: CodeCache, code: RemoteCodeRef, _: object = None) -> None:
        calls.append(code)
        goes_on.wait(60)
        fetch(self, code)

    monkeypatch.setattr(CodeCache, "fetch_remote", slow)
    code = of_git(server, repository(server.folder / "repo", FILES))
    fetches = CodeFetches(tmp_path / "copies")
    answers = [await fetches.prepare(code) for _ in range(3)]
    assert {(a.state, a.message) for a in answers} == {
        (BuildState.BUILDING, "fetches it from 127.0.0.1")
    }
    goes_on.set()
    assert (await settled(fetches, code)).state is BuildState.READY
    assert len(calls) == 1


async def test_a_fetch_that_no_job_wants_any_more_is_ended(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_work, "FIRST_ANSWER_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/repo"
        code = replace(of_git(server, "a" * 40), git=url)
        fetches = CodeFetches(tmp_path / "copies")
        for owner in ("ann", "bob"):
            answer = await fetches.prepare(code, owner)
            assert answer.state is BuildState.BUILDING
        connection, _ = await asyncio.to_thread(silent.accept)  # git has connected
        started = [one for one in psutil.process_iter() if url in " ".join(_command(one))]
        assert started
        fetches.forget(code, "ann")
        await asyncio.sleep(2 * remote_code.ASK_AGAIN_S)
        assert all(one.is_running() for one in started), "another user's job wants it"
        fetches.forget(code, "bob")
        await asyncio.to_thread(psutil.wait_procs, started, 30)
        assert not any(one.is_running() for one in started)
        connection.close()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def test_a_host_that_does_not_answer_delays_no_other_code(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_work, "FIRST_ANSWER_S", 0.01)
    goes_on = threading.Event()
    fetch = CodeCache.fetch_remote

    def slow(self: CodeCache, code: RemoteCodeRef, _: object = None) -> None:
        if "127.0.0.2" in (code.git or ""):
            goes_on.wait(60)
            raise CodeUnreachable("timed out")
        fetch(self, code)

    monkeypatch.setattr(CodeCache, "fetch_remote", slow)
    fetches = CodeFetches(tmp_path / "copies")
    away = replace(of_git(server, "a" * 40), git="http://127.0.0.2/x")
    asked = [replace(away, commit=f"{number:040x}") for number in range(AT_A_TIME + 1)]
    messages = [(await fetches.prepare(code)).message for code in asked]
    assert messages[0] == "fetches it from 127.0.0.2"
    assert messages[-1] == "is about to fetch it from 127.0.0.2"
    code = of_git(server, repository(server.folder / "repo", FILES))
    assert (await settled(fetches, code)).state is BuildState.READY
    goes_on.set()
    assert (await settled(fetches, asked[0])).state is BuildState.UNREACHABLE


async def test_a_commit_that_is_not_there_is_final_and_a_server_that_is_not_is_tried_again(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_work, "RETRY_PAUSES_S", (0.0,))
    commit = repository(server.folder / "repo", FILES)
    fetches = CodeFetches(tmp_path / "copies")
    refused = await settled(fetches, of_git(server, "a" * 40))
    assert refused.state is BuildState.FAILED
    assert "not our ref" in refused.message
    fetch = CodeCache.fetch_remote

    def away(*_: object) -> None:
        raise CodeUnreachable("fatal: unable to access it: Connection refused")

    monkeypatch.setattr(CodeCache, "fetch_remote", away)
    code = of_git(server, commit)
    answer = await settled(fetches, code)
    assert (answer.state, "refused" in answer.message) == (BuildState.UNREACHABLE, True)
    monkeypatch.setattr(CodeCache, "fetch_remote", fetch)
    assert (await settled(fetches, code)).state is BuildState.READY
