"""Flower's side of the measurement, with its Ray-based simulation.

`main` runs in a separate environment that has only flwr[simulation], torch and numpy, where Ray's
workers also import this module.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

JOB = "DRAY_BENCH_FLOWER_JOB"
"""Environment variable with the path of the job file, an npz."""
_ends: list[float] = []
"""When each round ended, according to `time.perf_counter`. The first entry is the start of the
first round."""


@functools.cache
def job() -> dict[str, Any]:
    """Return the contents of the job file, read once per process: inputs, targets, the clients'
    sample numbers and their ends, and options."""
    torch.set_num_threads(1)
    with np.load(os.environ[JOB]) as file:
        found = {name: file[name] for name in file.files}
    found["inputs"], found["targets"] = map(torch.from_numpy, (found["inputs"], found["targets"]))
    return found


def new_model() -> nn.Module:
    """Return the same perceptron as in dray's job document."""
    width = int(job()["width"])
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def train(message: Message, context: Context) -> Message:
    """Train a client's local epochs."""
    known, client = job(), int(context.node_config["partition-id"])
    start = known["ends"][client - 1] if client else 0
    own = torch.from_numpy(known["numbers"][start : known["ends"][client]])
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=float(known["lr"]))
    total = 0.0
    for _ in range(int(known["local_epochs"])):
        for at in torch.split(own[torch.randperm(len(own))], int(known["batch_size"])):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(known["inputs"][at]), known["targets"][at])
            torch.autograd.backward(loss)
            optimizer.step()
            total += loss.item()
    metrics = MetricRecord({"train_loss": total, "num-examples": len(own)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def serve(grid: Grid, context: Context) -> None:
    """Run timed rounds with all clients, without evaluation."""
    num_clients = len(job()["ends"])
    strategy = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_evaluate_nodes=0,
        min_train_nodes=num_clients,
        min_available_nodes=num_clients,
    )

    def note(round_number: int, arrays: ArrayRecord) -> MetricRecord:
        _ends.append(time.perf_counter())
        return MetricRecord({})

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(new_model().state_dict()),
        num_rounds=int(job()["rounds"]),
        train_config=ConfigRecord({}),
        evaluate_fn=note,
    )


client_app, server_app = ClientApp(), ServerApp()
client_app.train()(train)
server_app.main()(serve)


def main() -> None:
    """Simulate a job, and write the seconds of each round to a file. Arguments: the job file, the
    number of processes, and the file for the result."""
    os.environ[JOB] = sys.argv[1]  # inherited by Ray's workers
    num_processes, target = int(sys.argv[2]), Path(sys.argv[3])
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=len(job()["ends"]),
        backend_config={
            "init_args": {"num_cpus": num_processes, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    pairs = itertools.pairwise(_ends)
    target.write_text(json.dumps([after - before for before, after in pairs]))
