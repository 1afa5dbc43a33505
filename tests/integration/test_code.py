"""Programs that are uploaded with their folder, on a real Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dray import Client, load
from dray.views import JobState
from tests.integration.harness import Service, assert_promises

pytestmark = pytest.mark.ray

PROGRAM = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from pkg import words
from dray import train

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
attempt = train.context().attempt
print(words.HELLO, int(total), Path("data/numbers.txt").read_text(), sys.argv[1:], flush=True)
dist.barrier()
if dist.get_rank() == 0:
    for name in ("data/numbers.txt", "pkg/words.py", "train.py"):
        Path(name).write_text("spoiled")
    Path("left.txt").write_text("left")
dist.barrier()
if attempt == 1:
    raise RuntimeError("fails once")
print("found", Path("left.txt").read_text(), flush=True)
"""


def test_each_attempt_runs_the_very_bytes_that_were_uploaded(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    for name, text in {
        "train.py": PROGRAM,
        "pkg/__init__.py": "",
        "pkg/words.py": "HELLO = 'hello'\n",
        "pkg/main.py": "import sys\nfrom pkg.words import HELLO\nprint(HELLO, sys.argv[1:])\n",
        "data/numbers.txt": "123",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code = client.upload_code(folder).id
    two = {"resources": {"num_workers": 2}, "max_retries": 1}
    script = {"code": code, "entrypoint": "train.py", "args": ["--lr", "0.1"]}
    for name in ("train.py", "pkg/words.py"):
        (folder / name).unlink()  # the nodes have nothing of it but what was uploaded
    job = client.wait(client.submit({"script": script, **two}).id, timeout_s=120)
    log = [line.text for line in client.logs(job.id)]
    assert job.state is JobState.SUCCEEDED, (job.reason, log)
    assert job.attempt == 2
    assert log.count("hello 2 123 ['--lr', '0.1']") == 4
    assert log.count("found left") == 2
    assert_promises(embedded, client, job.id)
    # A module of the same code, as `python -m` runs it.
    module = client.submit({"script": {"code": code, "module": "pkg.main", "args": ["x"]}})
    done = client.wait(module.id, timeout_s=60)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert "hello ['x']" in [line.text for line in client.logs(module.id)]


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, features):
        return self.body(features)
"""


def test_a_recipe_for_tables_trains_an_uploaded_model(
    embedded: Service, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "uploaded_net.py").write_text(NET)
    code = client.upload_code(tmp_path / "code").id
    model = {"import": "uploaded_net:Net", "code": code}
    document = {
        "recipe": "tabular_classification",
        "data": {"source": "sklearn://digits"},
        "train": {"epochs": 5, "global_batch_size": 100, "optimizer": {"lr": 0.01}},
        "resources": {"num_workers": 2},
    }
    job = client.submit({**document, "model": {**model, "args": {"width": 32}}})
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    client.download(job.id, tmp_path / "result")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    images, labels = load_digits(return_X_y=True)
    predicted = load(tmp_path / "result").predict(images)
    assert np.mean([int(one) for one in predicted] == labels) > 0.9
    wrong = client.submit({**document, "model": {**model, "args": {"widht": 32}}, "max_retries": 3})
    wrong = client.wait(wrong.id, timeout_s=120)
    assert (wrong.state, wrong.attempt) == (JobState.FAILED, 1)
    assert wrong.reason is not None
    assert "unexpected keyword argument 'widht'" in wrong.reason.message
    assert_promises(embedded, client, job.id)
