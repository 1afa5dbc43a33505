"""The types of nodes that an autoscaler may add, and the setting that lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.input import units

LABEL = "label:"
"""Prefix of labels that are represented as resources, `label:KEY=VALUE`. A node has one unit of
each of its labels, and each worker that requests a label uses `LABEL_SHARE` units. In Ray, these
resources do not exist."""
LABEL_SHARE = 0.001
SILO_LABEL = "dray.io/silo"
"""Key of the label that marks nodes with a silo's data. Such nodes run only ranks of silos. The
node's agent reports the label if the silo's owner has set a data source. The owner can also add the
label in Ray."""
OPEN = "open to all jobs"
"""A resource whose amount is 0 on nodes with a silo's data. On other nodes, which don't define the
resource, its amount is unlimited. All workers except ranks of silos require the resource, but don't
use any of it."""
CELL = "set of reservations"
"""A pseudo-resource that exists only while a plan is made, and that no worker uses: the number of
the node's cell. Nodes that are in the same reservations are in the same cell. Nodes that don't
define the resource are in cell 0."""
NODE_LEVEL = "node"
"""The topology level at which each node is a separate domain."""
MAX_NODES = 1000
"""Maximum total number of nodes of all types."""
_ENTRY = re.compile(r"(?P<most>[0-9]{1,6})\s*x\s+(?P<resources>\S.*)")
_RESOURCE = re.compile(
    r"(?P<name>CPU|GPU|memory|accelerator_type:[^\s=]+)=(?P<amount>[0-9.]+[A-Za-z]*)"
)
_LABEL = re.compile(r"label:[^\s=]+=[^\s=]+")
EXAMPLE = "`4x CPU=8 memory=32GiB, 2x CPU=16 GPU=4 accelerator_type:H100=1`"


@dataclass(frozen=True)
class NodeType:
    """A type of node."""

    resources: Mapping[str, float]
    """Resources of each node by Ray's names, including the node's labels."""
    most: int
    """Maximum number of nodes of this type that exist at the same time."""


def label_resources(labels: Mapping[str, str]) -> dict[str, float]:
    """Return a node's labels as resources."""
    return {f"{LABEL}{key}={value}": 1.0 for key, value in labels.items()}


def resources_of_node(labels: Mapping[str, str]) -> dict[str, float]:
    """Return a node's labels as resources, plus `OPEN` if the node runs only ranks of silos."""
    return {**label_resources(labels), **({OPEN: 0.0} if SILO_LABEL in labels else {})}


def without_labels(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that exist in Ray."""
    return {name: n for name, n in resources.items() if not name.startswith(LABEL)}


def labels_in(resources: Mapping[str, float]) -> dict[str, str]:
    """Return the labels that the resources of a node or a worker contain."""
    named = (name.removeprefix(LABEL) for name in resources if name.startswith(LABEL))
    return dict(name.split("=", 1) for name in named)


def parse(value: Any) -> Any:
    """Parse node types: `4x CPU=8 memory=32GiB, 2x CPU=16 GPU=4`. Raises ValueError if invalid."""
    if not isinstance(value, str):
        return value
    types = tuple(_node_type(entry.strip()) for entry in value.split(",") if entry.strip())
    if sum(each.most for each in types) > MAX_NODES:
        raise ValueError(f"lists more than {MAX_NODES} nodes in total")
    return types


def _node_type(entry: str) -> NodeType:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ValueError(
            f"{entry!r} is not a number of nodes followed by resources, as in {EXAMPLE}"
        )
    resources = dict(_resource(word) for word in found["resources"].split())
    if not resources.get("CPU"):
        raise ValueError(f"{entry!r} has no CPU, but every worker needs a CPU")
    return NodeType({**resources, **resources_of_node(labels_in(resources))}, int(found["most"]))


def _resource(word: str) -> tuple[str, float]:
    if _LABEL.fullmatch(word):
        return word, 1.0
    found = _RESOURCE.fullmatch(word)
    if found is None:
        raise ValueError(
            f"{word!r} is not a resource: write NAME=AMOUNT, where NAME is CPU, GPU, memory or "
            f"accelerator_type:NAME, as in {EXAMPLE}; or write label:KEY=VALUE"
        )
    name, amount = found["name"], found["amount"]
    if name == "memory" and not amount.isdigit():
        return name, float(units.num_bytes(amount))
    try:
        return name, float(amount)
    except ValueError:
        raise ValueError(f"{word!r}: {amount!r} is not a number") from None
