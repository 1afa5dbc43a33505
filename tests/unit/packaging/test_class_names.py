"""A class name is used only once in the whole tree, except for the names listed here."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("api", "dray", "ray_workers", "service")
GENERATED = "dray/_sync/"
"""Its classes are those of the asynchronous client."""

SDK_ERRORS = {"dray/errors.py", "dray/client_errors.py"}
"""Each error that the service raises reaches the SDK's user as one of the same name."""

VIEWS = "the API's answer about it; written `views.X` where both are meant"
DOCUMENTS = "the part of the job document, and the network that is built from it"
APART = "parts of two packages that never meet"

SHARED = {
    "Batch": "a share of a global batch, and the same with the times of its step",
    "Checkpoint": "the part of the job document, the answer about one, and one that a script reads",
    "Client": "the SDK's, and a connection of the forkserver, which is a program of its own",
    "Cluster": VIEWS,
    "Cnn": DOCUMENTS,
    "Connections": APART,
    "Context": APART,
    "Counterfactual": VIEWS,
    "Drill": VIEWS,
    "Gpt": DOCUMENTS,
    "Hang": VIEWS,
    "LogLine": VIEWS,
    "Mlp": DOCUMENTS,
    "PassedOver": VIEWS,
    "Plan": VIEWS,
    "Progress": VIEWS,
    "Queue": VIEWS,
    "Readiness": VIEWS,
    "Reason": VIEWS,
    "ResNet": DOCUMENTS,
    "Reservation": VIEWS,
    "Retry": APART,
    "StoredFile": "a file that the API sends, and one of uploaded code",
    "Tokens": "a text as numbers, and the layer of a network that reads them",
    "Unet": DOCUMENTS,
}
"""Names of two classes, each with the reason."""


def places() -> dict[str, set[str]]:
    """The files in which a class of each name is defined, but for the pairs of errors."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if str(path.relative_to(ROOT)).startswith(GENERATED):
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].add(str(path.relative_to(ROOT)))
    return {name: files for name, files in found.items() if len(files) > 1 and not _is_error(files)}


def _is_error(files: set[str]) -> bool:
    others = files - SDK_ERRORS
    return len(others) == 1 and len(files) == 2 and others.pop().startswith("service/")


def test_a_class_name_is_used_once() -> None:
    assert {name: files for name, files in places().items() if name not in SHARED} == {}


def test_every_exception_is_still_one() -> None:
    assert sorted(SHARED) == sorted(places())
