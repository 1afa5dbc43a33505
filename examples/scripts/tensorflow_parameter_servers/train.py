"""Fits a line with TensorFlow's parameter servers: a chief gives out the steps, workers compute
them, and servers hold the weights.

    dray submit --code . --requirements requirements.txt job.yaml

Every role runs this file, and sees from TF_CONFIG which role it has.
Workers and servers never end by themselves; the job is over when its chief has ended.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf


def serve(resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver) -> None:
    """Do what the chief asks for, until the job ends this process."""
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        start=True,
    )
    print(f"{resolver.task_type} {resolver.task_id} serves", flush=True)
    server.join()


def coordinate(
    resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver, num_steps: int
) -> None:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
        bias = tf.Variable(0.0)

    def batches() -> tf.data.Dataset:
        random = np.random.default_rng(0)
        x = random.uniform(-1.0, 1.0, 512).astype(np.float32)
        y = 3.0 * x + 0.5 + random.normal(0.0, 0.01, x.shape).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(512).repeat().batch(32)

    @tf.function
    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x * weight + bias - y) ** 2)
        by_weight, by_bias = tape.gradient(loss, [weight, bias])
        weight.assign_sub(0.1 * by_weight)
        bias.assign_sub(0.1 * by_bias)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(num_steps)]
    coordinator.join()
    print(f"step {num_steps}: loss {float(losses[-1].fetch()):.6f}", flush=True)
    print(
        f"chief: weight {float(weight.read_value()):.4f}, bias {float(bias.read_value()):.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    else:
        coordinate(resolver, options.steps)


if __name__ == "__main__":
    main()
