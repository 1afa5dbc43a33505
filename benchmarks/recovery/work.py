"""The job whose rank is killed, as a document and as constants for the peers' scripts.

This module imports nothing from dray.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from benchmarks.first_step import plain

NUM_RANKS: Final = 2
KILLED_RANK: Final = 1
KILL_AT_STEP: Final = 50
NUM_STEPS: Final = 120
SAVE_EVERY_STEPS: Final = 20
GLOBAL_BATCH_SIZE: Final = 128
SCRIPT: Final = "prepared_script.py"
FIXED, ELASTIC, REPLICA_GROUPS = "fixed", "elastic", "replica groups"
"""Modes of Ray Train."""
WHOLE: Final = "whole"
"""Name of a file. When it exists in a turn's folder, torchft's replicas under Ray Train end."""


def job(
    num_steps: int = NUM_STEPS, save_every: int | Literal["auto"] = SAVE_EVERY_STEPS
) -> dict[str, Any]:
    """Return the document of the job that the peers' scripts also train."""
    return {
        "name": "recovery",
        "recipe": "image_classification",
        "model": {"name": "cnn", "width": plain.WIDTH},
        "data": {"source": "sklearn://digits"},
        "train": {
            "max_steps": num_steps,
            "epochs": 10**6,
            "eval_every_epochs": 10**6,
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "optimizer": {"name": "adamw", "lr": plain.LR},
        },
        "resources": {"num_workers": NUM_RANKS},
        "checkpoint": {"every_steps": save_every},
        "max_retries": 0,
    }


def script_job(code: str) -> dict[str, Any]:
    """Return the document of an equivalent script job. code: the uploaded folder."""
    return {
        "name": "recovery-of-a-script",
        "script": {
            "entrypoint": SCRIPT,
            "args": [str(NUM_STEPS), str(GLOBAL_BATCH_SIZE)],
            "code": code,
        },
        "resources": {"num_workers": NUM_RANKS},
        "max_retries": 0,
    }
