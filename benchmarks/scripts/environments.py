"""An environment with ten packages, built by a node, and with `uv venv` and `uv pip install`."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path

from benchmarks.machine import BenchmarkError
from ray_workers.node.environments.environments import Environments
from ray_workers.node.environments.uv import uv_program
from ray_workers.shared.node_needs import BuildState, EnvironmentPolicy

PACKAGES = (
    *("bidict==0.23.1", "boltons==25.0.0", "cowsay==6.1", "inflection==0.5.1", "parsy==2.1"),
    *("pyfiglet==1.0.2", "schedule==1.2.2", "termcolor==2.5.0", "toolz==1.0.0"),
    "unidecode==1.3.8",
)
"""Packages without dependencies, so that both install the same packages."""
ASK_AGAIN_S = 0.01


class OnNode:
    """The environments of a node, as managed by its agent, with their package cache."""

    def __init__(self, home: Path) -> None:
        self._root = home
        self._numbers = itertools.count()

    def cold_s(self) -> float:
        """Return the time with an empty cache."""
        shutil.rmtree(self._root, ignore_errors=True)
        return self.cached_s()

    def cached_s(self) -> float:
        """Return the time with every package in the cache, but without the environment."""
        return self._ready_s(f"round-{next(self._numbers)}")

    def again_s(self) -> float:
        """Return the time for the environment that was built last."""
        return self._ready_s(self._last)

    def _ready_s(self, name: str) -> float:
        self._last = name
        lines = [f"# {name}", *PACKAGES]
        return asyncio.run(self._prepare({"requirements": "\n".join(lines)}))

    async def _prepare(self, environment: dict[str, str]) -> float:
        environments = Environments(self._root / "preloaded", self._root)
        began = time.perf_counter()
        while True:
            answer = await environments.prepare(
                environment, EnvironmentPolicy.open(), keeps_all=False
            )
            if answer.state is not BuildState.BUILDING:
                break
            await asyncio.sleep(ASK_AGAIN_S)
        took = time.perf_counter() - began
        if answer.state is not BuildState.READY or len(answer.packages) != len(PACKAGES):
            raise BenchmarkError(f"the environment is {answer.state}: {answer}")
        return took


class ByHand:
    """`uv venv` and `uv pip install`, with a separate cache."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._numbers = itertools.count()

    def cold_s(self) -> float:
        shutil.rmtree(self._home, ignore_errors=True)
        return self.cached_s()

    def cached_s(self) -> float:
        folder = self._home / str(next(self._numbers))
        uv, python = uv_program(), str(folder / "bin" / "python")
        environment = {**os.environ, "UV_CACHE_DIR": str(self._home / "cache")}
        began = time.perf_counter()
        for command in (
            [uv, "venv", "--quiet", str(folder)],
            [uv, "pip", "install", "--quiet", "--python", python, *PACKAGES],
        ):
            subprocess.run(command, env=environment, check=True)
        return time.perf_counter() - began
