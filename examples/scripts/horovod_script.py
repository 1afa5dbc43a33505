"""A script written for Horovod, with one import changed.

    dray submit --workers 2 -- horovod_script.py

Also runs under torchrun and as a single process. Every rank trains on its share of the points on a
line.
"""

from __future__ import annotations

import argparse

import torch

import dray.train.hvd as hvd  # was: import horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    x = torch.rand(512, 1) * 2 - 1
    y = 3.0 * x + 0.5
    x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    @hvd.elastic.run
    def train(state):
        for epoch in range(state.epoch, options.epochs):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            mean = hvd.allreduce(loss)
            if hvd.rank() == 0:
                print(f"epoch {epoch}: loss {mean.item():.6f}", flush=True)
            state.epoch = epoch + 1
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))
    print(f"rank {hvd.rank()} of {hvd.size()}: weight {model.weight.item():.4f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
