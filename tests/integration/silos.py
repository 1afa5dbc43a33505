"""A job of silos on nodes of this machine, and the data that must not leave them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from dray import Client
from tests.integration.harness import all_metrics

CANARY = "Kanarie"
"""A text in the names of the files and folders of the silos' data."""
LABEL = "hospital"
"""A label of the silos' nodes; its value is the silo's name."""


def write_sources(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Write digits for each silo, and a few `public` ones; returns their URLs by name."""
    digits = load_digits()
    images = digits.images.astype(np.float32) / 16
    private = folder / CANARY
    private.mkdir()
    found = {}
    for number, name in enumerate(names):
        path, own = private / f"{CANARY}-{name}.npz", slice(number, None, len(names))
        np.savez(path, x=images[own], y=digits.target[own])
        found[name] = path.as_uri()
    public = folder / "public.npz"
    np.savez(public, x=images[::7], y=digits.target[::7])
    return {**found, "public": public.as_uri()}


def job_of(sources: Mapping[str, str | None], **federated: Any) -> dict[str, Any]:
    """A job with these silos; the node's owner names the data of silos without a source."""
    silos = [
        {"name": name, "node_labels": {LABEL: name}, **({"source": source} if source else {})}
        for name, source in sources.items()
        if name != "public"
    ]
    return {
        "recipe": "image_classification",
        "model": {"name": "mlp", "width": 16},
        "data": {"source": sources["public"]},
        "train": {"optimizer": {"name": "sgd", "lr": 0.1}},
        "federated": {
            "silos": silos,
            "rounds": 60,
            "local_epochs": 3,
            "quorum": len(silos),
            "metrics": ["train/loss", "val/accuracy"],
            **federated,
        },
        "max_retries": 0,
    }


def everything_shown(client: Client, job_id: str) -> str:
    found: list[Any] = [client.get(job_id), client.explain(job_id), all_metrics(client, job_id)]
    found += [list(client.logs(job_id)), list(client.events(job_id)), client.attempts(job_id)]
    found += [client.artifacts(job_id), client.checkpoints(job_id), client.hangs(job_id)]
    return repr(found)


def files_with(paths: Iterable[Path], text: str) -> list[str]:
    """Return the files that contain a text. AssertionError if there are no files."""
    has_it = {}
    for path in paths:
        with contextlib.suppress(
            FileNotFoundError, IsADirectoryError
        ):  # a log that is deleted in the meantime
            has_it[str(path)] = text.encode() in path.read_bytes()
    assert has_it
    return [path for path, has in has_it.items() if has]
