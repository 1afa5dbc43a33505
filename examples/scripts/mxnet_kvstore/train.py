"""Fit a line with MXNet's `dist_sync` key-value store: workers push gradients, servers add them up.

    dray submit --code . --requirements requirements.txt job.yaml

Every role runs this file. In the scheduler and the servers, `import mxnet` doesn't return: it
serves requests until the workers exit.
"""

from __future__ import annotations

import argparse

import mxnet as mx
import numpy as np

BATCH_SIZE = 32
"""Samples per worker and step."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    store = mx.kv.create("dist_sync")
    store.init("parameters", mx.nd.zeros(2))  # weight and bias
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.3, rescale_grad=1.0 / store.num_workers))
    random = np.random.default_rng(store.rank)
    parameters = mx.nd.zeros(2)
    parameters.attach_grad()
    for number in range(1, options.steps + 1):
        x = random.uniform(-1.0, 1.0, BATCH_SIZE).astype(np.float32)
        y = 3.0 * x + 0.5 + random.normal(0.0, 0.01, BATCH_SIZE).astype(np.float32)
        with mx.autograd.record():
            loss = ((mx.nd.array(x) * parameters[0] + parameters[1] - mx.nd.array(y)) ** 2).mean()
        loss.backward()
        store.push("parameters", parameters.grad)
        store.pull("parameters", out=parameters)
        if number % 20 == 0 or number == options.steps:
            print(f"step {number}: loss {loss.asscalar():.6f}", flush=True)
    weight, bias = parameters.asnumpy()
    print(
        f"worker {store.rank} of {store.num_workers}: weight {weight:.4f}, bias {bias:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
