"""Keeps idle Ray worker processes at hand, so that an actor starts in 50 ms instead of 500.

A new actor waits for a Python process that has to import ray first, unless the raylet has one
idle. The raylet starts such processes when it is asked to (its RPC PrestartWorkers, the one that
Ray's own startup uses). They hold no resources. This is only a matter of speed: where the RPC
is not there or refuses, actors start as Ray starts them.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

IDLE_WORKERS = 4
"""Processes kept idle per node: a supervisor, and ranks of one small job."""
KEEP_ALIVE_S = 3600
CALM_S = 3.0
"""Time after a launch before more processes are started: importing ray takes a core's half
second, which belongs to the job that is starting."""


class Prestarter:
    """Asks each node for idle workers when it joins, and again for those that were used."""

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}
        self._asked_at: dict[str, float] = {}
        self._used_at = 0.0
        self._refused = False

    def used(self, workers: Mapping[str, int]) -> None:
        """A launch took so many workers of each node."""
        self._used_at = time.monotonic()
        for node_id, count in workers.items():
            missing = self._missing.get(node_id, 0) + count
            self._missing[node_id] = min(missing, IDLE_WORKERS)

    def keep_warm(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Top up the nodes that need it; returns at once.

        The raylet starts as many as it is told, however many are idle: only what is missing is
        asked for.
        """
        now = time.monotonic()
        if self._refused or now - self._used_at < CALM_S:
            return
        for node in nodes:
            node_id = node["NodeID"]
            asked_at = self._asked_at.get(node_id)
            if asked_at is None or now - asked_at > KEEP_ALIVE_S:
                self._missing[node_id] = IDLE_WORKERS
            missing = self._missing.pop(node_id, 0)
            if missing:
                self._asked_at[node_id] = now
                address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
                threading.Thread(
                    target=self._prestart, args=(address, missing), daemon=True
                ).start()

    def _prestart(self, address: str, count: int) -> None:
        try:
            grpc: Any = importlib.import_module("grpc")
            messages: Any = importlib.import_module("ray.core.generated.node_manager_pb2")
            stubs: Any = importlib.import_module("ray.core.generated.node_manager_pb2_grpc")
            request = messages.PrestartWorkersRequest(
                language=0,  # Python, in Ray's common.proto
                num_workers=count,
                keep_alive_duration_secs=KEEP_ALIVE_S,
            )
            with grpc.insecure_channel(address) as channel:
                stub = stubs.NodeManagerServiceStub(channel)
                stub.PrestartWorkers(request, metadata=_token_metadata(), timeout=10.0)
        except (ImportError, AttributeError) as error:
            self._refused = True
            logger.info("this Ray can't prestart workers for us, jobs start slower: %s", error)
        except Exception as error:
            logger.info("the node at %s did not prestart workers: %s", address, error)


def _token_metadata() -> list[tuple[str, str]]:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return [("authorization", f"Bearer {Path(path).read_text().strip()}")] if path else []
