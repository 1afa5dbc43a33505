"""Environments are built once per node, and a builder that fails or dies leaves nothing valid.

The wheels are made here, and uv uses no index.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ray_workers.node import shared_work
from ray_workers.node.environments import build, build_limiter
from ray_workers.node.environments.environments import Environments
from ray_workers.node.environments.eviction import evict
from ray_workers.node.environments.programs import HEAD_BYTES, TAIL_BYTES, Output, mark_of
from ray_workers.node.environments.uv import sentence_of, state_of
from ray_workers.shared.folders import environment_overlay as overlay
from ray_workers.shared.node_needs import BuildState, EnvironmentPolicy, NodeEnvironment
from ray_workers.shared.processes.procfs import MARK_VARIABLE, mark_process, started_ticks
from ray_workers.shared.secret_files import Masker
from tests.marks import ONE_SET, SOAK
from tests.unit.workers.forked import PATIENCE_S, until
from tests.wheels import from_wheels, make_wheel, served

POLICY = EnvironmentPolicy.open()


@pytest.fixture
def node(tmp_path: Path) -> Environments:
    return Environments(tmp_path / "preloaded", tmp_path / "environments")


async def settle(
    node: Environments,
    environment: dict[str, Any],
    policy: EnvironmentPolicy = POLICY,
    *,
    keeps_all: bool = False,
) -> NodeEnvironment:
    """The answer once the node has stopped building it."""
    while True:
        answer = await node.prepare(environment, policy, keeps_all=keeps_all)
        if answer.state is not BuildState.BUILDING:
            return answer


async def test_a_package_is_installed_once_and_the_nodes_own_stay(
    node: Environments, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "w", "hello_pkg", "1.2", requires=["numpy", "packaging"])
    wanted = from_wheels(tmp_path / "w", "hello-pkg")
    first = await settle(node, wanted)
    assert first.state is BuildState.READY, first
    assert first.packages == ("hello-pkg==1.2",)
    root = tmp_path / "environments"
    record = overlay.find(root, overlay.key_of(wanted, keeps_all=False))
    assert record is not None
    assert record.modules == ("hello_pkg",)
    packages = root / record.folder / "site"
    assert not (packages / "numpy").exists()
    marker = packages / "marker"
    marker.touch()  # an environment that was rebuilt would lack it
    assert (await settle(node, wanted)).state is BuildState.READY
    assert marker.exists()
    ran = subprocess.run(
        [sys.executable, "-c", "import hello_pkg; print(hello_pkg.VERSION)"],
        env={**os.environ, **overlay.variables(root, record, os.environ)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "1.2"


@SOAK
async def test_requirements_replace_the_nodes_package_and_the_answer_names_it(
    node: Environments, tmp_path: Path
) -> None:
    (tmp_path / "preloaded").write_text("numpy\ntorch\n")
    make_wheel(tmp_path / "w", "numpy", "0.0.1")
    wanted = from_wheels(tmp_path / "w", "numpy==0.0.1")
    answer = await settle(node, wanted)
    assert (answer.state, answer.replaced) == (BuildState.READY, ("numpy",))
    kept = await settle(node, wanted, keeps_all=True)
    assert kept.state is BuildState.FAILED
    assert "numpy" in kept.message


@ONE_SET
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["no-such-package-here"], "no-such-package-here"),
        (["hello-pkg<1", "hello-pkg>2"], "unsatisfiable"),
        (["hello-pkg==77"], "hello-pkg==77"),
    ],
)
async def test_what_can_not_be_installed_fails_with_the_installers_sentence(
    node: Environments, tmp_path: Path, lines: list[str], words: str
) -> None:
    make_wheel(tmp_path / "w", "hello_pkg")
    answer = await settle(node, from_wheels(tmp_path / "w", *lines))
    assert answer.state is BuildState.FAILED
    assert words in answer.message
    assert "\n" not in answer.message
    assert words in answer.log
    left = [p.name for p in (tmp_path / "environments").iterdir() if p.suffix == ".json"]
    assert left == []


@SOAK
async def test_a_setup_command_runs_in_the_folder_and_its_failure_is_named(
    node: Environments, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "w", "hello_pkg")
    good = from_wheels(tmp_path / "w", "hello-pkg") | {
        "setup": ["python -c 'import hello_pkg; print(1)' > made.txt", "test -f hello_pkg.py"]
    }
    assert (await settle(node, good)).state is BuildState.READY
    record = overlay.find(tmp_path / "environments", overlay.key_of(good, keeps_all=False))
    assert record is not None
    made = tmp_path / "environments" / record.folder / "site" / "made.txt"
    assert made.read_text() == "1\n"
    bad = await settle(node, {"setup": ["echo it is so; exit 7"]})
    assert bad.state is BuildState.FAILED
    assert bad.message == "the setup command 'echo it is so; exit 7' exited with code 7: it is so"


async def test_a_setup_command_that_replaces_files_with_pipes_does_not_stop_a_builder(
    node: Environments,
) -> None:
    pipes = "cd ..; for each in log requirements.txt; do rm -f $each; mkfifo $each; done"
    answer = await asyncio.wait_for(settle(node, {"setup": [pipes, "echo next"]}), PATIENCE_S)
    assert answer.state is BuildState.READY, answer
    failed = {"setup": [pipes, "echo the reason; exit 3"]}
    answer = await asyncio.wait_for(settle(node, failed), PATIENCE_S)
    assert answer.message.endswith("exited with code 3: the reason")
    assert answer.log == ""


async def test_a_build_that_takes_too_long_is_ended_with_all_it_started(
    node: Environments, tmp_path: Path
) -> None:
    pid_file, new = tmp_path / "pid", tmp_path / "new"
    wanted = {"setup": [f"sleep 1000 & echo $! > {new}; mv {new} {pid_file}; wait"]}
    for limit_s in (0.5, 5.0, 50.0):
        answer = await settle(node, wanted, replace(POLICY, build_limit_s=limit_s))
        assert answer.state is BuildState.FAILED
        assert f"the build did not finish within {limit_s:g} s" in answer.message
        if pid_file.exists():  # otherwise the machine is too slow for the limit
            break
    pid = int(pid_file.read_text())
    await until(lambda: started_ticks(pid) is None, "what the build started goes on")


def sleeper(pid: Path) -> str:
    """A setup command that starts a child in its own session, and sleeps."""
    started = f"sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000'"
    return f"(setsid env -i PATH=$PATH {started} &) ; sleep 1000"


async def is_running(node: Environments, pid: Path, owner: str, **fields: Any) -> int:
    """Ask until the setup command runs; returns the pid of its child."""
    policy = replace(POLICY, owner=owner)
    async with asyncio.timeout(PATIENCE_S):
        while not pid.exists():
            answer = await node.prepare({"setup": [sleeper(pid)]}, policy, keeps_all=False)
            assert answer.state is BuildState.BUILDING, answer
            assert answer.message == "builds the environment"  # which only runs a command
    return int(pid.read_text())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "FIRST_ANSWER_S", 0.02)


@pytest.mark.usefixtures("quick")
async def test_a_build_ends_with_the_last_owner_whose_jobs_need_it(
    node: Environments, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    ann, bob = (replace(POLICY, owner=owner) for owner in ("ann", "bob"))
    child = await is_running(node, pid, "ann")
    assert os.getpriority(os.PRIO_PROCESS, child) == 19
    wanted = {"setup": [sleeper(pid)]}
    await node.prepare(wanted, bob, keeps_all=False)
    await node.forget(wanted, ann, keeps_all=False)
    await asyncio.sleep(0.5)
    assert started_ticks(child) is not None, "another one needs it"
    await node.forget(wanted, bob, keeps_all=False)
    await until(lambda: started_ticks(child) is None, "what the build started goes on")
    pid.unlink()
    again = await is_running(node, pid, "ann")
    assert again != child, "a job that comes later has it built anew"
    await node.forget(wanted, ann, keeps_all=False)
    await until(lambda: started_ticks(again) is None, "what the build started goes on")


@pytest.mark.usefixtures("quick")
async def test_a_build_that_no_service_asks_for_ends(
    node: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like after a cancellation while no service ran; also if the command is stopped."""
    child = await is_running(node, tmp_path / "pid", "ann")
    os.kill(child, signal.SIGSTOP)
    monkeypatch.setattr(shared_work, "WANTED_S", 0.2)
    await until(lambda: started_ticks(child) is None, "what the build started goes on")


