"""How late the processes that supervise ranks answer with thirty busy ranks per core.

The limits on silence (`DRAY_SILENCE_LIMIT_S`) judge how long a question stays unanswered. So the
figure is the longest time from a question to its answer, asked from a process of its own, as the
service and the supervisors ask.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import BenchmarkError
from benchmarks.processes import service
from benchmarks.report import Result, Row, Table, seconds
from dray import Client
from ray_workers.shared.names import agent_name, supervisor_name
from service.cluster.ray.embedded import ON_LOOPBACK

FACTOR = 30
MEASURED_S = 120.0
START_LIMIT_S = 240.0
PAUSE_S = 0.1
REPORTED_S = 15.0
"""Default seconds of silence after which a node gets no more work; after four times as long it is
replaced."""
SPIN = Path(__file__).with_name("spin.py")

METHOD = (
    f"One job has {FACTOR} ranks per core. Each is a Python program that never waits, runs at "
    "the same niceness as the service, and begins once all ranks have started. A Ray driver "
    "repeatedly queries the node's agent, the supervisor and, over HTTP, the service for "
    f"{MEASURED_S:.0f} s, pausing {PAUSE_S:g} s after each response. It requests all heartbeat "
    "pages from the agent in the same way as the supervisor.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """num_rounds is of no use here: the longest of many answers is what counts."""
    num_ranks = FACTOR * len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        home, go = Path(folder), Path(folder, "go")
        with service(home, num_slots=num_ranks) as client:
            job = client.submit(
                {
                    "script": {"entrypoint": str(SPIN), "args": [str(2 * MEASURED_S), str(go)]},
                    "resources": {"num_workers": num_ranks},
                }
            ).id
            started_s = _wait_until_all_run(client, job, num_ranks)
            progress(f"{num_ranks} ranks run after {started_s:.0f} s")
            taken = _ask_all(home, client, job, go.touch)
            ended = client.get(job)
            alarms = ended.recoveries, client.hangs(job)
            client.cancel(job)
            client.wait(job, 120)
    if ended.state.is_terminal or ended.attempt != 1 or alarms != (0, []):
        raise BenchmarkError(f"a false alarm: {ended.state}, {ended.reason}, {alarms}")
    rows = [
        [name, str(len(times)), seconds(sorted(times)[len(times) // 2]), seconds(max(times))]
        for name, times in taken.items()
    ]
    longest = max(map(max, taken.values()))
    progress(f"the longest answer took {longest:.2f} s")
    return Result(
        name="busy_ranks",
        title=f"Answers beside {FACTOR} busy ranks a core",
        method=METHOD,
        rows=[Row(name, times) for name, times in taken.items()],
        comparisons=[],
        tables=[
            Table("Time to an answer", ["of", "answers", "median", "longest"], rows),
            Table(
                "Limits",
                ["", ""],
                [
                    ["the longest answer of all", seconds(longest)],
                    ["silence that is reported", seconds(REPORTED_S)],
                    ["all ranks had started after", seconds(started_s)],
                ],
            ),
        ],
    )


def _wait_until_all_run(client: Client, job: str, num_ranks: int) -> float:
    began = time.monotonic()
    while time.monotonic() - began < START_LIMIT_S:
        if len({line.rank for line in client.logs(job)}) == num_ranks:
            return time.monotonic() - began
        time.sleep(1.0)
    raise BenchmarkError(f"not all ranks run: {client.get(job).reason}")


def _ask_all(
    home: Path, client: Client, job: str, begin: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each answer, by what was asked. begin: called once all can be asked."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(home / "ray" / "token")
    os.environ[ON_LOOPBACK] = "false"  # else the driver expects a node with another address
    import ray  # which reads these then

    ray.init(address=client.cluster().ray_address, log_to_driver=False)
    try:
        names = ray.util.list_named_actors(all_namespaces=True)
        node = client.cluster().nodes[0].node_id
        agent = _actor(names, agent_name(node))
        supervisor = _actor(names, supervisor_name(job, 1))
        questions: dict[str, Callable[[], Any]] = {
            "the node's agent": lambda: ray.get(agent.ping.remote()),
            "all heartbeat pages": lambda: ray.get(agent.observe.remote(job, 1, False, False)),
            "the supervisor": lambda: ray.get(supervisor.__ray_ready__.remote()),
            "the service": lambda: client.get(job),
        }
        for ask in questions.values():
            ask()
        begin()
        taken: dict[str, list[float]] = {name: [] for name in questions}
        threads = [
            threading.Thread(target=_ask, args=(ask, taken[name]))
            for name, ask in questions.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return taken
    finally:
        ray.shutdown()


def _actor(names: list[dict[str, str]], name: str) -> Any:
    import ray

    found = next(each for each in names if each["name"] == name)
    return ray.get_actor(name, namespace=found["namespace"])


def _ask(ask: Callable[[], Any], taken: list[float]) -> None:
    end = time.monotonic() + MEASURED_S
    while time.monotonic() < end:
        began = time.monotonic()
        ask()
        taken.append(time.monotonic() - began)
        time.sleep(PAUSE_S)
