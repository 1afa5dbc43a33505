"""Runs programs with torch only, under torchrun (FOLDER FIRST LAST), or in an existing group.

Each program runs with torch's DDP, and with gradients averaged by hand. Its states are
`ddp-RANK.pt` and `hand-RANK.pt` in a folder for its seed; a program that torch refuses leaves none.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.generated.programs.drawing import draw
from tests.generated.programs.reference import ReferenceTrain
from tests.generated.programs.script import DrawnProgram


def run_all(rank: int, world_size: int, folder: str, programs: list[DrawnProgram]) -> None:
    """Run every program in every way. A single rank needs no group."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for program in programs:
        home = Path(folder, str(program.seed))
        home.mkdir(parents=True, exist_ok=True)
        for way in ("ddp", "hand") if world_size > 1 else ("hand",):
            run_one(program, home, way)


def run_one(program: DrawnProgram, home: Path, way: str) -> None:
    """Save the state of this rank, if torch accepts the program on all ranks."""
    rank = os.environ["RANK"]
    train = ReferenceTrain(uses_ddp=way == "ddp")
    own = home / f"run-{way}"
    own.mkdir(exist_ok=True)
    text = program.text(own, imports="")
    names = {"train": train, "BACKWARD": train.backward, "resumed": train.resumed}
    try:
        _run_as_script(text, names)
        (own / f"state-{rank}.pt").replace(home / f"{way}-{rank}.pt")
    except Exception as error:
        (home / f"{way}-{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    finally:
        torch.set_default_dtype(torch.float32)


def _run_as_script(text: str, names: dict[str, Any]) -> None:
    me = os.getpid()
    try:
        exec(compile(text, "drawn.py", "exec"), names)
    except SystemExit as leaving:
        if os.getpid() != me:  # a child that the script has forked
            os._exit(int(leaving.code or 0))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    chosen = [draw(seed) for seed in range(int(sys.argv[2]), int(sys.argv[3]))]
    run_all(dist.get_rank(), dist.get_world_size(), sys.argv[1], chosen)
    dist.destroy_process_group()
