"""The gateway's side of the service, without a driver."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
import subprocess
import sys

import pytest

import service
from service.cluster.ray.gateway import GatewayCluster, RayTarget
from service.config.logging_setup import LogFormat

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
    """Of a Ray that is not there."""
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


@pytest.mark.anyio
async def test_a_stop_while_the_driver_joins_leaves_no_task_whose_error_nobody_takes() -> None:
    gateway = gateway_of()
    before = asyncio.all_tasks()
    joining = asyncio.create_task(gateway._receive_in_time(asyncio.StreamReader()))
    while len(asyncio.all_tasks() - before) < 2:
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    joining.cancel()
    _, pending = await asyncio.wait(left, timeout=5.0)
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
