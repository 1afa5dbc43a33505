r"""Fit a line with TensorFlow's MultiWorkerMirroredStrategy in a custom training loop.

    dray submit --code . --requirements requirements.txt --workers 2 \
        --set script.framework=tensorflow -- train.py

`framework: tensorflow` sets TF_CONFIG, which the strategy reads.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

BATCH_SIZE = 32
"""Global batch size: samples per step over all workers."""


def samples(seed: int = 0) -> tf.data.Dataset:
    """Noisy points on a line."""
    random = np.random.default_rng(seed)
    x = random.uniform(-1.0, 1.0, (512, 1)).astype(np.float32)
    y = 3.0 * x + 0.5 + random.normal(0.0, 0.01, x.shape).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = tf.Variable([[0.0]])
        bias = tf.Variable([0.0])
    batches = iter(strategy.experimental_distribute_dataset(samples()))

    @tf.function
    def step(batch):
        def compute(x, y):
            """Compute this worker's contribution to the gradient of the mean loss over the global
            batch."""
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x @ weight + bias - y) ** 2) / BATCH_SIZE
            gradients = tape.gradient(loss, [weight, bias])
            context = tf.distribute.get_replica_context()
            for variable, gradient in zip(
                [weight, bias], context.all_reduce("SUM", gradients), strict=True
            ):
                variable.assign_sub(0.3 * gradient)
            return loss

        return strategy.reduce("SUM", strategy.run(compute, args=batch), axis=None)

    for number in range(1, options.steps + 1):
        loss = step(next(batches))
        if number % 20 == 0 or number == options.steps:
            print(f"step {number}: loss {float(loss):.6f}", flush=True)
    resolver = strategy.cluster_resolver
    print(
        f"{resolver.task_type} {resolver.task_id} of {strategy.num_replicas_in_sync}: "
        f"weight {float(weight.read_value()[0, 0]):.4f}, bias {float(bias.read_value()[0]):.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
