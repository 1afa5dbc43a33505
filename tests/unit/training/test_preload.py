"""The parent process from which training processes are forked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROBE = """
import json, os, sys, threading
from ray_workers.training.preload import preload
preload()
import torch
found = {
    "threads": threading.active_count(),
    "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
    "cuda": torch.cuda.is_initialized(),
    "ray": "ray" in sys.modules,
    "onnx": "onnx" in sys.modules,
}
from pathlib import Path
from ray_workers.shared.contracts import RankTask
from ray_workers.training.process import rank_main
preloaded = set(sys.modules)
code = rank_main.main(RankTask.from_json(sys.argv[1]))
print(json.dumps(found | {"code": code, "late": sorted(set(sys.modules) - preloaded)}))
"""


def test_the_preload_is_safe_to_fork_and_training_imports_nothing_more(tmp_path: Path) -> None:
    from tests.unit.training.ranks import make_task

    spec = {
        "recipe": "image_classification",
        "model": {"name": "cnn", "width": 8, "dropout": 0.1},
        "train": {"max_steps": 3, "max_grad_norm": 1.0, "precision": "bf16"},
        "checkpoint": {"every_steps": 1, "keep": 1},
    }
    task = make_task(tmp_path, spec)
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, task.to_json()], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["threads"] == 1
    assert found["tasks"] == 1
    assert found["cuda"] is False
    assert found["ray"] is False
    assert found["onnx"] is False, "training does not wait for what exports"
    assert found["code"] == 0
    assert found["late"] == []
