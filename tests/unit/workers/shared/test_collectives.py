"""A process shows in which collective it waits; ranks that have not joined it are named."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_workers.shared.processes import collectives, compat_torch
from ray_workers.shared.processes.collectives import GroupRecord, described, parse
from ray_workers.shared.processes.stack_writer import END, dump_on
from ray_workers.supervision.rules import collective_hangs
from tests.unit.training.ranks import run_in_group

PATIENCE_S = 60.0


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (result := found()):
        assert time.monotonic() < deadline, "torch has changed its record: see compat_torch.py"
        time.sleep(0.01)
    return result


def test_the_rank_that_does_not_join_is_named(tmp_path: Path) -> None:
    run_in_group(_waits_for_rank_1, 2, tmp_path)


def _waits_for_rank_1(rank: int, folder: Path) -> None:
    store = dist.distributed_c10d._get_default_store()
    second = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=second)
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        path = folder / "stacks"
        dump_on(signal.SIGUSR2, path)
        threading.Thread(target=_ask_for_stacks, args=(path, store), daemon=True).start()
        dist.all_reduce(torch.ones(1))
        return
    stacks = {0: store.get("stacks").decode(), 1: f"Stack\n{described()}"}
    (waits, other), own = parse(stacks[0]), parse(stacks[1])
    assert (waits.group, waits.begun, waits.waits_in, waits.name) == ("0", 3, 3, "gloo:all_reduce")
    assert 0.0 <= waits.waits_s < PATIENCE_S
    assert other == GroupRecord("1", 1)
    assert own == [GroupRecord("0", 2), GroupRecord("1", 1)]
    assert collective_hangs.absent_ranks(stacks) == {1}
    shown = collective_hangs.with_absences(stacks)
    assert shown[0] == stacks[0]
    assert shown[1].endswith(
        "\n\nThis rank has not joined collective 3 (gloo:all_reduce) of group 0, in which "
        "rank 0 is waiting.\n"
    )
    dist.all_reduce(torch.ones(1))


def _ask_for_stacks(path: Path, store: Any) -> None:
    """Ask once the main thread waits in the third collective."""
    until(lambda: any(one.waits_in == 3 for one in collectives.recorded()))
    os.kill(os.getpid(), signal.SIGUSR2)
    text = until(lambda: path.read_bytes().endswith(END) and path.read_bytes())
    store.set("stacks", text.removesuffix(END))


def test_a_process_without_groups_has_no_record() -> None:
    assert described() == ""


def entry(number: int, seq: int, **other: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "pg_id": 0,
        "collective_seq_id": seq,
        "retired": True,
        "state": "scheduled",
        "profiling_name": "gloo:barrier",
        "time_created_ns": time.time_ns(),
        **other,
    }


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], [GroupRecord("0", 0), GroupRecord("late", 0)]),
        # A group without entries is left out once entries were dropped.
        ([entry(7, 5)], [GroupRecord("0", 5)]),
        # A group that was formed again counts from 1.
        ([entry(5, 9, retired=False), entry(6, 1, pg_id=3)], [GroupRecord("0", 1)]),
        ([entry(5, 1), entry(6, 4, is_p2p=True)], [GroupRecord("0", 1)]),
        ([entry(5, 1), entry(6, 2, retired=False, state="completed")], [GroupRecord("0", 2)]),
    ],
)
def test_the_record_of_a_group(
    entries: list[Any], found: list[GroupRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.dumps({"entries": entries}).encode()
    monkeypatch.setattr(compat_torch, "flight_records", lambda: [record])
    monkeypatch.setattr(compat_torch, "group_names", lambda: ["0", "late"])
    assert collectives.recorded() == found


def test_a_recorder_that_is_off_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat_torch, "group_names", lambda: ["0"])
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert described() == ""
