r"""Fit a line with JAX across all processes of a job, each with its part of the batch.

    dray submit --code . --requirements requirements.txt --workers 2 \
        --set script.framework=jax -- train.py

`framework: jax` sets the variables that `jax.distributed.initialize()` reads.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

BATCH_SIZE = 32
"""Global batch size: samples per step over all processes."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    divided = NamedSharding(mesh, PartitionSpec("data"))
    share = BATCH_SIZE // jax.process_count()
    first = jax.process_index() * share

    def mean_square(parameters, x, y):
        weight, bias = parameters
        return jnp.mean((x * weight + bias - y) ** 2)

    @jax.jit
    def step(parameters, x, y):
        loss, gradients = jax.value_and_grad(mean_square)(parameters, x, y)
        return [p - 0.3 * g for p, g in zip(parameters, gradients, strict=True)], loss

    random = np.random.default_rng(0)
    parameters = [jnp.float32(0.0), jnp.float32(0.0)]
    for number in range(1, options.steps + 1):
        x = random.uniform(-1.0, 1.0, BATCH_SIZE).astype(np.float32)
        y = 3.0 * x + 0.5 + random.normal(0.0, 0.01, BATCH_SIZE).astype(np.float32)
        own = slice(first, first + share)
        batch = [
            jax.make_array_from_process_local_data(divided, part[own], part.shape)
            for part in (x, y)
        ]
        parameters, loss = step(parameters, *batch)
        if number % 20 == 0 or number == options.steps:
            print(f"step {number}: loss {float(loss):.6f}", flush=True)
    weight, bias = (float(each) for each in parameters)
    everywhere = multihost_utils.process_allgather(np.float32(weight))
    assert np.all(everywhere == np.float32(weight)), "the processes have different weights"
    print(
        f"process {jax.process_index()} of {jax.process_count()}: "
        f"weight {weight:.4f}, bias {bias:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
