"""The rank actor: holds one slot in Ray's books and stands for the training process in it.

The training process itself is forked by the node's forkserver; this actor hands it its task,
keeps its log, shows its progress to Ray, and knows when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ray

from dray.spool import SpoolWriter, begin_count, segments
from ray_workers import pages
from ray_workers.contracts import FrameKind, RankTask
from ray_workers.forking import ForkedProcess
from ray_workers.pages import Place
from ray_workers.verdict import RankExit

LOG_LINE_BYTES = 8192
"""Longer lines are split, so that one line never fills a page of the log."""
GAUGE_PERIOD_S = 1.0
PAGE_LIMIT_S = 60.0
PAGE_LOOK_S = 0.01


@ray.remote(max_restarts=0)
class RankActor:
    """One rank of one attempt. Methods run concurrently on one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: ForkedProcess | None = None
        self._has_ended = False

    def __repr__(self) -> str:
        return self._name

    async def start(self, task: RankTask, socket_path: str) -> int:
        """Fork the training process, or the next one once that is gone; answer its pid."""
        # Empty for a rank without a GPU: it must not see those that others were granted.
        visible = ",".join(str(gpu) for gpu in ray.get_gpu_ids())
        task = replace(task, env={**task.env, "CUDA_VISIBLE_DEVICES": visible})
        begin_count(Path(task.spool_dir))
        request = {"op": "rank", "task": json.loads(task.to_json())}
        self._process = await ForkedProcess.start(socket_path, request)
        self._has_ended = False
        self._page_prefix = task.page_prefix
        self._log = LogPump(Path(task.spool_dir), self._process.output, task.spool_limit_bytes)
        self._gauges = asyncio.ensure_future(export_progress(task))
        return self._process.pid

    async def wait(self) -> RankExit:
        """Answer when the process and its whole session are seen gone."""
        assert self._process is not None, "start() comes first"
        log, gauges = self._log, self._gauges
        code = await self._process.wait()
        self._has_ended = True
        log.finish()
        gauges.cancel()
        rank = int(self._name.split(":")[-2])
        return RankExit(rank, exit_code=code, memory_kills=self._process.memory_kills)

    async def announce(self, place: Place) -> None:
        """Tell the process its place in the next generation of its group."""
        await self._write_page(lambda: pages.announce(self._page_prefix, place))

    async def ask_to_leave(self) -> None:
        """Have the process save a checkpoint after its step, and end."""
        await self._write_page(lambda: pages.ask_to_leave(self._page_prefix))

    async def _write_page(self, write: Callable[[], None]) -> None:
        """A process that was just forked makes its page in its first moments."""
        deadline = time.monotonic() + PAGE_LIMIT_S
        while True:
            try:
                return write()
            except FileNotFoundError:
                if self._has_ended or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(PAGE_LOOK_S)

    async def terminate(self) -> None:
        """Send SIGTERM to the process's session."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)

    async def stop(self, grace_s: float) -> None:
        """End the process: SIGTERM to its session, and after `grace_s` seconds SIGKILL."""
        if self._process is None:
            return
        await self.terminate()
        await asyncio.sleep(grace_s)
        self._process.signal(signal.SIGKILL)


class LogPump:
    """Copies a process's output, line by line, to its log spool and to this actor's own log."""

    def __init__(self, spool_dir: Path, output: int, limit_bytes: int) -> None:
        self._spool = SpoolWriter(spool_dir.with_suffix(".log"), limit_bytes=limit_bytes)
        self._output = output
        self._line = 0
        self._rest = b""
        os.set_blocking(output, False)
        asyncio.get_running_loop().add_reader(output, self._pump)

    def _pump(self) -> bool:
        """Take what is there; False at the end of the output."""
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self._close()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > LOG_LINE_BYTES:
            lines.append(self._rest[:LOG_LINE_BYTES])
            self._rest = self._rest[LOG_LINE_BYTES:]
        self._write(lines)
        return True

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            # The number counts dropped lines too, so that the gap shows.
            self._spool.append(FrameKind.LOG, {"line": self._line, "text": text})
            self._line += 1
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def finish(self) -> None:
        """The process is gone: take what it left in the pipe.

        A process that escaped its session may hold the pipe open; its output is not waited for.
        """
        while self._output >= 0:
            before = self._line, self._rest
            if not self._pump() or (self._line, self._rest) == before:
                break
        self._close()

    def _close(self) -> None:
        if self._output < 0:
            return
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)
        self._output = -1
        if self._rest:
            self._write([self._rest])
            self._rest = b""
        self._spool.close()


async def export_progress(task: RankTask) -> None:
    """Show the rank's newest step, loss and throughput as Ray metrics, for dashboard and Grafana.

    Reads the end of the rank's own spool, so that the training process does nothing for it.
    """
    # The import takes a tenth of a second of a core, which belongs to the process that starts.
    await asyncio.sleep(GAUGE_PERIOD_S)
    from ray.util.metrics import Gauge

    tags = {"job": task.job_id, "rank": str(task.rank)}
    shown = {
        "step": Gauge("dray_step", "Optimizer steps done", ("job", "rank")),
        "train/loss": Gauge("dray_train_loss", "Training loss of the step", ("job", "rank")),
        "perf/samples_per_s": Gauge("dray_samples_per_s", "Samples per second", ("job", "rank")),
    }
    spool_dir = Path(task.spool_dir)
    while True:
        newest = _last_metrics(spool_dir)
        for key, gauge in shown.items():
            if key in newest:
                gauge.set(newest[key], tags)
        await asyncio.sleep(GAUGE_PERIOD_S)


def _last_metrics(spool_dir: Path) -> dict[str, float]:
    """Values and `step` of the newest METRICS frame near the end of a spool, or nothing."""
    for _, path in reversed(segments(spool_dir)[-2:]):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            for line in reversed(file.read().split(b"\n")[:-1]):
                if line.startswith(b'{"kind":"metrics"'):
                    body = json.loads(line)["body"]
                    return {**body["values"], "step": float(body["step"])}
    return {}
