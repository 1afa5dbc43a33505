"""The gateway in the service, without a driver."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import service
from ray_workers.shared.processes.silence import Silence
from service.cluster.port import ClusterSnapshot, ClusterUnavailable
from service.cluster.ray import gateway as gateway_module
from service.cluster.ray.embedded import EmbeddedRay
from service.cluster.ray.gateway import DRIVER, JOIN, RAY, GatewayCluster, RayTarget
from service.config.logging_setup import LogFormat

PATIENCE_S = 60.0
STARTS_WITHOUT_RAY = """
import logging, runpy
from service.cluster.ray import driver

class Warns:
    def __init__(self, config):
        pass

    async def start(self):
        logging.getLogger("service.cluster.ray.driver").info("it joins")
        raise ConnectionError("there is no Ray")

driver.RayCluster = Warns
runpy.run_module("service.cluster.ray.gateway", run_name="__main__")
"""


def gateway_of(log_format: LogFormat = "text") -> GatewayCluster:
    """Return the configuration of a Ray that does not exist."""
    return GatewayCluster(
        RayTarget(
            deployment_id="d",
            storage_url="file:///s",
            storage_nonce="nonce",
            embedded=None,
            silence_limit_s=60.0,
            log_format=log_format,
            address="127.0.0.1:1",
        )
    )


async def test_a_stop_while_the_driver_joins_leaves_no_task_whose_error_nobody_takes() -> None:
    gateway = gateway_of()
    before = asyncio.all_tasks()
    joining = asyncio.create_task(gateway._receive_in_time(asyncio.StreamReader()))
    while len(asyncio.all_tasks() - before) < 2:
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    joining.cancel()
    _, pending = await asyncio.wait(left, timeout=PATIENCE_S)
    assert not pending


def test_what_ray_prints_into_the_log_of_the_service_has_no_colour_codes() -> None:
    gateway = gateway_of()
    show = (
        "from ray._private.worker import print_to_stdstream\n"
        "print_to_stdstream({'ip': '', 'localhost': '', 'pid': 'raylet', 'is_err': False,"
        " 'lines': ['a node is dead']}, ignore_prefix=False)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", show],
        env=gateway._child_environment(),
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "(raylet) a node is dead\n", shown.stderr


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_child_logs_from_info_on_in_the_format_of_the_service(log_format: LogFormat) -> None:
    gateway = gateway_of(log_format)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        config = pickle.dumps(gateway._config(None))
        ours.sendall(struct.pack("!I", len(config)) + config)
        _, _, _, *arguments = gateway._child_command(theirs.fileno())
        ended = subprocess.run(
            [sys.executable, "-c", STARTS_WITHOUT_RAY, *arguments],
            env=gateway._child_environment(),
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
        )
    (line,) = [line for line in ended.stderr.splitlines() if "it joins" in line]
    if log_format == "json":
        entry = json.loads(line)
        assert (entry["level"], entry["logger"]) == ("INFO", "service.cluster.ray.driver")
        assert entry["time"].endswith("Z")
    else:
        assert line.endswith("Z INFO service.cluster.ray.driver: it joins")


def test_the_child_finds_this_service_first_and_no_package_of_it_by_a_bare_name() -> None:
    show = "import importlib.util as u; print(u.find_spec('service').origin, u.find_spec('ingest'))"
    shown = subprocess.run(
        [sys.executable, "-c", show],
        env=gateway_of()._child_environment(),
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert shown.stdout == f"{service.__file__} None\n", shown.stderr


class Clock:
    """A clock set by tests."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class Answers:
    """Answers each call of a gateway after `took_s` on the gateway's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, embedded: bool = False) -> None:
        self.gateway = gateway_of()
        if embedded:
            ray = EmbeddedRay(Path("/nowhere"), 1, "d", ())
            self.gateway._target = replace(self.gateway._target, embedded=ray)
        self.limits = self.gateway._limits
        self.clock = Clock()
        self.silence = self.gateway._silence = Silence(self.clock, wall=lambda: 0.0)
        self.took_s = 2.0
        self.answers_pings = True
        self.num_pings = 0
        self.snapshot: ClusterSnapshot | None = None
        monkeypatch.setattr(gateway_module, "PING_S", 0.0)
        monkeypatch.setattr(self.gateway, "_call", self.call)

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        self.clock.now_s += self.took_s
        self.num_pings += method == "ping"
        if method == "ping" and not self.answers_pings:
            raise ClusterUnavailable("it is stopped")
        return self.snapshot


async def test_a_driver_that_answers_no_ping_is_given_up_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(monkeypatch)
    answers.answers_pings = False
    why = await asyncio.wait_for(answers.gateway._until_silent(), PATIENCE_S)
    limit_s = answers.limits.gateway_s
    assert why == f"the Ray driver did not respond for {limit_s + 2:.0f} s and is being restarted"
    assert answers.clock.now_s == limit_s + answers.took_s


async def test_a_ray_that_answers_nothing_behind_a_driver_that_does_is_given_up_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(monkeypatch)
    answers.silence.asked(RAY)
    why = await asyncio.wait_for(answers.gateway._until_silent(), PATIENCE_S)
    assert why == f"Ray did not respond for {answers.limits.ray_s + 2:.0f} s"
    assert answers.silence.seconds(DRIVER) == 0.0


async def test_a_driver_and_a_ray_that_answer_late_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(monkeypatch)
    answers.took_s = answers.limits.gateway_s - 1.0
    watching = asyncio.create_task(answers.gateway._until_silent())
    while answers.num_pings < 20 and not watching.done():
        await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()


@pytest.mark.parametrize(("silence", "limit"), [(RAY, "ray_s"), (JOIN, "join_s")])
def test_an_embedded_ray_is_started_anew_once_it_was_silent_for_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch, silence: str, limit: str
) -> None:
    answers = Answers(monkeypatch)
    answers.silence.asked(silence)
    answers.clock.now_s = getattr(answers.limits, limit)
    assert not answers.gateway._is_ray_given_up()
    answers.clock.now_s += 1.0
    assert answers.gateway._is_ray_given_up()
    answers.silence.answered(silence)
    assert not answers.gateway._is_ray_given_up()


async def test_an_embedded_ray_without_its_node_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its raylet may be suspended, in which case Ray itself considers the node dead."""
    answers = Answers(monkeypatch, embedded=True)
    answers.snapshot = ClusterSnapshot("s", "head:6379", None, shared=False, nodes=())
    answers.silence.asked(RAY)
    with pytest.raises(ClusterUnavailable, match="the raylet of the embedded Ray"):
        await answers.gateway.snapshot()
    assert answers.silence.seconds(RAY) == answers.took_s


async def test_a_call_that_is_cancelled_just_as_its_answer_comes_is_cancelled() -> None:
    """If a loop missed the cancellation, it would continue after the end of its term."""
    gateway = gateway_of()
    ours, theirs = socket.socketpair()
    with theirs:
        _, gateway._writer = await asyncio.open_unix_connection(sock=ours)
        asking = asyncio.create_task(gateway._call("ping"))
        while not gateway._calls:
            await asyncio.sleep(0)
        next(iter(gateway._calls.values())).set_result(None)
        asking.cancel()
        await asyncio.wait({asking})
        gateway._writer.close()
    assert asking.cancelled()
