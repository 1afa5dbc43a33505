"""docs/guides/parallelism.md is correct: its documents are valid, its pictures are drawn by its
program, its plan is the planner's output, and its statements on equality have been measured."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.equality.work import MESHES
from dray.spec import JobSpec
from tests.unit.api.serving import serving
from tests.unit.cli.running import Cli

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "guides" / "parallelism.md").read_text()
PICTURES = DOCS / "pictures"
RESULTS = DOCS.parent / "benchmarks" / "results"
GOALS = ("fp32", "fp32 met", "fp64", "fp64 met")


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_each_block_is_part_of_a_document(block: str) -> None:
    part: dict[str, Any] = yaml.safe_load(block)
    JobSpec.model_validate(
        {"recipe": "language_model", "resources": {"num_workers": 8}}
        | {"data": {"source": "file:///text.txt"}, "model": {"num_heads": 8}}
        | part
    )


def test_the_table_that_it_points_to_has_every_division_and_meets_its_goals() -> None:
    taken = json.loads((RESULTS / "equality.json").read_text())
    (table,) = taken["tables"]
    rows = [
        dict(zip(("division", "ranks", "model", *GOALS), row, strict=True)) for row in table["rows"]
    ]
    assert [(row["division"], int(row["ranks"])) for row in rows] == [
        (name, num_ranks) for name, (num_ranks, _) in MESHES.items()
    ]
    for row in rows:
        assert float(row["fp32"]) < 1e-5, row
        assert float(row["fp64"]) < 1e-10, row


def test_the_pictures_are_drawn_by_the_program_beside_them() -> None:
    draw = runpy.run_path(str(PICTURES / "draw.py"))
    drawn = {f"{name}.svg": draw["picture"](ranks) for name, ranks in draw["WAYS"].items()}
    assert {path.name: path.read_text() for path in PICTURES.glob("*.svg")} == drawn
    assert sorted(re.findall(r"\(\.\./pictures/(\w+\.svg)\)", PAGE)) == sorted(drawn)


def test_the_plan_that_is_shown_is_the_planners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    document = {
        "recipe": "language_model",
        "data": {"source": "file:///text.txt"},
        "model": {"num_layers": 8, "width": 256, "context_length": 256},
        "train": {"precision": "bf16", "global_batch_size": 32},
        "resources": {"num_workers": 4},
    }
    job.write_text(yaml.safe_dump(document))
    (shown,) = re.findall(r"```\n(MESH .*?)```", PAGE, re.DOTALL)
    with serving(tmp_path / "home") as server:
        told = Cli(server.url, capsys)("plan", str(job), "--memory", "200000000")
    lines = iter(line.rstrip() for line in told.splitlines())
    for line in shown.splitlines():
        if line != "...":
            assert line in lines, f"not told, or not in this order: {line}"
