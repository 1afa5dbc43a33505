"""Lets the ranks of a group save a divided state together.

Each rank writes one file with its pieces, and reports the file through the attempt's store. Rank 0
waits for the reports of all ranks, and commits the checkpoint by writing its manifest. The other
ranks wait until rank 0 has finished, so that no rank begins the next save before that time.
"""

from __future__ import annotations

import base64
import functools
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import HeartbeatPage, RankAssignment
from ray_workers.training.core.compat_torch import PrefixStore, Store, TCPStore

MIN_LOOK_S, MAX_LOOK_S = 0.005, 0.25
"""Minimum and maximum number of seconds between two polls of the store. torch logs a warning if a
blocking call reaches its time limit."""
GRACE_S = 10.0
"""After its group has broken, rank 0 gives up a save if no rank has written a chunk of its file for
this number of seconds."""


class SaveAbandonedError(Exception):
    """A save can't be completed, because a rank could not write its file or does not report it."""


class NotFiniteError(Exception):
    """A state is not worth saving."""

    def __init__(self) -> None:
        super().__init__("its state contains NaN or infinity, so training could not resume from it")


@dataclass(frozen=True)
class RankReport:
    """The report of one rank about its part of a checkpoint."""

    file: Mapping[str, Any] = field(default_factory=dict)
    """The rank's file, as in a manifest."""
    tree: Any = None
    """The rank's state, as from `safetensors_layout.flatten`."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """The rank's pieces, as for `stored_tensors`."""
    problem: str | None = None
    """Why the rank could not write its file."""
    is_finite: bool = True


class SaveGroup:
    """The ranks of a group, which begin the same saves in the same order."""

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        world_size: int,
        is_replaced: Callable[[], bool],
        generation: int = 0,
    ) -> None:
        """connect: returns a store, called before the first save. is_replaced: returns whether
        another group is about to replace this group."""
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self._connect = connect
        self._is_replaced = is_replaced
        self._is_disbanded = False
        self._num_saves = 0

    @classmethod
    def of(cls, task: RankTask, assignment: RankAssignment, page: HeartbeatPage) -> Self:
        """Return the group of this assignment, with its own connection to the attempt's store."""
        number = assignment.generation

        def connect() -> Store:
            store = TCPStore(task.master_addr, task.master_port, wait_for_workers=False)
            return PrefixStore(f"saves-{number}", store)

        size = assignment.world_size
        return cls(connect, assignment.rank, size, lambda: page.wanted > number, number)

    @functools.cached_property
    def store(self) -> Store:
        return self._connect()

    @property
    def is_broken(self) -> bool:
        """Whether some ranks may never report."""
        return self._is_disbanded or self._is_replaced()

    def disband(self) -> None:
        self._is_disbanded = True

    def next_save(self, progressed: Callable[[], None] = lambda: None) -> SharedSave:
        """Begin a save on this rank. progressed: called while a rank writes."""
        self._num_saves += 1
        return SharedSave(self, self._num_saves, progressed)


