"""Orphans: processes of dead forkservers on this machine, which are found by their records and
killed.

A process is killed only if it has a session's mark, or if a record contains its pid and start time
as the leader of a session. The pid alone is not sufficient, because it might now belong to another
process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_workers.node import session_records
from ray_workers.node.session_records import SessionRecord
from ray_workers.shared.folders.removal import remove_tree
from ray_workers.shared.paths import entries, spools_of
from ray_workers.shared.processes.procfs import find_members, send_signal

CHECK_S = 0.05


@dataclass(frozen=True)
class Orphan:
    """A session with live processes whose forkserver is dead."""

    record: SessionRecord
    pids: tuple[int, ...]


def reap(directory: Path) -> list[Orphan]:
    """Send SIGKILL once to all processes of sessions whose forkserver is dead, and return these
    sessions.

    Records of empty sessions are removed, unless they name a GPU.
    """
    orphans = []
    for record in session_records.read_sessions(directory):
        if not record.is_of_this_pid_namespace:
            continue
        if not record.is_of_this_boot:
            session_records.remove_session(directory, record)
        elif not record.has_parent:
            orphans.append(record)
    members = find_members([record.session() for record in orphans])
    left = []
    for record in orphans:
        pids = members[record.mark]
        if pids:
            send_signal(pids, signal.SIGKILL)
            left.append(Orphan(record, tuple(pids)))
        elif not record.gpus:
            session_records.remove_session(directory, record)
    return left


def reap_within(nodes: Sequence[Path], within_s: float) -> list[Orphan]:
    """Kill the orphans of the nodes with these folders, and return the orphans that are still alive
    after `within_s` seconds. Blocking."""
    deadline = time.monotonic() + within_s
    while True:
        left = []
        for node in nodes:
            left += reap(session_records.sessions_dir(node))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(CHECK_S)


def remove_folders(nodes: Iterable[Path]) -> list[Path]:
    """Delete the folders of these dead nodes, and return the deleted folders. If the service has
    not yet read all of a node's spools, the spools are kept, together with the file that names the
    node's raylet."""
    removed = []
    for node in nodes:
        spools = spools_of(node)
        if any(entries(job) for job in entries(spools)):
            for path in entries(node):
                if path not in (spools, node / session_records.OWNER):
                    remove_tree(path)
        else:
            remove_tree(node)
            removed.append(node)
    return removed


def remove_dead_nodes(deployment_root: Path, own: Path) -> list[Path]:
    """Apply `remove_folders` to nodes whose raylet and processes have all ended."""

    def is_over(node: Path) -> bool:
        sessions = session_records.read_sessions(session_records.sessions_dir(node))
        if any(record.has_parent for record in sessions):
            return False  # the node's forkserver is still ending
        return not any(find_members([record.session() for record in sessions]).values())

    return remove_folders(filter(is_over, session_records.dead_nodes(deployment_root, own)))