@pytest.mark.usefixtures("quick")
async def test_the_builds_of_one_user_hold_up_no_other(node: Environments, tmp_path: Path) -> None:
    ann = replace(POLICY, owner="ann")
    children = [await is_running(node, tmp_path / f"ann-{n}", "ann") for n in range(2)]
    third = {"setup": [f"touch {tmp_path}/third"]}
    answer = await node.prepare(third, ann, keeps_all=False)
    assert answer.state is BuildState.BUILDING
    assert answer.message == "waits for one of the user's 2 running builds on this node to finish"
    bob = replace(POLICY, owner="bob")
    assert (await settle(node, {"setup": ["true"]}, bob)).state is BuildState.READY
    assert not (tmp_path / "third").exists()
    # It is built for any user with capacity: here for a user who requests the same.
    assert (await settle(node, third, bob)).state is BuildState.READY
    fourth = {"setup": [f"touch {tmp_path}/fourth"]}
    waiting = asyncio.ensure_future(settle(node, fourth, ann))
    await node.forget({"setup": [sleeper(tmp_path / "ann-0")]}, ann, keeps_all=False)
    assert (await waiting).state is BuildState.READY, "a place that became free is taken"
    assert started_ticks(children[0]) is None
    await node.forget({"setup": [sleeper(tmp_path / "ann-1")]}, ann, keeps_all=False)
    await until(lambda: started_ticks(children[1]) is None, "what the build started goes on")


