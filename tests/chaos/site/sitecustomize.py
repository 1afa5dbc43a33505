"""Imported by each Python process of a chaos run, because its folder is in PYTHONPATH: the ranks of
jobs with the label `LABEL` train on the pretended GPU (`tests.fakes.pretend_nccl`).

The module `ray_workers.shared.contracts` is changed when a process imports it, since few of the
processes need it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LABEL = {"chaos": "on-gpus"}
CONTRACTS = "ray_workers.shared.contracts"


class ContractsFinder:
    """Finds `CONTRACTS` as usual, once, and has it changed after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != CONTRACTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.RankTask.from_json = on_pretended_gpus(module.RankTask.from_json)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def on_pretended_gpus(from_json: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `RankTask.from_json` for this run. It is called in the rank's process."""

    def decoded(text: str) -> Any:
        task = from_json(text)
        if task.spec.get("labels") != LABEL:
            return task
        from tests.fakes import pretend_gpu, pretend_nccl

        pretend_nccl.install()
        return replace(task, device=pretend_gpu.NAME)

    return decoded


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, ContractsFinder())