class SharedSave:
    """One rank's view of a save in which all ranks of its group take part. Only one thread may use
    it."""

    def __init__(self, group: SaveGroup, number: int, progressed: Callable[[], None]) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group, self._store, self._number = group, group.store, number
        self._progressed = progressed

    @property
    def file_name(self) -> str:
        """The name of this rank's file. A rank of an earlier group, which might still write on a
        node that is cut off, uses another name."""
        part = f"{self.rank + 1:05d}-of-{self.world_size:05d}"
        return f"state-g{self._group.generation}-{part}.safetensors"

    def wrote(self) -> None:
        """Show the other ranks that this rank has written a chunk of its file."""
        self._store.add("chunks", 1)
        self._progressed()

    def send(self, report: RankReport) -> None:
        text = json.dumps(vars(report)).encode()
        compressed = base64.b64encode(zlib.compress(text, 1)).decode()
        self._store.set(f"report-{self.rank}", compressed)
        if self._store.add("reports", 1) == self._number * self.world_size:
            self._store.set(f"reported-{self._number}", "1")

    def reports(self) -> list[RankReport]:
        """Wait for the reports of all ranks, and return them in rank order. Raises
        SaveAbandonedError if the group is broken and no rank writes."""
        if not self._is_set(f"reported-{self._number}", GRACE_S):
            num = self._store.add("reports", 0) - (self._number - 1) * self.world_size
            raise SaveAbandonedError(
                f"the group broke when {num} of {self.world_size} ranks had written their parts"
            )
        compressed = (self._store.get(f"report-{rank}") for rank in range(self.world_size))
        texts = (zlib.decompress(base64.b64decode(each)) for each in compressed)
        return [RankReport(**json.loads(text)) for text in texts]

    def conclude(self) -> None:
        """Let the other ranks continue; called on rank 0 when the save has ended."""
        self._store.set(f"concluded-{self._number}", "1")
        for key in ("reported", "concluded"):  # no rank is still in the previous save
            self._store.delete_key(f"{key}-{self._number - 1}")

    def await_conclusion(self) -> None:
        """Wait until rank 0 has ended the save, or the group has broken."""
        self._is_set(f"concluded-{self._number}", 0.0)

    def _is_set(self, key: str, grace_s: float) -> bool:
        """Wait for a key, without a limit while the group is intact. If the group is broken and no
        rank has written for `grace_s` seconds, return False."""
        began = heard_at = time.monotonic()
        num_chunks = -1
        while not self._store.check([key]):
            num, now = self._store.add("chunks", 0), time.monotonic()
            if num > num_chunks:
                self._progressed()
            if num > num_chunks or not self._group.is_broken:
                num_chunks, heard_at = num, now
            elif now >= heard_at + grace_s:
                return False
            time.sleep(min(max(MIN_LOOK_S, (now - began) / 10), MAX_LOOK_S))
        return True


def merged(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return the document with the state of all ranks. Raises ValueError if the ranks' parts do
    not fit together.

    `tree` is the merged tree. `tensors` contains, for each tensor, `dtype`, the `shape` of the
    whole tensor, and its `pieces`: (file, offset in bytes, index of the first element, shape).
    """
    tree = reports[0].tree
    tensors: dict[str, Any] = {}
    for report in reports:
        tree = _merged_trees(tree, report.tree, "")
        for name, entry in report.tensors.items():
            known = tensors.setdefault(name, {**entry, "pieces": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(f"{name} has different types or shapes on different ranks")
            known["pieces"] += entry["pieces"]
    names = list(_names(tree))
    if len(set(names)) < len(names) or set(names) != tensors.keys():
        wrong = sorted(set(names) ^ tensors.keys()) or names
        raise ValueError(f"{wrong[0]} is not written exactly once")
    return {"tree": tree, "tensors": tensors}


def _merged_trees(one: Any, other: Any, path: str) -> Any:
    """Merge two trees. Dictionaries in the two trees have different items; items that are in both
    trees are identical, except for the parameters of an optimizer's groups."""
    if path == "optimizer/param_groups":
        return _merged_groups(one["list"], other["list"])
    if not isinstance(one, Mapping) or "dict" not in one or not isinstance(other, Mapping):
        return one
    items = dict(map(tuple, one["dict"]))
    for key, value in other["dict"]:
        under = f"{path}/{key}" if path else str(key)
        items[key] = _merged_trees(items[key], value, under) if key in items else value
    return {"dict": [[key, value] for key, value in items.items()]}


def _merged_groups(ours: Sequence[Any], theirs: Sequence[Any]) -> Any:
    """Merge the parameter groups of two ranks: each group of one rank is merged with the group of
    the other rank that has the same options. A stage that has none of a group's parameters does not
    have this group."""
    groups = [_options_and_names(each) for each in ours]
    left = list(range(len(groups)))
    for options, names in map(_options_and_names, theirs):
        same = next((at for at in left if groups[at][0] == options), None)
        if same is None:
            groups.append((options, names))
        else:
            left.remove(same)
            groups[same] = options, list(dict.fromkeys([*groups[same][1], *names]))
    merged = [{"dict": [*options, ["params", {"list": names}]]} for options, names in groups]
    return {"list": merged}


def _options_and_names(group: Any) -> tuple[list[Any], list[str]]:
    (names,) = (value["list"] for key, value in group["dict"] if key == "params")
    return [item for item in group["dict"] if item[0] != "params"], names


def _names(tree: Any) -> Any:
    """Yield the names of the tensors in a tree."""
    if isinstance(tree, Mapping):
        ((kind, content),) = tree.items()
        if kind == "tensor":
            yield content
        else:
            for each in content:
                yield from _names(each[1] if kind == "dict" else each)
