"""The numbers that a script gets from the global random generators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.training.ranks import run_ranks

SEEDED = "train.init(seed=5)"
PREPARES = """
model = torch.nn.Linear(1, 1)
drawn.append(model.weight.item())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(4.0)[:, None])
model, optimizer, loader = train.prepare(model, optimizer, torch.utils.data.DataLoader(data, 2))
drawn.append(model.weight.item())
"""


def script(folder: Path, begin: str, then: str = "") -> Path:
    path = folder / "draw.py"
    path.write_text(
        "import json, os, random, sys\n"
        "from dray import train\n"
        f"{begin}\n"
        "import numpy, torch\n"
        "drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]\n"
        f"{then}\n"
        "with open(os.path.join(sys.argv[1], os.environ.get('RANK', 'alone')), 'w') as file:\n"
        "    json.dump(drawn, file)\n"
    )
    return path


def drawn_by_ranks(folder: Path, begin: str, then: str = "", *, attempt: int = 1) -> list[float]:
    """Return the numbers of two ranks, starting with rank 0."""
    path = script(folder, begin, then)
    spec = {"script": {"entrypoint": str(path), "args": [str(folder)]}}
    assert run_ranks(folder, spec, world_size=2, attempt=attempt) == [0, 0]
    return [one for rank in ("0", "1") for one in json.loads((folder / rank).read_text())]


def drawn_alone(folder: Path, begin: str) -> list[float]:
    path = script(folder, begin)
    variables = {name: os.environ[name] for name in os.environ if name != "RANK"}
    command = [sys.executable, str(path), str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=variables)
    found: list[float] = json.loads((folder / "alone").read_text())
    return found


def test_every_number_follows_from_the_seed_and_the_rank(tmp_path: Path) -> None:
    alone = drawn_alone(tmp_path, SEEDED)
    assert drawn_alone(tmp_path, SEEDED) == alone
    assert drawn_alone(tmp_path, "train.init(seed=6)") != alone
    drawn = drawn_by_ranks(tmp_path, SEEDED, PREPARES)
    first, second = drawn[:5], drawn[5:]
    assert first[:3] == alone  # rank 0 is like a single process
    assert not set(first[:4]) & set(second[:4])
    assert first[3] == first[4] == second[4]  # all start with rank 0's model
    assert drawn_by_ranks(tmp_path, SEEDED, PREPARES, attempt=2) == drawn


def test_without_a_seed_ranks_and_attempts_differ_and_a_replacement_does_not(
    tmp_path: Path,
) -> None:
    first = drawn_by_ranks(tmp_path, "")
    second = drawn_by_ranks(tmp_path, "", attempt=2)
    assert len({*first, *second}) == 12
    again = tmp_path / "again"
    again.mkdir()
    assert drawn_by_ranks(again, "") == first  # of the same job, attempt and ranks
