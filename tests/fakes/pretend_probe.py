"""A pretended `ray_workers.node.self_test.probe`: `python pretend_probe.py FILE KIND PARENT`.

FILE contains JSON that states how its GPUs behave: `gpus`, the answer of `list`, and `answers`,
which maps a step, or `step@UUID` for one GPU, to its answer: a JSON value, `"hang"`, `"die"`, or a
list of these, one for each time that a process runs the step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

USUAL = {
    "begin": {"ok": {"alike": "H100"}},
    "product": {"ok": {"hash": "a", "values": {"product_s": 0.003}}},
    "memory": {"ok": {"values": {"memory_bytes_per_s": 2e12}}},
    "copies": {"ok": {"values": {"to_device_bytes_per_s": 5e10}}},
    "peers": {"ok": {"rates": [1e11, 1e11, 1e11, 1e11]}},
    "all_reduce": {"ok": {"rate": 3e11}},
}


def main() -> None:
    path, kind = Path(sys.argv[1]), sys.argv[2]
    given = json.loads(path.read_text())
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    for line in sys.stdin:
        step = line.strip()
        number = count(path, f"{kind}:{visible}:{step}")
        answer = {"ok": given["gpus"]} if step == "list" else answer_of(given, step, visible)
        if isinstance(answer, list):
            answer = answer[min(number, len(answer) - 1)]
        if answer == "hang":
            time.sleep(3600)
        if answer == "die":
            os._exit(7)
        if step == "peers" and "ok" in answer:
            answer["ok"]["rates"] = answer["ok"]["rates"][: len(visible.split(","))]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def answer_of(given: dict[str, Any], step: str, visible: str) -> Any:
    answers = given.get("answers", {})
    return answers.get(f"{step}@{visible}", answers.get(step, USUAL[step]))


def count(path: Path, what: str) -> int:
    """Record that a step began, with the pid of this process. Return how often it began before."""
    log = path.with_suffix(".log")
    before = log.read_text().splitlines() if log.exists() else []
    with log.open("a") as file:
        file.write(f"{what} {os.getpid()}\n")
    return sum(line.split()[0] == what for line in before)


if __name__ == "__main__":
    main()