async def test_no_more_builds_run_than_a_node_allows() -> None:
    builds, running, most = build_limiter.BuildLimiter(), 0, 0
    assert builds.why_waiting("k0", "user 0") is None, "none runs, so it is about to begin"
    go_on = asyncio.Event()

    async def run(number: int) -> None:
        nonlocal running, most
        builds.want(f"k{number}", f"user {number}")
        async with builds.acquire(f"k{number}"):
            running += 1
            most = max(most, running)
            await go_on.wait()
            running -= 1

    works = [
        asyncio.ensure_future(run(number)) for number in range(build_limiter.BUILDS_AT_A_TIME + 2)
    ]
    while running < build_limiter.BUILDS_AT_A_TIME:
        await asyncio.sleep(0)
    assert (
        builds.why_waiting("k8", "user 8")
        == "waits for one of the 8 running builds on this node to finish"
    )
    assert builds.why_waiting("k0", "user 0") is None
    builds.forget("k9", "user 9")
    with pytest.raises(shared_work.Abandoned):
        await works[9]
    go_on.set()
    await asyncio.gather(*works[:9])
    assert most == build_limiter.BUILDS_AT_A_TIME


async def test_what_an_agent_left_that_was_killed_ends_with_the_start_of_the_next(
    node: Environments, tmp_path: Path
) -> None:
    half = tmp_path / "environments" / "a1b2-0000"
    (half / "site").mkdir(parents=True)
    marked = {**os.environ, MARK_VARIABLE: mark_of(half)}
    with subprocess.Popen(["sleep", "1000"], start_new_session=True, env=marked) as left:
        # As a build does. While a process calls exec, the kernel shows an empty environment.
        mark_process(left.pid, mark_of(half))
        await node.clear_up()
        assert left.wait() < 0
    assert not half.exists()


