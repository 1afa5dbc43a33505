"""The job that is timed in every topology."""

from __future__ import annotations

from typing import Any

NUM_RANKS, SLOW_RANK = 4, 1
SHARE_S = 0.01
"""Seconds that a rank takes to compute a quarter of a batch, in addition to the loop itself. The
rank sleeps, as if a GPU computed, because there can be fewer cores than the four ranks."""
SLOWNESS = 10
NUM_SAMPLES, EPOCHS = 1437, 16
"""Number of samples in `sklearn://digits` without the fifth for validation, and number of
epochs."""
DEFAULT = "all-reduce"
SERVERS = {"kind": "parameter_server", "servers": 1}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    DEFAULT: {"kind": "all_reduce"},
    "local steps, every 8": {"kind": "all_reduce", "every": 8},
    "gossip, D-PSGD on a ring": {"kind": "gossip", "mode": "d_psgd", "graph": "ring"},
    "gossip, SGP, exponential": {"kind": "gossip", "mode": "sgp", "graph": "exponential"},
    "gossip, AD-PSGD on a ring": {"kind": "gossip", "mode": "ad_psgd", "graph": "ring"},
    "parameter server, synchronous": {**SERVERS, "mode": "synchronous"},
    "parameter server, bounded": {**SERVERS, "mode": "bounded", "max_staleness": 4},
    "parameter server, asynchronous": {**SERVERS, "mode": "asynchronous"},
}
CLAIMED = ("gossip, AD-PSGD on a ring", "parameter server, asynchronous")
"""Topologies that a slow rank should not delay."""


def document(topology: str, seed: int, *, num_evaluations: int = 1) -> dict[str, Any]:
    return {
        "name": "topologies",
        "recipe": "image_classification",
        "model": {"name": "mlp", "width": 128},
        "data": {"source": "sklearn://digits"},
        "train": {
            "epochs": EPOCHS,
            "eval_every_epochs": EPOCHS // num_evaluations,
            "global_batch_size": 64,
            "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.0},
            "schedule": {"name": "cosine", "warmup_steps": 23},
            "seed": seed,
        },
        "sync": TOPOLOGIES[topology],
        "resources": {"num_workers": NUM_RANKS},
        "checkpoint": {"every_steps": 10**9},
    }
