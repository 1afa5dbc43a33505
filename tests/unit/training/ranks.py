"""Runs the ranks of a training task as processes of this machine, with the store in the parent.

The processes come from a forkserver that has everything imported, like the real ones.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from dray.spec import JobSpec
from dray.spool import segments
from ray_workers.contracts import CheckpointRef, RankTask
from ray_workers.training import entry

DEADLINE_S = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def make_task(
    home: Path,
    spec: dict[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    attempt: int = 1,
    port: int = 0,
    resume_from: Sequence[CheckpointRef] = (),
    init_from: CheckpointRef | None = None,
    device: str = "cpu",
) -> RankTask:
    """A task whose spool, checkpoints and artifacts lie under `home`."""
    base = home / f"attempt-{attempt}"
    return RankTask(
        job_id="job",
        attempt=attempt,
        rank=rank,
        incarnation=0,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=port,
        spec=JobSpec.model_validate(spec).model_dump(mode="json"),
        spool_dir=str(base / f"spool-{rank}"),
        checkpoint_url=(base / "checkpoints").as_uri(),
        artifact_url=(base / "artifacts").as_uri(),
        resume_from=tuple(resume_from),
        init_from=init_from,
        device=device,
    )


def run_ranks(
    home: Path,
    spec: dict[str, Any],
    *,
    world_size: int,
    attempt: int = 1,
    resume_from: Sequence[CheckpointRef] = (),
    init_from: CheckpointRef | None = None,
    device: str = "cpu",
    before: Callable[[RankTask], None] | None = None,
) -> list[int | None]:
    """Train to the end; each rank's exit code, negative for a signal. `before` runs in each
    process ahead of the training, to arrange for a fault."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tasks = [
        make_task(
            home,
            spec,
            rank=rank,
            world_size=world_size,
            attempt=attempt,
            port=store.port,
            resume_from=resume_from,
            init_from=init_from,
            device=device,
        )
        for rank in range(world_size)
    ]
    ranks = [
        _context.Process(target=_child, args=(task.to_json(), before), daemon=True)
        for task in tasks
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
            assert process.exitcode is not None, "a rank did not end in time"
    finally:
        for process in ranks:
            process.kill()
    return [process.exitcode for process in ranks]


def frames(home: Path, *, rank: int = 0, attempt: int = 1, kind: str | None = None) -> list[Any]:
    """The frames that a rank left on its spool: their bodies if one kind is asked for."""
    directory = home / f"attempt-{attempt}" / f"spool-{rank}"
    lines = [line for _, path in segments(directory) for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    return found if kind is None else [f["body"] for f in found if f["kind"] == kind]


def checkpoint_refs(home: Path, *, attempt: int = 1) -> list[CheckpointRef]:
    """The checkpoints that rank 0 told of, newest first."""
    told = frames(home, attempt=attempt, kind="checkpoint")
    return [CheckpointRef(c["url"], c["step"], c["manifest_sha256"]) for c in reversed(told)]


def _child(task: str, before: Callable[[RankTask], None] | None) -> None:
    decoded = RankTask.from_json(task)
    if before is not None:
        before(decoded)
    sys.exit(entry.main(decoded))


importlib.import_module("ray_workers.training.preload").preload()