@pytest.mark.parametrize("ending", ["true", "exit 3"])
async def test_a_child_in_a_session_of_its_own_ends_with_the_command(
    node: Environments, tmp_path: Path, ending: str
) -> None:
    pids = [tmp_path / "one", tmp_path / "two"]
    sleepers = [
        f"setsid {cleared} sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000' &"
        for cleared, pid in zip(("", "env -i PATH=$PATH"), pids, strict=True)
    ]
    seen = f"until test -e {pids[0]} -a -e {pids[1]}; do sleep 0.01; done"
    wanted = {"setup": ["\n".join([*sleepers, seen, ending])]}
    built = asyncio.ensure_future(settle(node, wanted))
    await until(lambda: all(pid.exists() for pid in pids), "nothing was started")
    numbers = [int(pid.read_text()) for pid in pids]
    answer = await built
    assert answer.state is (BuildState.READY if ending == "true" else BuildState.FAILED)
    assert [started_ticks(number) for number in numbers] == [None, None]


@SOAK
async def test_of_much_output_the_beginning_and_the_end_are_kept(
    node: Environments, tmp_path: Path
) -> None:
    flood = "echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo last; exit 3"
    answer = await settle(node, {"setup": [flood]})
    assert answer.message.endswith("exited with code 3: last")
    (log,) = (tmp_path / "environments").glob("*.log")
    text = log.read_text()
    assert "\nfirst\n" in text
    assert "bytes are left out]" in text
    assert len(text) < HEAD_BYTES + 2 * TAIL_BYTES + 1000


def test_no_part_of_a_secret_is_left_where_output_is_cut() -> None:
    for cut in range(len("canary-77")):
        output = Output()
        output.add(b"x" * (HEAD_BYTES - cut) + b"canary-77")
        output.add(b"y" * 3 * TAIL_BYTES)
        output.add(b"canary-77" + b"z" * (TAIL_BYTES - cut))
        text = output.text(Masker({"TOKEN": "canary-77"}))
        assert "left out" in text
        assert not set("cnry") & set(text.replace("bytes are left out", ""))


async def test_an_environment_that_is_too_large_is_ended_while_it_grows(node: Environments) -> None:
    wanted = {"setup": ["head -c 300000 /dev/zero > big; sleep 1000"]}
    answer = await settle(node, wanted, replace(POLICY, limit_bytes=200_000))
    assert answer.state is BuildState.FAILED
    assert "200000 bytes" in answer.message
    assert "DRAY_ENVIRONMENT_LIMIT_BYTES" in answer.message


