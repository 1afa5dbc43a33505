"""The gateway's side of the service, without a driver."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from service.cluster.ray.gateway import GatewayCluster, RayTarget


@pytest.mark.anyio
async def test_a_stop_while_the_driver_joins_leaves_no_task_whose_error_nobody_takes() -> None:
    gateway = GatewayCluster(RayTarget("d", "file:///s", "nonce", None, 60.0, "127.0.0.1:1"))
    before = asyncio.all_tasks()
    joining = asyncio.create_task(gateway._receive_in_time(asyncio.StreamReader()))
    while len(asyncio.all_tasks() - before) < 2:
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    joining.cancel()
    _, pending = await asyncio.wait(left, timeout=5.0)
    assert not pending


def test_what_ray_prints_into_the_log_of_the_service_has_no_colour_codes() -> None:
    gateway = GatewayCluster(RayTarget("d", "file:///s", "nonce", None, 60.0, "127.0.0.1:1"))
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