async def test_an_installer_that_the_kernel_killed_is_tried_again(
    node: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "uv"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr(build, "uv_program", lambda: str(killed))
    answer = await settle(node, {"python_packages": ["hello-pkg"]})
    assert (answer.state, answer.message) == (
        BuildState.UNREACHABLE,
        "uv was killed by signal 9",
    )


async def test_a_setup_command_that_the_kernel_killed_is_tried_again(node: Environments) -> None:
    answer = await settle(node, {"setup": ["echo it grows; kill -9 $$"]})
    assert answer.state is BuildState.UNREACHABLE
    assert "was killed by signal 9: it grows" in answer.message


async def test_packages_that_fill_the_installers_cache_end_the_build(
    node: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv has all packages in its cache before it puts the first into the environment."""
    fills = tmp_path / "uv"
    fills.write_text(
        '#!/bin/sh\nmkdir -p "$UV_CACHE_DIR"; sleep 0.5\n'
        'head -c 300000 /dev/zero > "$UV_CACHE_DIR/big"; exec sleep 1000\n'
    )
    fills.chmod(0o700)
    monkeypatch.setattr(build, "uv_program", lambda: str(fills))
    wanted = {"python_packages": ["hello-pkg"]}
    answer = await settle(node, wanted, replace(POLICY, limit_bytes=200_000))
    assert answer.state is BuildState.UNREACHABLE, "they may belong to another build"
    assert "DRAY_ENVIRONMENT_LIMIT_BYTES" in answer.message


@SOAK
async def test_an_index_that_does_not_answer_is_asked_again(
    node: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    wanted = {"requirements": "--index-url http://127.0.0.1:1/simple\nhello-pkg\n"}
    answer = await settle(node, wanted)
    assert answer.state is BuildState.UNREACHABLE
    assert "127.0.0.1:1" in answer.message


async def test_of_the_nodes_settings_uv_gets_those_of_indexes_alone(
    node: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "w", "hello_pkg", "1.2")
    (tmp_path / "pins").write_text("hello-pkg==7\n")
    monkeypatch.setenv("UV_CONSTRAINT", str(tmp_path / "pins"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "elsewhere"))
    with served(tmp_path / "w") as url:
        monkeypatch.setenv("UV_FIND_LINKS", url)
        answer = await settle(node, {"requirements": "--no-index\nhello-pkg\n"})
    assert answer.packages == ("hello-pkg==1.2",), answer
    assert not (tmp_path / "elsewhere").exists()


async def test_two_nodes_of_a_machine_build_it_once(tmp_path: Path) -> None:
    root, runs = tmp_path / "environments", tmp_path / "runs"
    wanted = {"setup": [f"echo run >> {runs}"]}
    nodes = [Environments(tmp_path / "preloaded", root) for _ in range(3)]
    answers = await asyncio.gather(*(settle(node, wanted) for node in nodes))
    assert {answer.state for answer in answers} == {BuildState.READY}
    assert runs.read_text() == "run\n"


async def test_a_holder_of_the_lock_that_stands_still_is_not_waited_for_without_end(
    node: Environments, tmp_path: Path
) -> None:
    wanted = {"setup": ["true"]}
    root = tmp_path / "environments"
    root.mkdir(mode=0o700)
    with (root / f".lock-{overlay.key_of(wanted, keeps_all=False)}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for limit_s in (1.0, 10.0, 100.0):  # half of which is spent waiting for the holder
            answer = await settle(node, wanted, replace(POLICY, build_limit_s=limit_s))
            if answer.state is BuildState.READY or "did not finish within" not in answer.message:
                break  # otherwise the machine is too slow for the limit
    assert answer.state is BuildState.READY


async def test_what_a_killed_builder_left_is_no_environment_and_goes(
    node: Environments, tmp_path: Path
) -> None:
    wanted = {"setup": ["true"]}
    root = tmp_path / "environments"
    key = overlay.key_of(wanted, keeps_all=False)
    half = root / f"{key}-0000"
    (half / "site" / "torch").mkdir(parents=True)
    root.chmod(0o700)
    marked = {**os.environ, MARK_VARIABLE: mark_of(half)}
    with subprocess.Popen(["sleep", "1000"], start_new_session=True, env=marked) as left:
        assert (await settle(node, wanted)).state is BuildState.READY
        record = overlay.find(root, key)
        assert record is not None
        assert record.folder != half.name
        assert left.wait() < 0  # when a build is over, the node clears up
    while half.exists():
        await asyncio.sleep(0.01)
    assert (root / record.folder).is_dir()


async def test_environments_go_by_their_last_use_and_never_while_a_rank_has_one(
    node: Environments, tmp_path: Path
) -> None:
    root = tmp_path / "environments"
    big = "head -c 200000 /dev/zero > big"
    all_wanted: list[dict[str, Any]] = [{"setup": [big, f"true {n}"]} for n in range(4)]
    records = []
    for number, wanted in enumerate(all_wanted):
        await settle(node, wanted)
        key = overlay.key_of(wanted, keeps_all=False)
        record = overlay.find(root, key)
        assert record is not None
        records.append(record)
        used_at = time.time() - (8000 if number < 3 else 1) + number
        os.utime(root / f"{key}.json", (used_at, used_at))
    held = overlay.hold(root, records[0])
    evict(root, 250_000)
    there = [(root / record.folder).is_dir() for record in records]
    os.close(held)
    assert there == [True, False, False, True]
    assert overlay.find(root, overlay.key_of(all_wanted[1], keeps_all=False)) is None
    assert (await settle(node, all_wanted[1])).state is BuildState.READY


async def test_a_secret_that_is_missing_or_open_to_others_is_named(
    node: Environments, tmp_path: Path
) -> None:
    policy = replace(POLICY, secrets_dir=str(tmp_path))
    missing = await settle(node, {"secrets": ["TOKEN"]}, policy)
    assert missing.state is BuildState.FAILED
    assert "TOKEN" in missing.message
    (tmp_path / "TOKEN").write_text("hush-hush")
    (tmp_path / "TOKEN").chmod(0o644)
    opened = await settle(node, {"secrets": ["TOKEN"]}, policy)
    assert "0600" in opened.message
    assert "hush" not in opened.message
    (tmp_path / "TOKEN").chmod(0o600)
    assert (await settle(node, {"secrets": ["TOKEN"]}, policy)).state is BuildState.READY


class PrivateIndex(BaseHTTPRequestHandler):
    """An index with one wheel, which needs a password."""

    wheel: Path
    expected: str

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != self.expected:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body, kind = self.wheel.read_bytes(), "application/octet-stream"
        if not self.path.endswith(".whl"):
            link = f'<a href="{self.wheel.name}">{self.wheel.name}</a>'
            body, kind = link.encode(), "text/html"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def private_index(tmp_path: Path) -> Iterator[str]:
    wheel = make_wheel(tmp_path / "w", "hello_pkg", "6.0")
    expected = "Basic " + base64.b64encode(b"me:canary-77").decode()
    handler = type("Handler", (PrivateIndex,), {"wheel": wheel, "expected": expected})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


async def test_a_private_index_gets_the_secrets_password_and_no_file_of_the_node_has_it(
    node: Environments, tmp_path: Path, private_index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_DEFAULT_INDEX", private_index)  # no other index is used
    folder = tmp_path / "secrets"
    folder.mkdir()
    for name, value in {"GOOD": "me:canary-77\n", "WRONG": "me:canary-88"}.items():
        (folder / name).write_text(value)
        (folder / name).chmod(0o600)
    policy = replace(POLICY, secrets_dir=str(folder))
    index = {"url": private_index, "secret": "WRONG"}
    wrong = await settle(node, {"python_packages": ["hello-pkg"], "index": index}, policy)
    assert wrong.state is BuildState.FAILED
    assert "hello-pkg" in wrong.message
    index = {"url": private_index, "secret": "GOOD"}
    right = await settle(node, {"python_packages": ["hello-pkg"], "index": index}, policy)
    assert right.packages == ("hello-pkg==6.0",), right
    assert "canary" not in f"{wrong}{right}"
    for path in (tmp_path / "environments").rglob("*"):
        assert not path.is_file() or b"canary" not in path.read_bytes(), path


async def test_packages_that_an_owners_secret_gave_are_not_handed_to_another_owner(
    node: Environments, tmp_path: Path, private_index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_DEFAULT_INDEX", private_index)
    for folder, value in {".": "me:wrong", "owners/ann": "me:canary-77"}.items():
        place = tmp_path / "secrets" / folder / "TOKEN"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(value)
        place.chmod(0o600)
    policy = replace(POLICY, secrets_dir=str(tmp_path / "secrets"))
    index = {"url": private_index, "secret": "TOKEN"}
    wanted = {"python_packages": ["hello-pkg"], "index": index}
    hers = await settle(node, wanted, replace(policy, owner="ann"))
    assert hers.packages == ("hello-pkg==6.0",), hers
    his = await settle(node, wanted, replace(policy, owner="bob"))
    assert his.state is BuildState.FAILED, his


def test_uvs_words_become_one_sentence() -> None:
    text = "Using Python\nerror: No solution found\n  cause: Because a was not found\n"
    assert sentence_of(text) == "No solution found: Because a was not found"
    assert state_of(text) is BuildState.FAILED
    refused = "Failed to fetch: https://x\n cause: HTTP status client error (401 Unauthorized)"
    assert state_of(refused) is BuildState.FAILED
    gone = "Failed to fetch: https://x\n cause: HTTP status server error (503 Service Unavailable)"
    assert state_of(gone) is BuildState.UNREACHABLE
